"""How a trainer begins: registered, on a set that is there, after its last commit.

Steps that were leased and not committed: as the log has them, and how they are dealt anew.

A step belongs to its rows and not to the ranks that were there when it was leased. Whoever resumes
with another number of them deals what is not committed anew, and records it: the rows, the groups,
their order within a group and the denominators stay, so that the gradient does.

Rows that were damaged or deleted since the step was leased can never be served again. By default
that ends the trainer; where it is told to drop them, they leave the step by the same event, and the
trainer rejects them in its transaction. So do rows that the trainer is told to drop by name, and
those that are longer than it takes now: else a row that no memory holds would come back for ever.
What is left of their groups is trained, as it is of groups that lost rows before they were leased:
denominators count what is left, advantages stay.
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
    """Return the trainer ``consumer`` of ``annotation_set``, registered now if it was not.

    Raises:
        ConflictingStrategyError: the name is taken by something else.
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
    consumer = writer_queries.consumer_row(tx, experiment, trainer)
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
"""What loading rows raises where some cannot be read."""

NAMED_ROWS = 3
"""So many of the rows that cannot be read are named."""

_logger = logging.getLogger(__name__)


class LeasedStep(NamedTuple):
    """A step as the log holds it: where it was leased, its first manifest, and how it is served.

    ``order`` are the places of the rows in the first manifest, as they are served; ``log_head`` is
    of the event that says how.
    """

    leased_at: int
    first: Manifest
    order: Sequence[int]
    manifest: Manifest
    log_head: bytes | None


def leased_step(s: ReadSession, experiment: ExperimentHandle, row: StepRow) -> LeasedStep:
    """Return the manifest of a step that was handed out.

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
    manifest = first.dealt(dealt.order, plans_of(dealt))
    return LeasedStep(dealt.leased_at, first, dealt.order, manifest, head)


def load_leased(s: ReadSession, loader: RowLoader, manifest: Manifest, trainer: str) -> LoadedRows:
    """Return the rows of a step that ``trainer`` was handed.

    Raises:
        ArchivedSegmentError, CodecError, DamagedSegmentError: some cannot be read; the message
            names the step, such rows, and the ways out.
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
    """Return the error for a step of which rows cannot be read.

    Args:
        lost: places of those that can never be read -> why.
        error: what loading them raised; it names the segment.
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
    """Return an order of the rows of a manifest, and micro-batches over it for so many ranks.

    No micro-batch computes more than the largest one that was recorded, without the rows that are
    gone: one of them may have been more than the budget.

    Args:
        world_size: how many ranks there are.
        first: the manifest.
        rows: the columns of the rows that are kept.
        readable: places of these rows in the manifest, in order; None: all.
    """
    places = [*range(len(first.groups))] if readable is None else [*readable]
    if first.world_size == world_size and len(places) == len(first.groups):
        return places, [*first.microbatches]
    left = first.dealt(places, first.microbatches)
    pairs = bool(rows.field("chosen").blocks)
    lengths = row_lengths(left, rows) if pairs else rows.facts.lengths
    order, plans = plan_microbatches(
        lengths,
        left.groups,
        layout=first.layout,
        tokens_per_microbatch=_largest(first, dict(zip(places, lengths, strict=True)), pairs=pairs),
        world_size=world_size,
        pairs=pairs,
        by_length=False,  # rows of a group stay in their order
    )
    return [places[row] for row in order], plans


def _largest(first: Manifest, lengths: Mapping[int, int], *, pairs: bool) -> int:
    """Return what the largest micro-batch of a manifest computes, of the rows that are kept.

    Args:
        lengths: place of a row that is kept -> its tokens, of a pair as in `plan_microbatches`.
    """
    padded, largest = first.layout == "padded", 1
    for plan in first.microbatches:
        own_lengths = [lengths[row] for row in range(plan.start, plan.stop) if row in lengths]
        height = len(own_lengths) * (2 if pairs else 1)
        largest = max(largest, height * max(own_lengths, default=0) if padded else sum(own_lengths))
    return largest


class Repartitioner:
    """Deals the steps that a trainer has not committed to the ranks that are there now.

    Args:
        experiment: the trainer's own.
        lease: of the trainer.
        loader: of its rows.
        options: of the stream.
        dropped: the rows that it drops.
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

    async def dealt(self, steps: Sequence[StepRow]) -> list[StepRow]:
        """Return ``steps``, each dealt to the ranks that there are; record how, where it is new.

        Raises:
            LeaseLostError: another process took over.
            ArchivedSegmentError, CodecError, DamagedSegmentError: as `load_leased`.
        """
        if not steps:
            return []
        database, name = self._experiment.database, self._lease.consumer
        await database.session(lambda s: self._deal(s, steps))
        after = steps[0].step - 1
        return await database.read(trainer_queries.steps, self._experiment.key, name, after=after)

    def _deal(self, s: Session, steps: Sequence[StepRow]) -> None:
        for row in steps:
            leased = leased_step(s, self._experiment, row)
            unwanted = self._unwanted(s, leased)
            if unwanted or self._drops or leased.manifest.world_size != self._world_size:
                self._deal_anew(s, leased, unwanted)

    def _unwanted(self, s: ReadSession, leased: LeasedStep) -> dict[int, str]:
        """Return the rows of a step that this stream does not train: place in it first -> why."""
        manifest = leased.manifest
        names = ("", *manifest.sources)
        source = manifest.source or (0,) * len(manifest.groups)
        unwanted = dict.fromkeys(self._too_long(s, manifest, source), OVERSIZE)
        for place, (of, address) in enumerate(zip(source, manifest.experiences, strict=True)):
            if address in self._dropped.get(names[of], ()):
                unwanted[place] = DROPPED
        return {leased.order[place]: why for place, why in unwanted.items()}

    def _too_long(self, s: ReadSession, manifest: Manifest, source: Sequence[int]) -> list[int]:
        """Return the places of the rows that `StepSampler` would reject as too long."""
        if self._max_tokens is None:
            return []
        if not self._pairs:
            lengths = self._loader.lengths(s, manifest)
            return [place for place, length in enumerate(lengths) if length > self._max_tokens]
        try:
            rows = self._loader.load(s, manifest)
        except UNREADABLE:  # which is said when the step is served
            return []
        lengths = row_lengths(manifest, rows, longest=True)
        long = (place for place, length in enumerate(lengths) if length > self._max_tokens)
        return [place for place in long if not source[place]]

    def _deal_anew(self, s: Session, leased: LeasedStep, unwanted: Mapping[int, str]) -> None:
        """Record how a step is served from here on, if that is new."""
        places, rows, lost = self._readable(s, leased, unwanted)
        if not lost and leased.manifest.world_size == self._world_size:
            return
        order, plans = s.compute(repartitioned, self._world_size, leased.first, rows, places)
        dealt = self._dealt(leased, order, plans, sorted(lost))
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
        """Return the rows of a step that can be read, and those that it loses here.

        By their places in its first manifest: those that stay, in order; their columns; place ->
        why of the others, the ``unwanted`` ones among them.
        """
        places, lost = sorted(leased.order), dict[int, str]()
        lost |= unwanted
        places = [place for place in places if place not in lost]
        while True:
            manifest = leased.first.dealt(places, leased.first.microbatches)
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
        """Return the rows whose reward was that of the last row of their run, which is lost."""
        if "reward" not in self._needs:
            return {}
        source = manifest.source or (0,) * len(manifest.groups)
        lacking = lacking_of("reward", manifest, rows)
        return {place: invalid("reward") for place in lacking if not source[place]}

    def _dealt(
        self,
        leased: LeasedStep,
        order: list[int],
        plans: Sequence[MicroBatchPlan],
        lost: Sequence[int],
    ) -> StepDealt:
        first, manifest = leased.first, leased.first.dealt(order, plans)
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
            dropped_from=sources if any(sources) else (),
            num_groups=manifest.num_groups if lost else None,
        )

    def _rejections(
        self, s: ReadSession, first: Manifest, lost: Mapping[int, str]
    ) -> Iterator[tuple[int, ExperiencesRejected]]:
        """Yield the rejections of rows, each with the experiment that they are of."""
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
                planned_groups=0,  # they count as handed out, with the step
            )
            yield self._loader.key_of(s, source) if source else key, rejected

    def _record(
        self, tx: Transaction, dealt: StepDealt, rejected: Sequence[tuple[int, ExperiencesRejected]]
    ) -> None:
        """Append all of it; the rows of another experiment are rejected in its log."""
        own = self._experiment.key
        for key, fact in rejected:
            if key != own:  # first, so that both locks are taken in their order
                self._lease.append(tx, [new_event(fact)], experiment=key)
        mine = [new_event(fact) for key, fact in rejected if key == own]
        self._lease.append(tx, [*mine, new_event(dealt)])
