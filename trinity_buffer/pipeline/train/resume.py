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
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread

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
from trinity_buffer.pipeline.handle import ExperimentHandle, decoded, fact_at, new_event, now_us
from trinity_buffer.pipeline.load.columns import LoadedRows, RowLoader
from trinity_buffer.pipeline.manifest import Manifest, MicroBatchPlan, plan_microbatches, plans_of
from trinity_buffer.pipeline.train.checkpoint import digest_of, found_again, require_digest
from trinity_buffer.pipeline.train.collate import lacking_of, row_lengths
from trinity_buffer.pipeline.train.options import Resume, StreamOptions
from trinity_buffer.store import inspection, log, trainer_queries, writer_queries
from trinity_buffer.store.database import Database
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


class LeasedStep(NamedTuple):
    """A leased step: its position, its first manifest, and the manifest it is served by.

    ``order`` are the places of the served rows in the first manifest; ``log_head`` belongs to the
    last event that determines the partition.
    """

    leased_at: int
    first: Manifest
    order: Sequence[int]
    manifest: Manifest
    log_head: bytes | None


def leased_step(s: ReadSession, experiment: ExperimentHandle, row: StepRow) -> LeasedStep:
    """Return a leased step with its current partition.

    Raises:
        CodecError: the body of its event is damaged.
    """
    (stored,) = s.read(log.read_at, experiment.key, [row.leased_at])
    dealt, head = decoded(experiment.name, stored).fact, stored.head
    if not isinstance(dealt, StepDealt):
        first = Manifest.of(fact_at(experiment.name, stored, BatchLeased))
        return LeasedStep(row.leased_at, first, range(len(first.groups)), first, head)
    (stored,) = s.read(log.read_at, experiment.key, [dealt.leased_at])
    first = Manifest.of(fact_at(experiment.name, stored, BatchLeased))
    manifest = first.repartitioned(dealt.order, plans_of(dealt))
    return LeasedStep(dealt.leased_at, first, dealt.order, manifest, head)


def load_leased(s: ReadSession, loader: RowLoader, manifest: Manifest, trainer: str) -> LoadedRows:
    """Return the rows of a step that ``trainer`` leased.

    Raises:
        ArchivedSegmentError, CodecError, DamagedSegmentError: unreadable rows; the message names
            the step, some of the rows, and the remedies.
    """
    try:
        return loader.load(s, manifest)
    except UNREADABLE as error:
        lost = loader.unreadable(s, manifest)
        raise _refusal(s, loader, manifest, trainer, lost, error) from error


def _refusal(
    s: ReadSession,
    loader: RowLoader,
    manifest: Manifest,
    trainer: str,
    lost: Mapping[int, str],
    error: Exception,
) -> TrinityBufferError:
    """Return the error for a step with unreadable rows.

    Args:
        lost: place of a row that can never be read -> why.
        error: the error of loading them, which names the segment.
    """
    kind = type(error) if isinstance(error, UNREADABLE) else DamagedSegmentError
    step = f"step {manifest.step} of trainer {trainer!r} was leased and"
    if not lost:
        return kind(f"{step} cannot be read now: {error}")
    why = ", ".join(sorted(set(lost.values())))
    return kind(
        f"{step} {len(lost)} of its {len(manifest.groups)} rows can never be read ({why}): "
        f"{_named(s, loader, manifest, lost)}. {error}. If no backup has it, let the trainer go on "
        "without these rows: damaged_rows='drop', or `trinity-buffer train --drop-damaged-rows`"
    )


def _named(s: ReadSession, loader: RowLoader, manifest: Manifest, lost: Mapping[int, str]) -> str:
    uids = loader.uids(s, manifest, sorted(lost)[:NAMED_ROWS])
    return ", ".join(uids) + (" ..." if len(lost) > NAMED_ROWS else "")


def repartitioned(
    world_size: int, first: Manifest, rows: LoadedRows, readable: Sequence[int] | None = None
) -> tuple[list[int], list[MicroBatchPlan]]:
    """Return an order of a manifest's rows, and micro-batches over it for ``world_size`` ranks.

    No micro-batch computes more than the largest recorded one, counted without lost rows: a lost
    row may have exceeded the budget.

    Args:
        world_size: number of ranks.
        first: the manifest.
        rows: columns of the readable rows.
        readable: places of these rows in the manifest, in order; None: all.
    """
    places = [*range(len(first.groups))] if readable is None else [*readable]
    if first.world_size == world_size and len(places) == len(first.groups):
        return places, [*first.microbatches]
    left = first.repartitioned(places, first.microbatches)
    pairs = bool(rows.field("chosen").blocks)
    lengths = row_lengths(left, rows) if pairs else rows.facts.lengths
    order, plans = plan_microbatches(
        lengths,
        left.groups,
        layout=first.layout,
        tokens_per_microbatch=_largest(first, dict(zip(places, lengths, strict=True)), pairs=pairs),
        world_size=world_size,
        pairs=pairs,
        by_length=False,  # the order within a group is part of the gradient
    )
    return [places[row] for row in order], plans


def _largest(first: Manifest, lengths: Mapping[int, int], *, pairs: bool) -> int:
    """Return the tokens that the largest micro-batch of a manifest computes for readable rows.

    Args:
        lengths: place of a readable row -> its tokens, of a pair as in `plan_microbatches`.
    """
    padded, largest = first.layout == "padded", 1
    for plan in first.microbatches:
        own_lengths = [lengths[row] for row in range(plan.start, plan.stop) if row in lengths]
        height = len(own_lengths) * (2 if pairs else 1)
        largest = max(largest, height * max(own_lengths, default=0) if padded else sum(own_lengths))
    return largest


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
        self._world_size = options.world_size
        self._drops = options.damaged_rows == "drop"
        self._dropped = dropped
        self._max_tokens = options.max_tokens
        self._needs = options.needs
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
        await database.session(lambda s: self._repartition_steps(s, steps))
        after = steps[0].step - 1
        return await database.read(trainer_queries.steps, self._experiment.key, name, after=after)

    def _repartition_steps(self, s: Session, steps: Sequence[StepRow]) -> None:
        for row in steps:
            leased = leased_step(s, self._experiment, row)
            unwanted = self._unwanted(s, leased)
            if unwanted or self._drops or leased.manifest.world_size != self._world_size:
                self._repartition_step(s, leased, unwanted)

    def _unwanted(self, s: ReadSession, leased: LeasedStep) -> dict[int, str]:
        """Return the rows of a step that this stream drops: place in its first manifest -> why."""
        manifest = leased.manifest
        names = ("", *manifest.sources)
        source = manifest.source or (0,) * len(manifest.groups)
        unwanted = dict.fromkeys(self._too_long(s, manifest, source), OVERSIZE)
        for place, (of, address) in enumerate(zip(source, manifest.experiences, strict=True)):
            if address in self._dropped.get(names[of], ()):
                unwanted[place] = DROPPED
        return {leased.order[place]: why for place, why in unwanted.items()}

    def _too_long(self, s: ReadSession, manifest: Manifest, source: Sequence[int]) -> list[int]:
        """Return the places of rows that `StepSampler` would reject as too long."""
        if self._max_tokens is None:
            return []
        if not self._pairs:
            lengths = self._loader.lengths(s, manifest)
            return [place for place, length in enumerate(lengths) if length > self._max_tokens]
        try:
            rows = self._loader.load(s, manifest)
        except UNREADABLE:  # reported when the step is served
            return []
        lengths = row_lengths(manifest, rows, longest=True)
        long = (place for place, length in enumerate(lengths) if length > self._max_tokens)
        return [place for place in long if not source[place]]

    def _repartition_step(
        self, s: Session, leased: LeasedStep, unwanted: Mapping[int, str]
    ) -> None:
        """Record a new partition of a step, if it has changed."""
        places, rows, lost = self._readable(s, leased, unwanted)
        if not lost and leased.manifest.world_size == self._world_size:
            return
        order, plans = s.compute(repartitioned, self._world_size, leased.first, rows, places)
        dealt = self._new_partition(leased, order, plans, sorted(lost))
        rejected = [*self._rejections(s, leased.first, lost)]
        s.write(self._record, dealt, rejected)
        if lost:
            why, which = sorted(set(lost.values())), _named(s, self._loader, leased.first, lost)
            details = (
                counted(len(lost), "row"),
                leased.first.step,
                ", ".join(why),
                one_line(which),
            )
            _logger.warning(
                "trainer %r drops %s of step %d (%s): %s", self._lease.consumer, *details
            )

    def _readable(
        self, s: ReadSession, leased: LeasedStep, unwanted: Mapping[int, str]
    ) -> tuple[list[int], LoadedRows, dict[int, str]]:
        """Return the readable rows of a step and the rows that it loses.

        Rows are given by their places in its first manifest: those that stay, in order; their
        columns; and place -> why of the lost ones, including ``unwanted``.
        """
        places, lost = sorted(leased.order), dict[int, str]()
        lost |= unwanted
        places = [place for place in places if place not in lost]
        while True:
            manifest = leased.first.repartitioned(places, leased.first.microbatches)
            try:
                rows = self._loader.load(s, manifest)
                gone = self._without_reward(manifest, rows) if lost else {}
                if not gone:
                    return places, rows, lost
            except UNREADABLE as error:
                gone = self._loader.unreadable(s, manifest)
                if not (self._drops and gone):
                    name = self._lease.consumer
                    raise _refusal(s, self._loader, manifest, name, gone, error) from error
            lost |= {places[place]: why for place, why in gone.items()}
            places = [place for place in places if place not in lost]

    def _without_reward(self, manifest: Manifest, rows: LoadedRows) -> dict[int, str]:
        """Return the rows without a reward whose run has lost the row that carried it."""
        if "reward" not in self._needs:
            return {}
        source = manifest.source or (0,) * len(manifest.groups)
        lacking = lacking_of("reward", manifest, rows)
        return {place: invalid("reward") for place in lacking if not source[place]}

    def _new_partition(
        self,
        leased: LeasedStep,
        order: list[int],
        plans: Sequence[MicroBatchPlan],
        lost: Sequence[int],
    ) -> StepDealt:
        first, manifest = leased.first, leased.first.repartitioned(order, plans)
        names = ("", *first.sources)
        sources = [names[first.source[place]] for place in lost] if first.source else []
        return StepDealt(
            consumer=self._lease.consumer,
            token=self._lease.token,
            step=first.step,
            leased_at=leased.leased_at,
            world_size=self._world_size,
            order=order,
            microbatches=[[m.start, m.stop, m.width, m.rank] for m in plans],
            digest=manifest.digest,
            dropped=[first.annotations[place] for place in lost],
            dropped_from=sources if any(sources) else [],
            num_groups=manifest.num_groups if lost else None,
        )

    def _rejections(
        self, s: ReadSession, first: Manifest, lost: Mapping[int, str]
    ) -> Iterator[tuple[int, ExperiencesRejected]]:
        """Yield (experiment, rejection) for the lost rows of each experiment."""
        key, trainer = self._experiment.key, self._lease.consumer
        for number, source in enumerate(("", *first.sources)):
            places = [place for place in first.rows_of(number) if place in lost]
            if not places:
                continue
            guest = trainer_queries.guest_name(self._experiment.name, trainer)
            rejected = ExperiencesRejected(
                consumer=guest if source else trainer,
                by="trainer",
                experiences=[first.annotations[place] for place in places],
                reasons=[lost[place] for place in places],
                planned_groups=0,  # they were counted when the step was leased
            )
            yield self._loader.key_of(s, source) if source else key, rejected

    def _record(
        self, tx: Transaction, dealt: StepDealt, rejected: Sequence[tuple[int, ExperiencesRejected]]
    ) -> None:
        """Append the partition and the rejections, those of another experiment to its log."""
        own = self._experiment.key
        for key, fact in rejected:
            if key != own:  # first, so that locks are always taken in one order
                self._lease.append(tx, [new_event(fact)], experiment=key)
        mine = [new_event(fact) for key, fact in rejected if key == own]
        self._lease.append(tx, [*mine, new_event(dealt)])
