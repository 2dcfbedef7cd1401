"""What became of experiences: in every annotation set, and in every trainer of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from trinity_buffer.store import queries
from trinity_buffer.store.asking import inspection
from trinity_buffer.store.retention import EXPERTS_SET
from trinity_buffer.store.rows import ConsumerRow, ExperienceRow, position_of
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
        return "; ".join(dict.fromkeys(_told(row, untaken) for row in self.annotations))


def _told(row: AnnotationRow, untaken: str) -> str:
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
