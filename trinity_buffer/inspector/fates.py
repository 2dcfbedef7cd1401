"""What became of experiences in each annotation set and trainer, and which events decided it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.identity import EID, parse_uid
from trinity_buffer.inspector.source import Source
from trinity_buffer.store import inspection, queries, trainer_queries
from trinity_buffer.store.retention import EXPERTS_SET
from trinity_buffer.store.rows import BatchRow, ConsumerRow, ExperienceRow, StepRow, position_of
from trinity_buffer.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class StepOfRow:
    """The gradient step that holds an annotation row, or why a trainer left it out.

    Attributes:
        trainer: its name; of one of another experiment, which mixes in rows of this one as its
            expert's, ``EXPERIMENT/TRAINER``.
        experiment: that other experiment, to whose log the step belongs; "" for this one.
    """

    trainer: str
    step: int | None
    committed: bool
    reason: str | None
    experiment: str = ""


@dataclass(frozen=True, slots=True)
class AnnotationRow:
    """One annotation of an experience, and its gradient steps."""

    address: int
    steps: tuple[StepOfRow, ...]

    @property
    def position(self) -> int:
        """Of the event that annotated it."""
        return position_of(self.address)


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one experience in one annotation set.

    Attributes:
        state: ``refused`` at the door, ``unseen``, ``waiting``, ``rejected`` or ``annotated``.
        reason: of what was refused or rejected.
        annotations: more than one where the strategy made copies.
        is_unread: whether there are trainers, and all of them read other sets.
    """

    annotation_set: str
    state: str
    reason: str | None
    annotations: tuple[AnnotationRow, ...] = ()
    is_unread: bool = False

    @override
    def __str__(self) -> str:
        if self.state != "annotated":
            return self.state if self.reason is None else f"{self.state}: {self.reason}"
        untaken = "annotated" if self.is_unread else "ready"
        return "; ".join(dict.fromkeys(_summary(row, untaken) for row in self.annotations))


def _summary(row: AnnotationRow, untaken: str) -> str:
    if not row.steps:
        return untaken
    return ", ".join(
        f"rejected by {step.trainer}: {step.reason}"
        if step.step is None
        else f"{'trained' if step.committed else 'leased'} in step {step.step} of {step.trainer}"
        for step in row.steps
    )


def fates(tx: Transaction, experiment: int, rows: Sequence[ExperienceRow]) -> dict[int, list[Fate]]:
    """Return address of experience -> its fate in every annotation set, by name of the set.

    What trainers of other experiments were handed is known of the store as it is alone.
    """
    consumers = list(queries.consumers(tx, experiment).values())
    strategies = [row for row in consumers if row.kind == "strategy"]
    trainers = {row.name: row for row in consumers if row.kind == "trainer"}
    addresses = [row.address for row in rows]
    annotated = inspection.annotation_rows(tx, experiment, addresses)
    steps = _steps(tx, experiment, trainers, [a.annotation or 0 for a in annotated])
    notes: dict[tuple[int, str], list[AnnotationRow]] = {}
    for one in annotated:
        row = AnnotationRow(one.annotation or 0, tuple(steps.get(one.annotation or 0, ())))
        notes.setdefault((one.address, one.consumer), []).append(row)
    names = [strategy.name for strategy in strategies]
    rejected = inspection.rejections(tx, experiment, names, addresses)
    reasons = {(one.address, one.consumer): one.reason for one in rejected}
    left = inspection.still_waiting(tx, experiment, names, addresses)
    waiting = {(one.address, one.consumer) for one in left}
    unread = _unread(names, trainers)

    def fate(row: ExperienceRow, strategy: ConsumerRow) -> Fate:
        one = _fate(row, strategy, notes, reasons, waiting)
        return replace(one, is_unread=True) if strategy.name in unread else one

    return {row.address: [fate(row, strategy) for strategy in strategies] for row in rows}


def _unread(names: Sequence[str], trainers: Mapping[str, ConsumerRow]) -> set[str]:
    """Return the sets that no trainer reads, where there are trainers; others read an expert's."""
    read = {row.config.get("strategy") for row in trainers.values()}
    return {*names} - {EXPERTS_SET, *read} if trainers else set()


def _fate(
    row: ExperienceRow,
    strategy: ConsumerRow,
    notes: dict[tuple[int, str], list[AnnotationRow]],
    reasons: dict[tuple[int, str], str | None],
    waiting: set[tuple[int, str]],
) -> Fate:
    key = (row.address, strategy.name)
    if row.refused is not None:
        return Fate(strategy.name, "refused", row.refused)
    if key in notes:
        return Fate(strategy.name, "annotated", None, tuple(notes[key]))
    if key in reasons:
        return Fate(strategy.name, "rejected", reasons[key])
    unseen = position_of(row.address) > strategy.cursor and key not in waiting
    return Fate(strategy.name, "unseen" if unseen else "waiting", None)


def _steps(
    tx: Transaction, experiment: int, trainers: dict[str, ConsumerRow], rows: Sequence[int]
) -> dict[int, list[StepOfRow]]:
    """Return address of annotation -> what trainers made of it: what was trained comes last."""
    found: dict[int, list[StepOfRow]] = {address: [] for address in rows}
    if not found:
        return found
    guests = [name for name in inspection.who_rejected(tx, experiment) if "/" in name]
    for one in inspection.rejections(tx, experiment, [*guests, *trainers], rows):
        step = StepOfRow(one.consumer, None, committed=False, reason=one.reason)
        found[one.address].append(step)
    for guest in inspection.guests(tx, experiment):
        held = inspection.deliveries(tx, guest.key, [guest.trainer], rows, guest.source)
        for one in held:
            committed = (one.step or 0) <= guest.committed_step
            step = StepOfRow(guest.name, one.step, committed, None, guest.experiment)
            found[one.address].append(step)
    for one in inspection.deliveries(tx, experiment, list(trainers), rows):
        committed = (one.step or 0) <= trainers[one.consumer].committed_step
        found[one.address].append(StepOfRow(one.consumer, one.step, committed, None))
    return found


@dataclass(frozen=True, slots=True)
class Reason:
    """What decided the fate of an experience.

    Attributes:
        position: of the event, None of what has not happened, or of what another experiment's log
            says.
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
        trained: whether a committed step holds it.
        verdict: in one sentence.
        reasons: in order of the log; what has not happened comes last.
    """

    uid: str
    trained: bool
    verdict: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one transaction saw."""

    row: ExperienceRow | None
    batch: BatchRow | None
    fates: list[Fate]
    rejected: Mapping[tuple[str, int], int]
    consumers: Mapping[str, ConsumerRow]
    steps: Mapping[tuple[str, int], StepRow]
    runs: frozenset[int]
    same_run: tuple[str, ...]
    finished: bool


async def why(source: Source, uid: str) -> Why:
    """Return what decided whether ``uid`` was trained.

    Raises:
        InvalidArgumentError: not ``batch/task/run/step/suffix``.
        UnknownNameError: it is neither stored nor planned.
    """
    eid = parse_uid(uid)
    seen = await source.read(lambda tx: _look(tx, source.key, eid))
    batch = seen.batch
    planned = batch is not None and eid.task in {str(task) for task in batch.tasks}
    if seen.row is None:
        _require_planned(seen, eid, f"experiment {source.name!r}", planned=planned)
    told = [*_told(seen, eid, planned=planned)]
    events = await source.events([at for at, _ in told if at is not None])
    reasons = []
    for position, what in sorted(told, key=lambda one: one[0] or 1 << 62):
        event = None if position is None else events.get(position)
        at, actor = (None, None) if event is None else (event.recorded_at, event.actor)
        reasons.append(Reason(position, at, actor, what))
    steps = [step for fate in seen.fates for row in fate.annotations for step in row.steps]
    trained = any(step.committed for step in steps)
    return Why(uid, trained, _verdict(seen), tuple(reasons))


def _look(tx: Transaction, experiment: int, eid: EID) -> _Seen:
    row = inspection.find(tx, experiment, eid)
    group = inspection.members(tx, experiment, [(str(eid.batch), str(eid.task))])
    found = [] if row is None else fates(tx, experiment, [row])[row.address]
    notes = [note.address for fate in found for note in fate.annotations]
    own = [] if row is None else [row.address]
    handed_out = {
        (step.trainer, step.step)
        for fate in found
        for note in fate.annotations
        for step in note.steps
        if step.step is not None and not step.experiment
    }
    steps: dict[tuple[str, int], StepRow] = {}
    for trainer, number in handed_out:
        some = trainer_queries.steps(tx, experiment, trainer, after=number - 1, limit=1)
        steps |= {(trainer, one.step): one for one in some}
    consumers, config = queries.consumers(tx, experiment), queries.config_of(tx, experiment)
    trainers = {step.trainer for fate in found for note in fate.annotations for step in note.steps}
    return _Seen(
        row,
        queries.batches(tx, experiment, [str(eid.batch)]).get(str(eid.batch)),
        found,
        inspection.rejections_of(tx, experiment, [*trainers, *consumers], [*own, *notes]),
        consumers,
        steps,
        frozenset(one.eid.run for one in group if one.refused is None),
        tuple(one.eid.uid for one in group if one.eid.run == eid.run),
        finished=config is not None and config[1],
    )


def _require_planned(seen: _Seen, eid: EID, where: str, *, planned: bool) -> None:
    """Return if an experience that is not stored may come yet, or could have."""
    runs = None if seen.batch is None else seen.batch.rollouts_per_group
    if seen.same_run:
        there = ", ".join(seen.same_run[:8]) + (" ..." if len(seen.same_run) > 8 else "")
        raise UnknownNameError(
            f"{where} holds no {eid.uid!r}; of run {eid.run} of task {eid.task} it holds {there}"
        )
    if not planned:
        raise UnknownNameError(
            f"{where} neither holds nor planned {eid.uid!r}; "
            "`trinity-buffer groups` shows what there is"
        )
    if runs is not None and eid.run >= runs:
        raise UnknownNameError(
            f"{where} neither holds nor planned {eid.uid!r}: batch {str(eid.batch)!r} was planned "
            f"with runs 0 to {runs - 1} of each task"
        )


def _told(seen: _Seen, eid: EID, *, planned: bool) -> Iterator[tuple[int | None, str]]:
    batch, row = seen.batch, seen.row
    if batch is not None and planned:
        runs = "" if batch.rollouts_per_group is None else f", {batch.rollouts_per_group} runs each"
        yield batch.planned_at, f"planned: batch {batch.batch}, {len(batch.tasks)} tasks{runs}"
    if batch is not None and batch.sealed_at is not None:
        yield batch.sealed_at, f"batch {batch.batch} sealed at {batch.expected} experiences"
    if row is None:
        yield None, f"never stored: nobody wrote run {eid.run} of task {eid.task}"
        return
    yield position_of(row.address), f"recorded, {row.length} tokens, reward {row.reward}"
    if row.refused is not None:
        yield position_of(row.address), f"refused at the door: {row.refused}"
        return
    for fate in seen.fates:
        yield from _told_of(fate, seen, row)
    if not seen.fates:
        yield None, "no strategy has run: `trinity-buffer annotate` runs one"


def _told_of(fate: Fate, seen: _Seen, row: ExperienceRow) -> Iterator[tuple[int | None, str]]:
    name = fate.annotation_set
    if fate.state == "rejected":
        at = seen.rejected.get((name, row.address))
        yield at, f"set {name}: rejected, {fate.reason}"
    elif fate.state != "annotated":
        yield None, f"set {name}: {_undecided(fate, seen)}"
    for note in fate.annotations:
        yield position_of(note.address), f"set {name}: annotated"
        for step in note.steps:
            yield from _told_of_step(step, seen, note.address)
        if not note.steps:
            yield None, f"set {name}: {_not_taken(fate, seen)}"


def _told_of_step(
    step: StepOfRow, seen: _Seen, annotation: int
) -> Iterator[tuple[int | None, str]]:
    told = f"trainer {step.trainer}:"
    if step.step is None:
        yield seen.rejected.get((step.trainer, annotation)), f"{told} rejected, {step.reason}"
    elif step.experiment:
        held = "trained" if step.committed else "handed out, and not committed,"
        yield None, f"{told} {held} in step {step.step}, as the log of {step.experiment!r} says"
    else:
        known = seen.steps[step.trainer, step.step]
        yield known.leased_at, f"{told} handed out in step {step.step}"
        done = "committed" if known.committed_at is not None else "is not committed"
        yield known.committed_at, f"{told} step {step.step} {done}"


def _not_taken(fate: Fate, seen: _Seen) -> str:
    if fate.is_unread:
        return "no trainer reads it"
    if seen.finished:
        return (
            "ready, and no trainer has taken it; the experiment is finished: nobody will, unless "
            "a trainer still runs or is started again"
        )
    return "ready, and no trainer has taken it"


def _undecided(fate: Fate, seen: _Seen) -> str:
    cursor = seen.consumers[fate.annotation_set].cursor
    if fate.state == "unseen":
        return f"not seen yet, the strategy has read up to position {cursor}"
    batch = seen.batch
    planned = None if batch is None else batch.rollouts_per_group
    if planned is None:
        return "waiting for its group, whose batch was never planned: a seal or a deadline ends it"
    missing = sorted(set(range(planned)) - seen.runs)
    sealed = "sealed" if batch is not None and batch.sealed_at is not None else "not sealed"
    some = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    return (
        f"waiting for its group, which has {len(seen.runs)} of {planned} runs"
        + (f" (missing: {some})" if missing else "")
        + f"; the batch is {sealed}"
    )


def _verdict(seen: _Seen) -> str:
    if seen.row is None:
        return "planned, and never stored"
    if seen.row.refused is not None:
        return f"never trained: refused at the door, {seen.row.refused}"
    if not seen.fates:
        return "never trained: no strategy has run"
    told = [_told_in_short(fate) for fate in seen.fates]
    steps = [step for fate in seen.fates for row in fate.annotations for step in row.steps]
    trained = any(step.committed for step in steps)
    return "; ".join(told) if trained else "never trained: " + "; ".join(told)


def _told_in_short(fate: Fate) -> str:
    taken = any(note.steps for note in fate.annotations)
    unread = fate.is_unread and fate.annotations and not taken
    return f"{fate} (set {fate.annotation_set}{', which no trainer reads' if unread else ''})"
