"""How a trainer begins: registered, on a set that is there, after its last commit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import anyio.to_thread

from trinity_buffer.algorithm.arguments import did_you_mean
from trinity_buffer.errors import (
    CheckpointError,
    ConflictingStrategyError,
    InvalidArgumentError,
    UnknownNameError,
)
from trinity_buffer.events import ConsumerRegistered, StepsCommitted
from trinity_buffer.identity import parse_uid
from trinity_buffer.pipeline.events import fact_at, new_event, now_us
from trinity_buffer.pipeline.experiment_handle import ExperimentHandle
from trinity_buffer.pipeline.presence import Presence
from trinity_buffer.pipeline.proof.checkpoint import digest_of, found_again, require_digest
from trinity_buffer.pipeline.spoken_wait import SpokenWait
from trinity_buffer.pipeline.stall import Stall
from trinity_buffer.pipeline.streaming.stream_options import Resume, StreamOptions
from trinity_buffer.store import inspection, log, queries, trainer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.rows import ConsumerRow, ExperienceRow, StepRow
from trinity_buffer.store.transaction import Transaction


async def steps_at_start(
    experiment: ExperimentHandle, trainer: str, committed: int
) -> tuple[list[StepRow], list[StepRow]]:
    """Return the steps that ``trainer`` goes on after, and those that it was handed since.

    The former are the last committed one, and those before it up to one whose commit recorded the
    link of the chain, if it did not itself.
    """
    steps = await experiment.database.read(trainer_queries.steps_at_start, experiment.key, trainer)
    done = [row for row in steps if row.step <= committed]
    return done, steps[len(done) :]


async def last_commit(
    experiment: ExperimentHandle, trainer: str, last: StepRow, chain: bytes
) -> Resume:
    """Return where ``trainer`` goes on after ``last``, the last committed step of the live line.

    Args:
        chain: link of the manifest chain after it.

    Raises:
        CheckpointError: the checkpoint is missing or is not the one that was committed.
    """
    path = None if last.checkpoint is None else _path_of(last, experiment.database.folder)
    if path is not None and last.checkpoint_digest is not None:
        await anyio.to_thread.run_sync(require_digest, path, last.checkpoint_digest)
    commit = await _commit_of(experiment, last)
    skipped = await _skipped_in_a_row(experiment, trainer, commit)
    return Resume(
        last.step,
        path,
        last.checkpoint_digest,
        chain,
        skipped,
        metrics=commit.metrics,
        environment=commit.environment,
    )


async def _commit_of(experiment: ExperimentHandle, row: StepRow) -> StepsCommitted:
    assert row.committed_at is not None  # on the live line all before a commit are
    (stored,) = await experiment.database.read(log.read_at, experiment.key, [row.committed_at])
    return fact_at(experiment.name, stored, StepsCommitted)


async def _skipped_in_a_row(
    experiment: ExperimentHandle, trainer: str, commit: StepsCommitted
) -> int:
    """Return how many of the last steps up to those of ``commit`` changed no weight."""
    read, skipped = experiment.database.read, 0
    while True:
        for step in reversed(commit.steps):
            if step not in commit.skipped_steps:
                return skipped
            skipped += 1
        before = commit.steps[0] - 1
        if before == 0:
            return skipped
        (row,) = await read(
            trainer_queries.steps, experiment.key, trainer, after=before - 1, limit=1
        )
        commit = await _commit_of(experiment, row)


async def require_checkpoint_of(
    database: Database, experiment: int, trainer: ConsumerRow, step: int
) -> None:
    """Return if ``trainer`` can go on from ``step``: 0, or one whose checkpoint is as committed.

    Asked before a rewind is recorded, which nobody could take back.

    Raises:
        CheckpointError: there is no such checkpoint; the message names those that there are.
    """
    if step == 0:
        return
    read, of = database.read, (experiment, trainer.name)
    rows = await read(trainer_queries.steps, *of, after=step - 1, limit=1)
    wanted = next((row for row in rows if row.step <= trainer.committed_step), None)
    lacks = "has no checkpoint committed at that step"
    if wanted is not None and wanted.checkpoint is not None:
        lacks = f"committed {wanted.checkpoint}, "
        path = _path_of(wanted, database.folder)
        if path.exists():
            recorded = wanted.checkpoint_digest
            found = await anyio.to_thread.run_sync(partial(digest_of, path, like=recorded))
            if recorded in (None, found):
                return
            lacks += "whose content is another now (restore it)"
        else:
            lacks += "which is gone (`train --keep-checkpoints` keeps it)"
    live = (await read(trainer_queries.steps, *of))[: trainer.committed_step]
    others = (row for row in live if row.step != step and row.checkpoint is not None)
    there = [str(row.step) for row in others if _path_of(row, database.folder).exists()]
    raise CheckpointError(
        f"resume_from={step}: trainer {trainer.name!r} {lacks}; the last committed step is "
        f"{trainer.committed_step}, there are checkpoints of {', '.join(there[-10:]) or 'none'}"
    )


def _path_of(row: StepRow, folder: Path | None) -> Path:
    return found_again(row.checkpoint or "", row.checkpoint_digest, folder)


async def register(experiment: ExperimentHandle, consumer: str, annotation_set: str) -> ConsumerRow:
    """Return the trainer ``consumer`` of ``annotation_set``, registered now if it was not.

    Raises:
        ConflictingStrategyError: the name is taken by something else.
    """
    config = {"strategy": annotation_set}
    event = new_event(ConsumerRegistered(consumer=consumer, kind="trainer", config=config))
    row = await experiment.database.write(
        queries.registered, experiment.key, consumer, event, clock=now_us
    )
    if row.kind != "trainer" or row.config != config:
        raise ConflictingStrategyError(
            f"consumer {consumer!r} is a {row.kind} on {row.config.get('strategy')!r}, not a "
            f"trainer on {annotation_set!r}: give this one a name of its own, consumer="
        )
    return row


Dropped = Mapping[str, Collection[int]]
"""Name of an experiment, "" for the trainer's own -> addresses of experiences that are dropped."""


async def rows_to_drop(
    experiment: ExperimentHandle, expert: ExperimentHandle | None, options: StreamOptions
) -> Dropped:
    """Return the rows that a stream shall drop.

    Raises:
        InvalidArgumentError: what is named is no uid, or its row is in a committed step.
        UnknownNameError: there is no row of this uid.
    """
    eids = {uid: parse_uid(uid) for uid in options.drop}
    sources = {"": experiment} if expert is None else {"": experiment, expert.name: expert}

    def find(tx: Transaction) -> Dropped:
        dropped: dict[str, set[int]] = {source: set() for source in sources}
        for uid, eid in eids.items():
            for source, of in sources.items():
                row = inspection.find(tx, of.key, eid)
                if row is not None:
                    _require_not_committed(tx, experiment.key, options.consumer, uid, row, source)
                    dropped[source].add(row.address)
                    break
            else:
                where = " and ".join(repr(of.name) for of in sources.values())
                raise UnknownNameError(f"drop: no row {uid} is stored in experiment {where}")
        return dropped

    return await experiment.database.read(find) if eids else {}


def _require_not_committed(
    tx: Transaction, experiment: int, trainer: str, uid: str, row: ExperienceRow, source: str
) -> None:
    consumer = queries.consumer_row(tx, experiment, trainer)
    of = experiment if not source else log.find_experiment(tx, source)
    assert consumer is not None  # it is registered
    assert of is not None  # the row is of it
    notes = [note for _, _, note in inspection.annotation_rows(tx, of, [row.address])]
    for _, _, step in inspection.deliveries(tx, experiment, [trainer], notes, source):
        if step <= consumer.committed_step:
            raise InvalidArgumentError(
                f"drop: row {uid} was trained in step {step} of trainer {trainer!r}, which is "
                f"committed: go back before it too, resume_from={step - 1}"
            )


async def has_set(experiment: ExperimentHandle, options: StreamOptions) -> bool:
    """Return whether the set of a stream is there; False if it is to be waited for.

    Raises:
        UnknownNameError: it is not, and no wait was asked for.
    """
    known = await _sets(experiment)
    if options.strategy is None or options.strategy in known:
        return True
    if not (options.follow and options.wait_for_set):
        raise UnknownNameError(_unknown(experiment, options.strategy, known))
    return False


async def wait_for_set(
    experiment: ExperimentHandle, options: StreamOptions, presence: Presence
) -> None:
    """Return once somebody annotates the set of a stream; say so aloud meanwhile.

    Raises:
        UnknownNameError: the experiment is finished without it.
    """
    name = options.strategy or ""

    async def tell() -> str:
        lacking = _unknown(experiment, name, await _sets(experiment))
        return f"trainer {options.consumer!r} waits: {lacking}"

    changes = experiment.database.changes
    stall = Stall(experiment.database, experiment.key, presence)
    wait = SpokenWait(changes, tell, presence, stall=stall)
    while True:
        state = await changes.state()
        finished = await experiment.is_finished()
        known = await _sets(experiment)
        if name in known:
            wait.over()
            return
        if finished:
            lacking = _unknown(experiment, name, known)
            raise UnknownNameError(f"the experiment was finished: {lacking}")
        await wait.changed(state)


async def _sets(experiment: ExperimentHandle) -> list[str]:
    consumers = await experiment.database.read(queries.consumers, experiment.key)
    return [row.name for row in consumers.values() if row.kind == "strategy"]


def _unknown(experiment: ExperimentHandle, name: str, known: list[str]) -> str:
    return (
        f"experiment {experiment.name!r} has no annotation set {name!r} (there: "
        f"{', '.join(known) or 'none'}{did_you_mean(name, known)}); no process annotates it: run "
        f"a strategy of this name, `trinity-buffer annotate --name {name} --follow`"
    )
