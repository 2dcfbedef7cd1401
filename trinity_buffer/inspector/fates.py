"""What became of experiences in each annotation set and trainer; and which events decided it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.identity import EID, parse_uid
from trinity_buffer.inspector.source import Source
from trinity_buffer.store import inspection, trainer_queries, writer_queries
from trinity_buffer.store.retention import EXPERTS_SET
from trinity_buffer.store.rows import ConsumerRow, ExperienceRow, position_of
from trinity_buffer.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class StepOfRow:
    """The gradient step that holds an annotation row, or why a trainer left it out.

    Attributes:
        trainer: its name; a trainer of another experiment, which mixes in rows of this one as its
            expert's, is ``EXPERIMENT/TRAINER``.
        experiment: that other experiment, whose log has the step; "" for this one.
        rejected_at: position of the event that rejected the row.
    """

    trainer: str
    step: int | None
    committed: bool
    reason: str | None
    experiment: str = ""
    rejected_at: int | None = None


@dataclass(frozen=True, slots=True)
class AnnotationRow:
    """One annotation of an experience, and its gradient steps."""

    address: int
    steps: tuple[StepOfRow, ...]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one experience in one annotation set.

    Attributes:
        state: ``refused`` at the door, ``unseen``, ``waiting``, ``rejected`` or ``annotated``.
        reason: why it was refused or rejected.
        annotations: more than one where the strategy made copies.
        is_unread: whether there are trainers, and all of them read other sets.
        rejected_at: position of the event that rejected it.
    """

    annotation_set: str
    state: str
    reason: str | None
    annotations: tuple[AnnotationRow, ...] = ()
    is_unread: bool = False
    rejected_at: int | None = None

    @property
    def steps(self) -> tuple[StepOfRow, ...]:
        """The steps of all its annotations."""
        return tuple(step for row in self.annotations for step in row.steps)

    @override
    def __str__(self) -> str:
        if self.state != "annotated":
            return self.state if self.reason is None else f"{self.state}: {self.reason}"
        # Ready for whom? Where no trainer reads the set, for none.
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

    The steps of other experiments' trainers are known only of the store as it is now.
    """
    consumers = writer_queries.consumers(tx, experiment).values()
    strategies = [row for row in consumers if row.kind == "strategy"]
    trainers = {row.name: row for row in consumers if row.kind == "trainer"}
    addresses = [row.address for row in rows]
    annotated = inspection.annotation_rows(tx, experiment, addresses)
    steps = _steps(tx, experiment, trainers, [note for _, _, note in annotated])
    notes: dict[tuple[str, int], list[AnnotationRow]] = defaultdict(list)
    for name, address, note in annotated:
        notes[name, address].append(AnnotationRow(note, tuple(steps[note])))
    names = [strategy.name for strategy in strategies]
    rejected = {
        (row.consumer, row.address): row
        for row in inspection.rejections(tx, experiment, names, addresses)
    }
    waiting = inspection.still_waiting(tx, experiment, names, addresses)
    # An expert's set is read by trainers of other experiments, whose configurations are not here.
    read = {EXPERTS_SET, *(row.config.get("strategy") for row in trainers.values())}

    def fate(row: ExperienceRow, strategy: ConsumerRow) -> Fate:
        name, key = strategy.name, (strategy.name, row.address)
        is_unread = bool(trainers) and name not in read
        if row.refused is not None:
            return Fate(name, "refused", row.refused, is_unread=is_unread)
        if key in notes:
            return Fate(name, "annotated", None, tuple(notes[key]), is_unread)
        if key in rejected:
            by = rejected[key]
            return Fate(name, "rejected", by.reason, (), is_unread, by.position)
        is_unseen = position_of(row.address) > strategy.cursor and key not in waiting
        return Fate(name, "unseen" if is_unseen else "waiting", None, (), is_unread)

    return {row.address: [fate(row, strategy) for strategy in strategies] for row in rows}


def _steps(
    tx: Transaction, experiment: int, trainers: Mapping[str, ConsumerRow], notes: Sequence[int]
) -> dict[int, list[StepOfRow]]:
    """Return address of annotation -> what trainers made of it; trained rows come last."""
    steps: dict[int, list[StepOfRow]] = {address: [] for address in notes}
    if not steps:
        return steps
    # Trainers of other experiments are no consumers of this one.
    guests = [name for name in inspection.who_rejected(tx, experiment) if "/" in name]
    for row in inspection.rejections(tx, experiment, [*guests, *trainers], notes):
        steps[row.address].append(
            StepOfRow(
                row.consumer, None, committed=False, reason=row.reason, rejected_at=row.position
            )
        )
    for guest in inspection.guests(tx, experiment):
        held = inspection.deliveries(tx, guest.key, [guest.trainer], notes, guest.source)
        for _, address, step in held:
            committed = step <= guest.committed_step
            steps[address].append(StepOfRow(guest.name, step, committed, None, guest.experiment))
    for name, address, step in inspection.deliveries(tx, experiment, list(trainers), notes):
        committed = step <= trainers[name].committed_step
        steps[address].append(StepOfRow(name, step, committed, None))
    return steps


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
        trained: whether a committed step holds it.
        verdict: in one sentence.
        reasons: in order of the log; what has not happened comes last.
    """

    uid: str
    trained: bool
    verdict: str
    reasons: tuple[Reason, ...]


async def why(source: Source, uid: str) -> Why:
    """Return what decided whether ``uid`` was trained.

    Raises:
        InvalidArgumentError: not ``batch/task/run/step/suffix``.
        UnknownNameError: it is neither stored nor planned.
    """
    eid = parse_uid(uid)

    def read(tx: Transaction) -> tuple[bool, str, list[tuple[int | None, str]]]:
        life = _Life(tx, source, eid)
        return life.is_trained(), life.verdict(), [*life.reasons()]

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


class _Life:
    """The life of one experience, read inside one transaction.

    Raises:
        UnknownNameError: it is neither stored nor planned.
    """

    def __init__(self, tx: Transaction, source: Source, eid: EID) -> None:
        self._tx, self._key, self._eid = tx, source.key, eid
        self._row = inspection.find(tx, source.key, eid)
        self._batch = writer_queries.batch_row(tx, source.key, eid.batch)
        tasks = () if self._batch is None else map(str, self._batch.tasks)
        self._is_planned = str(eid.task) in tasks
        self._group = inspection.members(tx, source.key, [(str(eid.batch), str(eid.task))])
        row, self._fates = self._row, list[Fate]()
        if row is None:
            self._require_planned(f"experiment {source.name!r}")
        else:
            self._fates = fates(tx, source.key, [row])[row.address]

    def is_trained(self) -> bool:
        return any(step.committed for fate in self._fates for step in fate.steps)

    def _require_planned(self, where: str) -> None:
        eid, runs = self._eid, None if self._batch is None else self._batch.rollouts_per_group
        # A slip in the step or the suffix is likelier than a rollout that was never planned.
        if same_run := [row.eid.uid for row in self._group if row.eid.run == eid.run]:
            raise UnknownNameError(
                f"{where} holds no {eid.uid!r}; of run {eid.run} of task {eid.task} it holds "
                f"{_shortened(same_run)}"
            )
        if not self._is_planned:
            raise UnknownNameError(
                f"{where} neither holds nor planned {eid.uid!r}; "
                "`trinity-buffer groups` shows what there is"
            )
        if runs is not None and eid.run >= runs:
            raise UnknownNameError(
                f"{where} neither holds nor planned {eid.uid!r}: batch {str(eid.batch)!r} was "
                f"planned with runs 0 to {runs - 1} of each task"
            )

    def verdict(self) -> str:
        if self._row is None:
            return "planned, and never stored"
        if self._row.refused is not None:
            return f"never trained: refused at the door, {self._row.refused}"
        if not self._fates:
            return "never trained: no strategy has run"
        parts = []
        # Same words as `groups` and `show`, so that one can be found from the other.
        for fate in self._fates:
            is_unread = fate.is_unread and fate.annotations and not fate.steps
            reader = ", which no trainer reads" if is_unread else ""
            parts.append(f"{fate} (set {fate.annotation_set}{reader})")
        return ("" if self.is_trained() else "never trained: ") + "; ".join(parts)

    def reasons(self) -> Iterator[tuple[int | None, str]]:
        batch, row, eid = self._batch, self._row, self._eid
        if batch is not None and self._is_planned:
            each = f", {batch.rollouts_per_group} runs each" if batch.rollouts_per_group else ""
            yield batch.planned_at, f"planned: batch {batch.batch}, {len(batch.tasks)} tasks{each}"
        if batch is not None and batch.sealed_at is not None:
            yield batch.sealed_at, f"batch {batch.batch} sealed at {batch.expected} experiences"
        if row is None:
            yield None, f"never stored: nobody wrote run {eid.run} of task {eid.task}"
            return
        yield position_of(row.address), f"recorded, {row.length} tokens, reward {row.reward}"
        if row.refused is not None:
            yield position_of(row.address), f"refused at the door: {row.refused}"
            return
        for fate in self._fates:
            yield from self._reasons_of(fate)
        if not self._fates:
            yield None, "no strategy has run: `trinity-buffer annotate` runs one"

    def _reasons_of(self, fate: Fate) -> Iterator[tuple[int | None, str]]:
        name = f"set {fate.annotation_set}"
        if fate.state == "rejected":
            yield fate.rejected_at, f"{name}: rejected, {fate.reason}"
        elif fate.state != "annotated":
            yield None, f"{name}: {self._undecided(fate)}"
        for note in fate.annotations:
            yield position_of(note.address), f"{name}: annotated"
            for step in note.steps:
                yield from self._reasons_of_step(step)
            if not note.steps and fate.is_unread:
                yield None, f"{name}: no trainer reads it"
            elif not note.steps:
                finished = (
                    "; the experiment is finished: nobody will, unless a trainer still runs or is "
                    "started again"
                )
                ended = finished if writer_queries.is_finished(self._tx, self._key) else ""
                yield None, f"{name}: ready, and no trainer has taken it{ended}"

    def _reasons_of_step(self, step: StepOfRow) -> Iterator[tuple[int | None, str]]:
        trainer = f"trainer {step.trainer}:"
        if step.step is None:
            yield step.rejected_at, f"{trainer} rejected, {step.reason}"
        elif step.experiment:
            state = "trained" if step.committed else "handed out, and not committed,"
            where = f"as the log of {step.experiment!r} says"
            yield None, f"{trainer} {state} in step {step.step}, {where}"
        else:
            row = trainer_queries.step_at(self._tx, self._key, step.trainer, step.step)
            assert row is not None  # its rows were delivered
            yield row.leased_at, f"{trainer} handed out in step {step.step}"
            state = "is not committed" if row.committed_at is None else "committed"
            yield row.committed_at, f"{trainer} step {step.step} {state}"

    def _undecided(self, fate: Fate) -> str:
        if fate.state == "unseen":
            strategy = writer_queries.consumer_row(self._tx, self._key, fate.annotation_set)
            cursor = 0 if strategy is None else strategy.cursor
            return f"not seen yet, the strategy has read up to position {cursor}"
        planned = None if self._batch is None else self._batch.rollouts_per_group
        if self._batch is None or planned is None:
            return (
                "waiting for its group, whose batch was never planned: a seal or a deadline ends it"
            )
        runs = {row.eid.run for row in self._group if row.refused is None}
        missing = sorted(set(range(planned)) - runs)
        return (
            f"waiting for its group, which has {len(runs)} of {planned} runs"
            + (f" (missing: {_shortened(missing)})" if missing else "")
            + f"; the batch is {'not sealed' if self._batch.sealed_at is None else 'sealed'}"
        )


def _shortened(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:8])) + (" ..." if len(items) > 8 else "")
