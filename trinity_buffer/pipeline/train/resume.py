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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio.to_thread
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
from trinity_buffer.pipeline.coordination.presence import Presence
from trinity_buffer.pipeline.coordination.waiting import ReportedWait, Stall, one_line
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
from trinity_buffer.store.rows import ConsumerRow, ExperienceRow, StepRow
from trinity_buffer.store.transaction import ReadSession, Session, Transaction
from trinity_buffer.writer import DROPPED, OVERSIZE, invalid


async def steps_at_start(
    experiment: ExperimentHandle, trainer: str, committed: int
) -> tuple[list[StepRow], list[StepRow]]:
    """Return the committed steps to resume after, and the steps leased since.

    The former begin with the last step whose commit recorded the link of the manifest chain.
    """
    steps = await experiment.database.read(trainer_queries.steps_at_start, experiment.key, trainer)
    done = [row for row in steps if row.step <= committed]
    return done, steps[len(done) :]


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
    database: Database, experiment: int, trainer: ConsumerRow, step: int
) -> None:
    """Raise unless ``trainer`` can resume from ``step``: 0, or a step with an intact checkpoint.

    Checked before a rewind is recorded, which cannot be undone.

    Raises:
        CheckpointError: no such checkpoint; the message names the usable ones.
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
            actual = await anyio.to_thread.run_sync(partial(digest_of, path, like=recorded))
            if recorded in (None, actual):
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
    consumer = writer_queries.consumer_row(tx, experiment, trainer)
    of = experiment if not source else log.find_experiment(tx, source)
    assert consumer is not None  # the stream registered it
    assert of is not None  # the row was read from it
    notes = [note for _, _, note in inspection.annotation_rows(tx, of, [row.address])]
    for _, _, step in inspection.deliveries(tx, experiment, [trainer], notes, source):
        if step <= consumer.committed_step:
            raise InvalidArgumentError(
                f"drop: row {uid} was trained in step {step} of trainer {trainer!r}, which is "
                f"committed: go back before it too, resume_from={step - 1}"
            )


async def has_set(experiment: ExperimentHandle, options: StreamOptions) -> bool:
    """Return whether the set of a stream exists; False if the stream waits for it.

    Raises:
        UnknownNameError: the set does not exist, and the stream does not wait.
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
    """Wait until the set of a stream exists, and report the wait.

    Raises:
        UnknownNameError: the experiment is finished without it.
    """
    name = options.strategy or ""

    async def tell() -> str:
        lacking = _unknown(experiment, name, await _sets(experiment))
        return f"trainer {options.consumer!r} waits: {lacking}"

    changes = experiment.database.changes
    stall = Stall(experiment.database, experiment.key, presence)
    wait = ReportedWait(changes, tell, presence, stall=stall)
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
    consumers = await experiment.database.read(writer_queries.consumers, experiment.key)
    return [row.name for row in consumers.values() if row.kind == "strategy"]


def _unknown(experiment: ExperimentHandle, name: str, known: list[str]) -> str:
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


def load_leased(s: ReadSession, loader: RowLoader, lease: BatchLeased) -> LoadedRows:
    """Return the rows of a step that was leased.

    Raises:
        ArchivedSegmentError, CodecError, DamagedSegmentError: unreadable rows; the message names
            the step, some of the rows, and the remedies.
    """
    try:
        return loader.load(s, lease)
    except UNREADABLE as error:
        lost = loader.unreadable(s, lease)
        raise _refusal(s, loader, lease, lost, error) from error


def _refusal(
    s: ReadSession, loader: RowLoader, lease: BatchLeased, lost: Mapping[int, str], error: Exception
) -> TrinityBufferError:
    """Return the error for a step with unreadable rows.

    Args:
        lost: place of a row that can never be read -> why.
        error: the error of loading them, which names the segment.
    """
    kind = type(error) if isinstance(error, UNREADABLE) else DamagedSegmentError
    step = f"step {lease.step} of trainer {lease.consumer!r} was leased and"
    if not lost:
        return kind(f"{step} cannot be read now: {error}")
    why = ", ".join(sorted(set(lost.values())))
    return kind(
        f"{step} {len(lost)} of its {len(lease.groups)} rows can never be read ({why}): "
        f"{_named(s, loader, lease, lost)}. {error}. If no backup has it, let the trainer go on "
        "without these rows: damaged_rows='drop', or `trinity-buffer train --drop-damaged-rows`"
    )


def _named(s: ReadSession, loader: RowLoader, lease: BatchLeased, lost: Mapping[int, str]) -> str:
    uids = loader.uids(s, lease, sorted(lost)[:NAMED_ROWS])
    return ", ".join(uids) + (" ..." if len(lost) > NAMED_ROWS else "")


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
    lengths = rows.pair_lengths(longest=padded) if pairs else rows.facts.lengths
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


class Repartitioner:
    """Repartitions the uncommitted steps of a trainer over its current ranks.

    Args:
        experiment: the trainer's own experiment.
        lease: lease of the trainer.
        loader: loads its rows.
        options: options of the stream.
        dropped: the rows to drop.
    """

    def __init__(
        self,
        experiment: ExperimentHandle,
        lease: TrainerLease,
        loader: RowLoader,
        options: StreamOptions,
        dropped: Dropped,
    ) -> None:
        self._experiment = experiment
        self._lease = lease
        self._loader = loader
        self._options = options
        self._drops = options.damaged_rows == "drop"
        self._dropped = dropped
        self._pairs = experiment.config.get("schema") == "dpo"

    async def repartition(self, steps: Sequence[StepRow]) -> list[StepRow]:
        """Return ``steps``, repartitioned over the current ranks; record each new partition.

        Raises:
            LeaseLostError: another process took over.
            ArchivedSegmentError, CodecError, DamagedSegmentError: as `load_leased`.
        """
        if not steps:
            return []
        database, name = self._experiment.database, self._lease.consumer
        await database.session(partial(self._repartition_steps, steps=steps))
        after = steps[0].step - 1
        return await database.read(trainer_queries.steps, self._experiment.key, name, after=after)

    def _repartition_steps(self, s: Session, steps: Sequence[StepRow]) -> None:
        for row in steps:
            self._repartition_step(s, row)

    def _repartition_step(self, s: Session, row: StepRow) -> None:
        """Record a new partition of a step, if it has changed."""
        leased, world_size = leased_step(s, self._experiment, row), self._options.world_size
        unwanted = self._unwanted(s, leased)
        changes_ranks = len(rows_by_rank(leased.manifest)) != world_size
        if not (unwanted or self._drops or changes_ranks):
            return
        places, rows, lost = self._readable(s, leased, unwanted)
        if not (lost or changes_ranks):
            return
        first = leased.first
        order, plans = s.compute(plan_again, world_size, first, rows, places)
        manifest = repartitioned(first, order, plans)
        sources = ["", *first.sources]
        lost_from = [sources[first.source[place]] if first.source else "" for place in sorted(lost)]
        dealt = StepDealt(
            consumer=self._lease.consumer,
            token=self._lease.token,
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
        s.write(self._record, dealt, self._rejections(s, first, lost))
        if lost:
            why, which = sorted(set(lost.values())), _named(s, self._loader, first, lost)
            details = counted(len(lost), "row"), first.step, ", ".join(why), one_line(which)
            _logger.warning(
                "trainer %r drops %s of step %d (%s): %s", self._lease.consumer, *details
            )

    def _unwanted(self, s: ReadSession, leased: LeasedStep) -> dict[int, str]:
        """Return the rows of a step that this stream drops: place in its first manifest -> why."""
        lease, limit = leased.manifest, self._options.max_tokens
        names, unwanted = ("", *lease.sources), dict[int, str]()
        source = lease.source or [0] * len(lease.groups)
        if limit is not None:
            # As `StepSampler` does; the halves of an expert's pairs were never measured.
            lengths = [] if self._pairs else self._loader.lengths(s, lease)
            if self._pairs:
                with suppress(*UNREADABLE):  # reported when the step is served
                    rows = self._loader.load(s, lease)
                    pairs = zip(source, rows.pair_lengths(longest=True), strict=True)
                    lengths = [0 if of else length for of, length in pairs]
            long = (place for place, length in enumerate(lengths) if length > limit)
            unwanted |= dict.fromkeys(long, OVERSIZE)
        for place, (of, address) in enumerate(zip(source, lease.experiences, strict=True)):
            if address in self._dropped.get(names[of], ()):
                unwanted[place] = DROPPED
        return {leased.order[place]: why for place, why in unwanted.items()}

    def _readable(
        self, s: ReadSession, leased: LeasedStep, unwanted: Mapping[int, str]
    ) -> tuple[list[int], LoadedRows, dict[int, str]]:
        """Return the readable rows of a step and the rows that it loses.

        Rows are given by their places in its first manifest: those that stay, in order; their
        columns; and place -> why of the lost ones, including ``unwanted``.
        """
        places, lost = sorted(leased.order), {**unwanted}
        while True:
            places = [place for place in places if place not in lost]
            lease = repartitioned(leased.first, places, leased.first.microbatches)
            try:
                rows, gone = self._loader.load(s, lease), dict[int, str]()
                # A run may have lost the row that carried its reward.
                if lost and "reward" in self._options.needs:
                    gone = dict.fromkeys(lacking_of("reward", lease, rows), invalid("reward"))
                if not gone:
                    return places, rows, lost
            except UNREADABLE as error:
                gone = self._loader.unreadable(s, lease)
                if not (self._drops and gone):
                    raise _refusal(s, self._loader, lease, gone, error) from error
            lost |= {places[place]: why for place, why in gone.items()}

    def _rejections(
        self, s: ReadSession, first: BatchLeased, lost: Mapping[int, str]
    ) -> list[tuple[int, NewEvent]]:
        """Return (experiment, event) of the rejections of lost rows, others' experiments first.

        Locks are always taken in that order.
        """
        trainer, rejections = self._lease.consumer, []
        source = first.source or [0] * len(first.groups)
        for number in sorted({source[place] for place in lost}, reverse=True):
            places = [place for place in sorted(lost) if source[place] == number]
            key, consumer = self._experiment.key, trainer
            if number:
                key = self._loader.cache_of(s, first.sources[number - 1]).experiment
                consumer = trainer_queries.guest_name(self._experiment.name, trainer)
            rejected = ExperiencesRejected(
                consumer=consumer,
                by="trainer",
                experiences=[first.annotations[place] for place in places],
                reasons=[lost[place] for place in places],
                planned_groups=0,  # they were counted when the step was leased
            )
            rejections.append((key, new_event(rejected)))
        return rejections

    def _record(
        self, tx: Transaction, dealt: StepDealt, rejected: Sequence[tuple[int, NewEvent]]
    ) -> None:
        """Append the partition and the rejections, those of another experiment to its log."""
        mine = []
        for key, event in rejected:
            if key == self._experiment.key:
                mine.append(event)
            else:
                self._lease.append(tx, [event], experiment=key)
        self._lease.append(tx, [*mine, new_event(dealt)])
