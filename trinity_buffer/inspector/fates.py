"""What became of experiences in each annotation set and trainer; and which events decided it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

from typing_extensions import override

from trinity_buffer.errors import CodecError, UnknownNameError
from trinity_buffer.events import StepDealt, StepsCommitted, TrainerRewound, kinds_of
from trinity_buffer.identity import EID, parse_uid
from trinity_buffer.inspector.source import Source
from trinity_buffer.pipeline.handle import decoded, require_positions
from trinity_buffer.pipeline.manifest import leased_steps
from trinity_buffer.store import inspection, log, trainer_queries, writer_queries
from trinity_buffer.store.rows import BatchRow, ConsumerRow, ExperienceRow, position_of
from trinity_buffer.store.segments import EXPERTS_SET
from trinity_buffer.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class StepView:
    """A gradient step that holds the experience, or the reason for which a trainer left it out.

    Attributes:
        reason: why the trainer rejected it, or skipped the step, which changed no weights.
        trainer: its name; a trainer of another experiment, which mixes in rows of this one as its
            expert's, is ``EXPERIMENT/TRAINER``.
        measured: what the trainer measured of it in that step, where that was asked for; empty
            before the commit, and of another experiment's trainer.
        experiment: that other experiment, whose log has the step; "" for this one.
    """

    trainer: str
    step: int | None
    committed: bool
    reason: str | None
    measured: Mapping[str, float] = field(default_factory=dict)
    experiment: str = ""

    @property
    def state(self) -> str:
        """``rejected``, ``leased``, ``skipped`` or ``trained``."""
        if self.step is None:
            return "rejected"
        return "leased" if not self.committed else "skipped" if self.reason else "trained"

    @override
    def __str__(self) -> str:
        if self.step is None:
            return f"rejected by {self.trainer}: {self.reason}"
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.state}{why} in step {self.step} of {self.trainer}"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one experience in one annotation set.

    Attributes:
        state: ``refused`` at the door, ``unseen``, ``waiting``, ``rejected`` or ``annotated``.
        reason: why it was refused or rejected.
        annotations: address -> gradient steps; more than one where the strategy made copies.
        is_unread: whether there are trainers, and all of them read other sets.
        rejected_at: position of the event that rejected it.
    """

    annotation_set: str
    state: str
    reason: str | None
    annotations: Mapping[int, Sequence[StepView]] = field(default_factory=dict)
    is_unread: bool = False
    rejected_at: int | None = None

    @property
    def first(self) -> int | None:
        """The address of its first annotation."""
        return next(iter(self.annotations), None)

    @property
    def steps(self) -> list[StepView]:
        """The steps of all its annotations."""
        return [step for steps in self.annotations.values() for step in steps]

    @override
    def __str__(self) -> str:
        if self.state != "annotated":
            return self.state if self.reason is None else f"{self.state}: {self.reason}"
        # Ready for whom? Where no trainer reads the set, for none.
        untaken = "annotated" if self.is_unread else "ready"
        copies = (", ".join(map(str, steps)) or untaken for steps in self.annotations.values())
        return "; ".join(dict.fromkeys(copies))


def fates(tx: Transaction, experiment: int, rows: Sequence[ExperienceRow]) -> dict[int, list[Fate]]:
    """Return address of experience -> its fate in every annotation set, by name of the set.

    The steps of other experiments' trainers are known only of the store as it is now.
    """
    consumers = writer_queries.consumers(tx, experiment).values()
    strategies = [row for row in consumers if row.kind == "strategy"]
    trainers = {row.name: row for row in consumers if row.kind == "trainer"}
    addresses = [row.address for row in rows]
    annotated = inspection.annotation_rows(tx, experiment, addresses)
    steps = _steps(tx, experiment, trainers, [note for _, _, note in annotated])
    notes: dict[tuple[str, int], dict[int, list[StepView]]] = defaultdict(dict)
    for name, address, note in annotated:
        notes[name, address][note] = steps[note]
    rejections = inspection.rejections(tx, experiment, [s.name for s in strategies], addresses)
    rejected = {(row.consumer, row.address): row for row in rejections}
    # An expert's set is read by trainers of other experiments, whose configurations are not here.
    read = {EXPERTS_SET, *(row.config.get("strategy") for row in trainers.values())}

    def fate(row: ExperienceRow, strategy: ConsumerRow) -> Fate:
        name, key = strategy.name, (strategy.name, row.address)
        is_unread = bool(trainers) and name not in read
        if row.refused is not None:
            return Fate(name, "refused", row.refused, is_unread=is_unread)
        if key in notes:
            return Fate(name, "annotated", None, notes[key], is_unread)
        if key in rejected:
            by = rejected[key]
            return Fate(name, "rejected", by.reason, {}, is_unread, by.position)
        state = "unseen" if position_of(row.address) > strategy.cursor else "waiting"
        return Fate(name, state, None, {}, is_unread)

    return {row.address: [fate(row, strategy) for strategy in strategies] for row in rows}


def _steps(
    tx: Transaction, experiment: int, trainers: Mapping[str, ConsumerRow], notes: Sequence[int]
) -> dict[int, list[StepView]]:
    """Return address of annotation -> what trainers made of it; trained rows come last."""
    steps: dict[int, list[StepView]] = {address: [] for address in notes}
    if not steps:
        return steps
    # Trainers of other experiments are no consumers of this one.
    guests = [name for name in inspection.who_rejected(tx, experiment) if "/" in name]
    for row in inspection.rejections(tx, experiment, [*guests, *trainers], notes):
        steps[row.address].append(StepView(row.consumer, None, committed=False, reason=row.reason))
    # Of other experiments' trainers, whose expert's rows these are, and then of our own.
    readers = trainer_queries.readers(tx, experiment)
    for key, name, source, trainer in sorted(readers, key=lambda reader: not reader[2]):
        known_as = trainer_queries.guest_name(name, trainer.name) if source else trainer.name
        delivered = inspection.deliveries(tx, key, [trainer.name], notes, source)
        skipped = _skipped(tx, key, name, trainer.name, {step for _, _, step in delivered})
        for _, address, step in delivered:
            committed, elsewhere = step <= trainer.committed_step, name if source else ""
            why = skipped.get(step)
            steps[address].append(StepView(known_as, step, committed, why, {}, elsewhere))
    return steps


def _skipped(tx: Transaction, key: int, name: str, trainer: str, asked: Set[int]) -> dict[int, str]:
    """Return step of a trainer -> why its commit says that it changed no weights."""
    if not asked:
        return {}
    span = {"after": min(asked) - 1, "limit": max(asked) - min(asked) + 1}
    rows = trainer_queries.steps(tx, key, trainer, **span)
    committed = {row.step: row.committed_at or 0 for row in rows if row.step in asked}
    skipped = dict[int, str]()
    for stored in log.read_at(tx, key, sorted({*committed.values()})):
        with suppress(CodecError):  # damaged: `why` and `steps` name it, the rows are still shown
            match decoded(name, stored).fact:
                case StepsCommitted(skipped=str(why), skipped_steps=steps):
                    # Not those that were rewound and handed out again.
                    own = (step for step in steps if committed.get(step) == stored.position)
                    skipped |= dict.fromkeys(own, why)
    return skipped


@dataclass(frozen=True, slots=True)
class Reason:
    """What decided the fate of an experience.

    Attributes:
        position: of the event; None if it has not happened, or is in another experiment's log.
        recorded_at: seconds since 1970; ``actor`` recorded it.
    """

    position: int | None
    recorded_at: float | None
    actor: str | None
    what: str


@dataclass(frozen=True, slots=True)
class Why:
    """The life of one experience.

    Attributes:
        trained: whether a committed step holds it that was not skipped.
        verdict: in one sentence.
        reasons: in order of the log; what has not happened comes last.
    """

    uid: str
    trained: bool
    verdict: str
    reasons: tuple[Reason, ...]


_Rows = Sequence[ExperienceRow]
_Reasons = Iterator[tuple[int | None, str]]
"""Position of each event that decided, and what it did; None: it has not happened."""


async def why(source: Source, uid: str) -> Why:
    """Return the events that decided whether ``uid`` was trained.

    Raises:
        InvalidArgumentError: not ``batch/task/run/step/suffix``.
        UnknownNameError: it is neither stored nor planned.
    """
    eid = parse_uid(uid)

    def read(tx: Transaction) -> tuple[bool, str, list[tuple[int | None, str]]]:
        batch = writer_queries.batch_row(tx, source.key, eid.batch)
        group = inspection.members(tx, source.key, [(str(eid.batch), str(eid.task))])
        row = next((row for row in group if row.eid.uid == eid.uid), None)
        if row is None:
            _require_planned(f"experiment {source.name!r}", eid, batch, group)
        own = [] if row is None else fates(tx, source.key, [row])[row.address]
        trained = any(step.state == "trained" for fate in own for step in fate.steps)
        reasons = [*_of_the_writer(eid, batch, row)]
        if row is not None and row.refused is None:
            for fate in own:
                reasons += _of_a_set(tx, source, fate, batch, group)
            if not own:
                reasons.append((None, "no strategy has run: `trinity-buffer annotate` runs one"))
        return trained, _verdict(row, own, trained=trained), reasons

    trained, verdict, reasons = await source.read(read)
    # What has not happened has no position, and comes last.
    reasons.sort(key=lambda reason: reason[0] or 1 << 62)
    events = await source.events([at for at, _ in reasons if at is not None])
    explained = []
    for at, what in reasons:
        event = None if at is None else events.get(at)
        when, actor = (None, None) if event is None else (event.recorded_at, event.actor)
        explained.append(Reason(at, when, actor, what))
    return Why(uid, trained, verdict, tuple(explained))


def _require_planned(where: str, eid: EID, batch: BatchRow | None, group: _Rows) -> None:
    """Raise UnknownNameError unless an experience that is not stored was planned."""
    neither = f"{where} neither holds nor planned {eid.uid!r}"
    # A slip in the step or the suffix is likelier than a rollout that was never planned.
    if same_run := [row.eid.uid for row in group if row.eid.run == eid.run]:
        raise UnknownNameError(
            f"{where} holds no {eid.uid!r}; of run {eid.run} of task {eid.task} it holds "
            f"{_shortened(same_run)}"
        )
    if batch is None or str(eid.task) not in map(str, batch.tasks):
        raise UnknownNameError(f"{neither}; `trinity-buffer groups` shows what there is")
    runs = batch.rollouts_per_group
    if runs is not None and eid.run >= runs:
        raise UnknownNameError(
            f"{neither}: batch {str(eid.batch)!r} was planned with runs 0 to {runs - 1} of each "
            "task"
        )


def _verdict(row: ExperienceRow | None, own: Sequence[Fate], *, trained: bool) -> str:
    if row is None:
        return "planned, and never stored"
    parts = []
    # Same words as `groups` and `show`, so that one can be found from the other.
    for fate in own:
        is_unread = fate.is_unread and fate.annotations and not fate.steps
        reader = ", which no trainer reads" if is_unread else ""
        parts.append(f"{fate} (set {fate.annotation_set}{reader})")
    states = "; ".join(parts) or "no strategy has run"
    if row.refused is not None:
        states = f"refused at the door, {row.refused}"
    return states if trained else f"never trained: {states}"


def _of_the_writer(eid: EID, batch: BatchRow | None, row: ExperienceRow | None) -> _Reasons:
    if batch is not None and str(eid.task) in map(str, batch.tasks):
        each = f", {batch.rollouts_per_group} runs each" if batch.rollouts_per_group else ""
        yield batch.planned_at, f"planned: batch {batch.batch}, {len(batch.tasks)} tasks{each}"
    if batch is not None and batch.sealed_at is not None:
        yield batch.sealed_at, f"batch {batch.batch} sealed at {batch.expected} experiences"
    if row is None:
        yield None, f"never stored: no explorer wrote run {eid.run} of task {eid.task}"
        return
    reward = "no reward" if row.reward is None else f"reward {row.reward}"
    yield position_of(row.address), f"recorded, {row.num_tokens} tokens, {reward}"
    if row.refused is not None:
        yield position_of(row.address), f"refused at the door: {row.refused}"


def _of_a_set(
    tx: Transaction, source: Source, fate: Fate, batch: BatchRow | None, group: _Rows
) -> _Reasons:
    name, experiment = f"set {fate.annotation_set}", source.key
    if fate.state == "rejected":
        yield fate.rejected_at, f"{name}: rejected, {fate.reason}"
    elif fate.state == "unseen":
        strategy = writer_queries.consumer_row(tx, experiment, fate.annotation_set)
        cursor = 0 if strategy is None else strategy.cursor
        yield None, f"{name}: not seen yet, the strategy has read up to position {cursor}"
    elif fate.state == "waiting":
        yield None, f"{name}: waiting for its group, {_lacking(batch, group)}"
    for note, steps in fate.annotations.items():
        yield position_of(note), f"{name}: annotated"
        for step in steps:
            yield from _of_a_step(tx, source, note, step)
        if not steps and fate.is_unread:
            yield None, f"{name}: no trainer reads it"
        elif not steps:
            ended = ""
            if writer_queries.is_finished(tx, experiment):
                ended = (
                    "; the experiment is finished: none will, unless a trainer still runs or is "
                    "started again"
                )
            yield None, f"{name}: ready, and no trainer has taken it{ended}"


def _of_a_step(tx: Transaction, source: Source, note: int, step: StepView) -> _Reasons:
    trainer = f"trainer {step.trainer}:"
    if step.step is None:
        ((_, _, _, at),) = inspection.rejections(tx, source.key, [step.trainer], [note])
        # If a step lost the row, the next event says so, where it is not later than what is asked.
        kinds, up_to = kinds_of(StepDealt), min(at + 1, source.position or at + 1)
        for stored in log.read_after(tx, source.key, at, limit=1, kinds=kinds, up_to=up_to):
            match decoded(source.name, stored).fact:
                case StepDealt(consumer=step.trainer, dropped=gone) if note in gone:
                    yield from _of_the_log(tx, source, at + 1, at + 1)
        yield at, f"{trainer} rejected, {step.reason}"
    elif step.experiment:
        state = step.state if step.committed else "handed out, and not committed,"
        where = f"as the log of {step.experiment!r} says"
        yield None, f"{trainer} {state} in step {step.step}, {where}"
    else:
        row = trainer_queries.step_at(tx, source.key, step.trainer, step.step)
        if row is None:
            yield None, f"{trainer} step {step.step} has no row; run `trinity-buffer rebuild`"
            return
        if row.committed_at is not None:
            committed = log.recorded_at(tx, source.key, [row.committed_at])
            require_positions(source.name, [row.committed_at], committed)
        yield from _of_the_log(tx, source, row.leased_at, row.committed_at or source.position)
        if row.committed_at is None:
            yield None, f"{trainer} step {step.step} is not committed"


def _of_the_log(tx: Transaction, source: Source, served_at: int, last: int | None) -> _Reasons:
    """Yield what became of a step up to the position ``last``; None: all there is.

    Args:
        served_at: position of its `BatchLeased`, or of a `StepDealt` of it.
    """
    leased = leased_steps(tx, source.key, source.name, [served_at])[served_at]
    name, number = leased.manifest.consumer, leased.manifest.step
    yield leased.position, f"trainer {name}: handed out in step {number}"
    # A rewind takes back a commit, and another one follows it.
    kinds, since = kinds_of(StepDealt | StepsCommitted | TrainerRewound), leased.position
    for stored in log.read_after(tx, source.key, since, limit=1 << 31, kinds=kinds, up_to=last):
        match decoded(source.name, stored).fact:
            case StepDealt(consumer=by, step=step) if (by, step) == (name, number):
                yield stored.position, f"trainer {name}: step {number} dealt anew"
            case StepsCommitted(consumer=by, steps=steps) as fact if by == name and number in steps:
                skipped = f", and skipped ({fact.skipped}): it changed no weights"
                ended = skipped if number in fact.skipped_steps else ""
                yield stored.position, f"trainer {name}: step {number} committed{ended}"
            case TrainerRewound(consumer=by, step=to, from_step=start) if (
                by == name and to < number <= start
            ):
                yield stored.position, f"trainer {name}: rewound from step {start} to step {to}"


def _lacking(batch: BatchRow | None, group: _Rows) -> str:
    """Describe the runs that an undecided group has and lacks."""
    planned = None if batch is None else batch.rollouts_per_group
    if batch is None or planned is None:
        return "whose batch was never planned: a seal or a deadline ends it"
    runs = {row.eid.run for row in group if row.refused is None}
    missing = sorted(set(range(planned)) - runs)
    lacks = f" (missing: {_shortened(missing)})" if missing else ""
    state = "not sealed" if batch.sealed_at is None else "sealed"
    return f"which has {len(runs)} of {planned} runs{lacks}; the batch is {state}"


def _shortened(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:8])) + (" ..." if len(items) > 8 else "")
