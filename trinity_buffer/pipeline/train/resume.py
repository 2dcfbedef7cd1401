"""Starts a trainer after its last commit, and repartitions steps leased but not committed.

A step belongs to its rows, not to the ranks that existed when it was leased. A trainer that resumes
with another number of ranks repartitions uncommitted steps and records that: the rows, the groups,
their order within a group and the denominators stay the same, and so does the gradient.

Rows that became unreadable since the step was leased end the trainer by default. If it may drop
them, the same event removes them from the step, and the same transaction rejects them. So it does
with rows to drop by uid, and with rows above ``max_tokens``: otherwise a row that no memory holds
would come back for ever. The rest of their groups is trained: denominators count the remaining
rows, advantages stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio.to_thread
import numpy as np
from msgspec.structs import replace

from trinity_buffer.algorithm.arguments import did_you_mean
from trinity_buffer.errors import (
    ArchivedSegmentError,
    CheckpointError,
    CodecError,
    ConflictingStrategyError,
    DamagedSegmentError,
    InvalidArgumentError,
    TrinityBufferError,
    UnknownNameError,
)
from trinity_buffer.events import (
    BatchLeased,
    ConsumerRegistered,
    ExperiencesRejected,
    StepDealt,
    StepsCommitted,
)
from trinity_buffer.identity import parse_uid
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.coordination.lease import TrainerLease
from trinity_buffer.pipeline.coordination.waiting import Presence, ReportedWait, one_line
from trinity_buffer.pipeline.handle import ExperimentHandle, fact_at, new_event, now_us
from trinity_buffer.pipeline.load.columns import LoadedRows, RowLoader
from trinity_buffer.pipeline.manifest import (
    LeasedStep,
    MicroBatchPlan,
    leased_steps,
    manifest_digest,
    plan_microbatches,
    plans_of,
    repartitioned,
    rows_by_rank,
)
from trinity_buffer.pipeline.train.checkpoint import digest_of, found_again, require_digest
from trinity_buffer.pipeline.train.collate import lacking_of
from trinity_buffer.pipeline.train.options import Resume, StreamOptions
from trinity_buffer.store import inspection, log, trainer_queries, writer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.rows import ConsumerRow, StepRow, written_as
from trinity_buffer.store.transaction import ReadSession, Session, Transaction
from trinity_buffer.writer import DROPPED, OVERSIZE, invalid


async def last_commit(
    experiment: ExperimentHandle, trainer: str, last: StepRow, chain: bytes
) -> Resume:
    """Return the commit of ``last``, the last committed step of the live line, to resume from.

    Args:
        chain: link of the manifest chain after it.

    Raises:
        CheckpointError: the checkpoint is missing or has changed.
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
    assert row.committed_at is not None  # steps before a commit are committed
    (stored,) = await experiment.database.read(log.read_at, experiment.key, [row.committed_at])
    return fact_at(experiment.name, stored, StepsCommitted)


async def _skipped_in_a_row(
    experiment: ExperimentHandle, trainer: str, commit: StepsCommitted
) -> int:
    """Return the number of consecutive last steps, including ``commit``, without a change."""
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
    database: Database, experiment: int, trainer: str, step: int
) -> None:
    """Raise unless ``trainer`` can resume from ``step``: 0, or a step with an intact checkpoint.

    Checked before a rewind is recorded, which cannot be undone, or what it is to train with.

    Raises:
        CheckpointError: no such checkpoint; the message names the usable ones.
    """
    if step == 0:
        return
    read, of = database.read, (experiment, trainer)
    consumer = await read(writer_queries.consumer_row, *of)
    committed = 0 if consumer is None else consumer.committed_step
    wanted = await read(trainer_queries.step_at, *of, step)
    lacks = "has no checkpoint committed at that step"
    if wanted is not None and step <= committed and wanted.checkpoint is not None:
        lacks = f"committed {wanted.checkpoint}, "
        path = _path_of(wanted, database.folder)
        if path.exists():
            recorded = wanted.checkpoint_digest
            actual = await anyio.to_thread.run_sync(partial(digest_of, path, like=recorded))
            if recorded in (None, actual):
                return
            lacks += "whose content is another now (restore it)"
        else:
            lacks += "which is gone (`train --keep-checkpoints` keeps it)"
    live = (await read(trainer_queries.steps, *of))[:committed]
    others = (row for row in live if row.step != step and row.checkpoint is not None)
    there = [str(row.step) for row in others if _path_of(row, database.folder).exists()]
    raise CheckpointError(
        f"resume_from={step}: trainer {trainer!r} {lacks}; the last committed step is "
        f"{committed}, there are checkpoints of {', '.join(there[-10:]) or 'none'}"
    )


def _path_of(row: StepRow, folder: Path | None) -> Path:
    return found_again(row.checkpoint or "", row.checkpoint_digest, folder)


async def register(experiment: ExperimentHandle, consumer: str, annotation_set: str) -> ConsumerRow:
    """Return the trainer ``consumer`` of ``annotation_set``, and register it if it is new.

    Raises:
        ConflictingStrategyError: the name belongs to another consumer.
    """
    config = {"strategy": annotation_set}
    event = new_event(ConsumerRegistered(consumer=consumer, kind="trainer", config=config))
    row = await experiment.database.write(
        writer_queries.registered, experiment.key, consumer, event, clock=now_us
    )
    if row.kind != "trainer" or row.config != config:
        raise ConflictingStrategyError(
            f"consumer {consumer!r} is a {row.kind} on {row.config.get('strategy')!r}, not a "
            f"trainer on {annotation_set!r}: give this one a name of its own, consumer="
        )
    return row


Dropped = Mapping[str, Collection[int]]
"""Name of an experiment, "" for the trainer's own -> addresses of experiences to drop."""


async def rows_to_drop(
    experiment: ExperimentHandle, expert: ExperimentHandle | None, options: StreamOptions
) -> Dropped:
    """Return the rows that a stream drops.

    Raises:
        InvalidArgumentError: an invalid uid, or one whose row is in a committed step.
        UnknownNameError: no row has this uid.
    """
    eids = {uid: parse_uid(uid) for uid in options.drop}
    sources = {"": experiment} if expert is None else {"": experiment, expert.name: expert}

    def find(tx: Transaction) -> Dropped:
        trainer = writer_queries.consumer_row(tx, experiment.key, options.consumer)
        assert trainer is not None  # the stream registered it
        dropped: dict[str, set[int]] = {source: set() for source in sources}
        for uid, eid in eids.items():
            rows = ((source, inspection.find(tx, of.key, eid)) for source, of in sources.items())
            stored = next(((source, row) for source, row in rows if row is not None), None)
            if stored is None:
                where = " and ".join(repr(of.name) for of in sources.values())
                raise UnknownNameError(f"drop: no row {uid} is stored in experiment {where}")
            source, row = stored
            annotated = inspection.annotation_rows(tx, sources[source].key, [row.address])
            notes = [note for _, _, note in annotated]
            for _, _, step in inspection.deliveries(
                tx, experiment.key, [trainer.name], notes, source
            ):
                if step <= trainer.committed_step:
                    raise InvalidArgumentError(
                        f"drop: row {uid} was trained in step {step} of trainer {trainer.name!r}, "
                        f"which is committed: go back before it too, resume_from={step - 1}"
                    )
            dropped[source].add(row.address)
        return dropped

    return await experiment.database.read(find) if eids else {}


async def has_set(experiment: ExperimentHandle, options: StreamOptions) -> bool:
    """Return whether the set of a stream exists; False if the stream waits for it.

    Raises:
        UnknownNameError: the set does not exist, and the stream does not wait.
    """
    lacking = "" if options.strategy is None else await _lacking_set(experiment, options.strategy)
    if lacking and not (options.follow and options.wait_for_set):
        raise UnknownNameError(lacking)
    return not lacking


async def wait_for_set(
    experiment: ExperimentHandle, options: StreamOptions, presence: Presence
) -> None:
    """Wait until the set of a stream exists, and report the wait.

    Raises:
        UnknownNameError: the experiment is finished without it.
    """
    name = options.strategy or ""

    async def tell() -> str:
        return f"trainer {options.consumer!r} waits: {await _lacking_set(experiment, name)}"

    wait = ReportedWait(experiment.database, experiment.key, tell, presence)
    while True:
        state = await experiment.database.changes.state()
        finished = await experiment.is_finished()
        lacking = await _lacking_set(experiment, name)
        if not lacking:
            wait.over()
            return
        if finished:
            raise UnknownNameError(f"the experiment was finished: {lacking}")
        await wait.changed(state)


async def _lacking_set(experiment: ExperimentHandle, name: str) -> str:
    """Return that there is no annotation set ``name``, and the remedy; "" if there is one."""
    consumers = await experiment.database.read(writer_queries.consumers, experiment.key)
    known = [row.name for row in consumers.values() if row.kind == "strategy"]
    if name in known:
        return ""
    return (
        f"experiment {experiment.name!r} has no annotation set {name!r} (there: "
        f"{', '.join(known) or 'none'}{did_you_mean(name, known)}); no process annotates it: run "
        f"a strategy of this name, `trinity-buffer annotate --name {name} --follow`"
    )


UNREADABLE = (ArchivedSegmentError, CodecError, DamagedSegmentError)
"""Errors of rows that cannot be read."""

NAMED_ROWS = 3
"""At most so many unreadable rows are named in a message."""

_logger = logging.getLogger(__name__)


def leased_step(s: ReadSession, experiment: ExperimentHandle, row: StepRow) -> LeasedStep:
    """Return a leased step with its current partition, as it is served.

    Raises:
        CodecError: the body of its event is damaged.
    """
    steps = s.read(leased_steps, experiment.key, experiment.name, [row.leased_at])
    step = steps[row.leased_at]
    # What weights go through is named by its content, not by what the log says of it.
    manifest = replace(step.manifest, digest=manifest_digest(step.manifest))
    return step._replace(manifest=manifest)


def sound_rows(
    s: ReadSession,
    loader: RowLoader,
    lease: BatchLeased,
    places: Sequence[int] | None = None,
    lost: Mapping[int, str] | None = None,
    unfit: Callable[[BatchLeased, LoadedRows], Mapping[int, str]] | None = None,
    *,
    drops: bool,
) -> tuple[list[int], LoadedRows, dict[int, str]]:
    """Load the rows of a step that can be trained.

    Args:
        lease: the manifest of the step; rows are named by their places in it.
        places: the rows to load, in order; None: all.
        lost: row -> why, of those to leave out.
        unfit: returns row -> why, of those that cannot be trained, by their places in the manifest
            that it is passed.
        drops: whether rows that can never be read may be left out too.

    Returns:
        The rows that stay, their columns, and row -> why of all others.

    Raises:
        ArchivedSegmentError, CodecError, DamagedSegmentError: unreadable rows; the message names
            the step, some of the rows, and the remedies.
    """
    left, gone = [*range(len(lease.groups))] if places is None else [*places], dict(lost or {})
    while True:  # each round loses at least one row
        left = [place for place in left if place not in gone]
        whole = len(left) == len(lease.groups)
        part = lease if whole else repartitioned(lease, left, lease.microbatches)
        try:
            rows = loader.load(s, part)
            why = {} if unfit is None else unfit(part, rows)
            if not why:
                return left, rows, gone
        except UNREADABLE as error:
            # An archive that is only unavailable at the moment must not lead to rejections.
            why = loader.unreadable(s, part)
            if not (drops and why):
                raise refusal(s, loader, part, why, error, _DROP) from error
        gone |= {left[place]: reason for place, reason in why.items()}


def unwanted(
    lease: BatchLeased, lengths: Sequence[int], dropped: Dropped, limit: int | None
) -> dict[int, str]:
    """Return place -> why, of the rows of a step that are longer than ``limit`` or ``dropped``."""
    names, source = ("", *lease.sources), lease.source or [0] * len(lease.groups)
    why = dict[int, str]()
    if limit is not None:
        why = {place: OVERSIZE for place, size in enumerate(lengths) if size > limit}
    if any(dropped.values()):
        for place, (of, address) in enumerate(zip(source, lease.experiences, strict=True)):
            if address in dropped.get(names[of], ()):
                why[place] = DROPPED
    return why


def reject(
    s: Session,
    holder: TrainerLease,
    loader: RowLoader,
    lease: BatchLeased,
    why: Mapping[int, str],
    *,
    planned_groups: int = 0,
    also: Sequence[NewEvent] = (),
) -> None:
    """Record in one transaction that rows of a step are rejected, and the events ``also``.

    Args:
        holder: lease of the trainer.
        loader: knows the experiments of the step.
        lease: the manifest of the step.
        why: place -> reason, of the rejected rows.
        planned_groups: number of planned groups that lose their last row.
    """
    source, own = lease.source or [0] * len(lease.groups), loader.events
    rejected: list[tuple[int, NewEvent]] = []
    # Others' experiments first: locks are always taken in that order.
    for number in sorted({source[place] for place in why}, reverse=True):
        places = [place for place in sorted(why) if source[place] == number]
        key, consumer = own.experiment, holder.consumer
        if number:
            key = loader.cache_of(s, lease.sources[number - 1]).experiment
            consumer = trainer_queries.guest_name(own.name, consumer)
        fact = ExperiencesRejected(
            consumer=consumer,
            by="trainer",
            experiences=[lease.annotations[place] for place in places],
            reasons=[why[place] for place in places],
            planned_groups=0 if number else planned_groups,
        )
        rejected.append((key, new_event(fact)))

    def append(tx: Transaction) -> None:
        for key, event in rejected:
            if key != own.experiment:
                holder.append(tx, [event], experiment=key)
        mine = [event for key, event in rejected if key == own.experiment]
        if mine or also:
            holder.append(tx, [*mine, *also])

    s.write(append)


_DROP = (
    "let the trainer go on without these rows: damaged_rows='drop', or `trinity-buffer train "
    "--drop-damaged-rows`"
)


def refusal(
    s: ReadSession,
    loader: RowLoader,
    lease: BatchLeased,
    lost: Mapping[int, str],
    error: Exception,
    remedy: str,
) -> TrinityBufferError:
    """Return the error for a step with unreadable rows.

    Args:
        lost: place of a row that can never be read -> why.
        error: the error of loading them, which names the segment.
        remedy: what to do if no backup has them.
    """
    kind = type(error) if isinstance(error, UNREADABLE) else DamagedSegmentError
    step = f"step {lease.step} of trainer {lease.consumer!r}"
    if not lost:
        return kind(f"{step} cannot be read now: {error}")
    why = ", ".join(sorted(set(lost.values())))
    return kind(
        f"{step} was leased and {len(lost)} of its {len(lease.groups)} rows can never be read "
        f"({why}): {_named(s, loader, lease, lost)}. {error}. If no backup has it, {remedy}"
    )


def _named(s: ReadSession, loader: RowLoader, lease: BatchLeased, lost: Mapping[int, str]) -> str:
    places = sorted(lost)[:NAMED_ROWS]
    rows = zip(loader.uids(s, lease, places), places, strict=True)
    named = [f"{uid} at {written_as(lease.experiences[place])}" for uid, place in rows]
    return ", ".join(named) + (" ..." if len(lost) > NAMED_ROWS else "")


def plan_again(
    world_size: int, first: BatchLeased, rows: LoadedRows, readable: Sequence[int]
) -> tuple[list[int], list[MicroBatchPlan]]:
    """Return an order of a manifest's rows, and micro-batches over it for ``world_size`` ranks.

    No micro-batch computes more than the largest recorded one, counted without lost rows: a lost
    row may have exceeded the budget.

    Args:
        world_size: number of ranks.
        first: the manifest.
        rows: columns of the readable rows.
        readable: places of these rows in the manifest, in order.
    """
    places, plans = [*readable], plans_of(first)
    if len(rows_by_rank(first)) == world_size and len(places) == len(first.groups):
        return places, plans
    padded, pairs = first.layout == "padded", bool(rows.field("chosen").blocks)
    columns = rows.pair_lengths(longest=padded) if pairs else rows.facts.lengths
    lengths: list[int] = columns.tolist()
    length_at, largest = dict(zip(places, lengths, strict=True)), 1
    for plan in plans:
        own_lengths = [length_at[row] for row in range(plan.start, plan.stop) if row in length_at]
        height = len(own_lengths) * (2 if pairs else 1)
        largest = max(largest, height * max(own_lengths, default=0) if padded else sum(own_lengths))
    order, plans = plan_microbatches(
        lengths,
        [first.groups[place] for place in places],
        layout="padded" if padded else "packed",
        tokens_per_microbatch=largest,
        world_size=world_size,
        pairs=pairs,
        by_length=False,  # the order within a group is part of the gradient
    )
    return [places[row] for row in order], plans


async def repartition(
    experiment: ExperimentHandle,
    holder: TrainerLease,
    loader: RowLoader,
    options: StreamOptions,
    dropped: Dropped,
    steps: Sequence[StepRow],
) -> list[StepRow]:
    """Return uncommitted ``steps``, repartitioned over the ranks; record each new partition.

    Args:
        experiment: the trainer's own experiment.
        holder: lease of the trainer.
        loader: loads its rows.
        options: options of the stream.
        dropped: the rows to drop.

    Raises:
        LeaseLostError: another process took over.
        ArchivedSegmentError, CodecError, DamagedSegmentError: as `sound_rows`.
    """
    if not steps:
        return []

    def repartition_all(s: Session) -> None:
        for row in steps:
            _repartition_step(s, experiment, holder, loader, options, dropped, row)

    database, after = experiment.database, steps[0].step - 1
    await database.session(repartition_all)
    return await database.read(trainer_queries.steps, experiment.key, holder.consumer, after=after)


def _repartition_step(
    s: Session,
    experiment: ExperimentHandle,
    holder: TrainerLease,
    loader: RowLoader,
    options: StreamOptions,
    dropped: Dropped,
    row: StepRow,
) -> None:
    """Record a new partition of a step, if it has changed."""
    leased, limit = leased_step(s, experiment, row), options.max_tokens
    first, drops, world_size = leased.first, options.damaged_rows == "drop", options.world_size
    lengths = np.zeros(0, np.int64)
    if limit is not None and experiment.config.get("schema") != "dpo":
        lengths = loader.lengths(s, leased.manifest)
    elif limit is not None:
        with suppress(*UNREADABLE):  # reported when the step is served
            rows = loader.load(s, leased.manifest)
            # As `StepSampler` does: the halves of an expert's pairs were never measured.
            lengths = np.where(rows.expert, 0, rows.pair_lengths(longest=True))
    leaving = {
        leased.order[place]: why
        for place, why in unwanted(leased.manifest, lengths.tolist(), dropped, limit).items()
    }
    changes_ranks = len(rows_by_rank(leased.manifest)) != world_size
    if not (leaving or drops or changes_ranks):
        return

    def without_reward(part: BatchLeased, rows: LoadedRows) -> dict[int, str]:
        # A run may have lost the row that carried its reward.
        if len(part.groups) == len(leased.order) or "reward" not in options.needs:
            return {}
        return dict.fromkeys(lacking_of("reward", part, rows), invalid("reward"))

    places, rows, lost = sound_rows(
        s, loader, first, sorted(leased.order), leaving, without_reward, drops=drops
    )
    if not (lost or changes_ranks):
        return
    order, plans = s.compute(plan_again, world_size, first, rows, places)
    manifest, sources = repartitioned(first, order, plans), ["", *first.sources]
    lost_from = [sources[first.source[place]] if first.source else "" for place in sorted(lost)]
    dealt = StepDealt(
        consumer=holder.consumer,
        token=holder.token,
        step=first.step,
        leased_at=leased.position,
        world_size=world_size,
        order=order,
        microbatches=manifest.microbatches,
        digest=manifest.digest,
        dropped=[first.annotations[place] for place in sorted(lost)],
        dropped_from=lost_from if any(lost_from) else [],
        num_groups=manifest.num_groups if lost else None,
    )
    # Planned groups were counted when the step was leased.
    reject(s, holder, loader, first, lost, also=[new_event(dealt)])
    if lost:
        why, which = sorted(set(lost.values())), _named(s, loader, first, lost)
        details = counted(len(lost), "row"), first.step, ", ".join(why), one_line(which)
        _logger.warning("trainer %r drops %s of step %d (%s): %s", holder.consumer, *details)
