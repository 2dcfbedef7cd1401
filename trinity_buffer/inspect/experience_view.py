"""One experience: what it is, what it holds, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_buffer.codec import Segment
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.identity import FAMILIES, parse_uid
from trinity_buffer.inspect.blobs import EventWithSegment, events_with_segments
from trinity_buffer.inspect.fates import AnnotationRow, Fate, StepOfRow, fates
from trinity_buffer.inspect.measured import Measured, measured
from trinity_buffer.inspect.source import Source, now
from trinity_buffer.inspect.tensors import TensorSummary, summaries
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.store.asking import inspection
from trinity_buffer.store.rows import ExperienceRow, position_of, slot_of, written_as
from trinity_buffer.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class StepView:
    """A gradient step that holds the experience, or the reason for which a trainer left it out.

    Attributes:
        trainer: its name; of one of another experiment ``EXPERIMENT/TRAINER``.
        measured: what the trainer measured of it in that step; empty before the commit, and of
            another experiment's trainer.
        experiment: that other experiment, to whose log the step belongs; "" for this one.
    """

    trainer: str
    step: int | None
    committed: bool
    reason: str | None
    measured: Mapping[str, float] = field(default_factory=dict)
    experiment: str = ""


@dataclass(frozen=True, slots=True)
class SetView:
    """The experience in one annotation set.

    Attributes:
        state: ``refused``, ``unseen``, ``waiting``, ``rejected`` or ``annotated``.
        reason: of what was refused or rejected.
        annotation: ``position:slot`` of the (first) annotation.
        copies: how many annotations there are.
        tensors: what the strategy computed.
        steps: where it was trained.
    """

    annotation_set: str
    state: str
    reason: str | None
    annotation: str | None
    copies: int
    tensors: dict[str, TensorSummary]
    steps: tuple[StepView, ...]


@dataclass(frozen=True, slots=True)
class ExperienceView:
    """One experience.

    Attributes:
        address: ``position:slot`` in the log.
        recorded_at: seconds since 1970; ``actor`` recorded it.
        refused: why no strategy will see it; None where strategies do.
        archived: why tensors and objects cannot be had any more, None where they can.
        tensors: its fields in numbers.
        objects: texts, messages, ``info`` and ``metrics``, as they are.
        sets: what became of it, by annotation set.
    """

    uid: str
    address: str
    actor: str
    recorded_at: float
    kind: str
    reward: float | None
    policy_version: int | None
    prompt_length: int
    length: int
    trained_tokens: int
    finish_reason: str | None
    refused: str | None
    digest: str
    segment: str
    archived: str | None
    tensors: dict[str, TensorSummary]
    objects: dict[str, Any]
    sets: tuple[SetView, ...]


async def show(experiment: Experiment | Source, uid: str) -> ExperienceView:
    """Return everything about the experience ``uid``.

    Raises:
        InvalidArgumentError: not ``batch/task/run/step/suffix``.
        UnknownNameError: there is no such experience.
        DamagedSegmentError: a checksum does not hold.
    """
    eid, source = parse_uid(uid), now(experiment)

    def look(tx: Transaction) -> tuple[ExperienceRow, list[Fate]]:
        row = inspection.find(tx, source.key, eid)
        if row is None:
            raise UnknownNameError(
                f"experiment {source.name!r} holds no experience {uid!r}; `trinity-buffer "
                "groups` shows what there is"
            )
        return row, fates(tx, source.key, [row])[row.address]

    row, found = await source.read(look)
    position = position_of(row.address)
    recorded = (await events_with_segments(source, {position: uid}, tuple(FAMILIES)))[position]
    noted = {position_of(f.annotations[0].address): uid for f in found if f.annotations}
    events = await events_with_segments(source, noted, ["annotation"])
    measures = await _measured(source, found)
    return _view(row, recorded, [_set(fate, events, measures) for fate in found])


async def _measured(source: Source, found: Sequence[Fate]) -> dict[tuple[str, int], Measured]:
    """Return (trainer, step) -> what was measured, of the steps that hold the experience."""
    steps: dict[str, set[int]] = {}
    for one in (step for fate in found for row in fate.annotations for step in row.steps):
        if one.step is not None and one.committed and not one.experiment:
            steps.setdefault(one.trainer, set()).add(one.step)
    every = {name: await measured(source, name, sorted(some)) for name, some in steps.items()}
    return {(name, step): one for name, some in every.items() for step, one in some.items()}


def _view(
    row: ExperienceRow, recorded: EventWithSegment, sets: Sequence[SetView]
) -> ExperienceView:
    slot, event, fact = slot_of(row.address), recorded.event, recorded.fact
    assert isinstance(fact, ExperiencesRecorded)  # where the row is of
    segments = list(recorded.families.values())
    return ExperienceView(
        uid=row.eid.uid,
        address=written_as(row.address),
        actor=event.actor,
        recorded_at=event.recorded_at,
        kind=fact.columns.kind[slot],
        reward=row.reward,
        policy_version=row.policy_version,
        prompt_length=row.prompt_length,
        length=row.length,
        trained_tokens=row.trained_tokens,
        finish_reason=row.finish_reason,
        refused=row.refused,
        digest=row.digest.hex(),
        segment=row.segment.hex(),
        archived=recorded.archived,
        tensors={name: one for segment in segments for name, one in summaries(segment, slot)},
        objects=_objects(segments, slot),
        sets=tuple(sets),
    )


def _objects(segments: Sequence[Segment], slot: int) -> dict[str, Any]:
    found = {name: some[slot] for segment in segments for name, some in segment.objects.items()}
    return {name: value for name, value in found.items() if value is not None}


def _set(
    fate: Fate,
    events: Mapping[int, EventWithSegment],
    measures: Mapping[tuple[str, int], Measured],
) -> SetView:
    first: AnnotationRow | None = next(iter(fate.annotations), None)
    tensors: dict[str, TensorSummary] = {}
    if first is not None:
        segment = events[position_of(first.address)].families.get("annotation")
        if segment is not None:
            tensors = dict(summaries(segment, slot_of(first.address)))
    return SetView(
        fate.annotation_set,
        fate.state,
        fate.reason,
        None if first is None else written_as(first.address),
        len(fate.annotations),
        tensors,
        tuple(_step(row.address, step, measures) for row in fate.annotations for step in row.steps),
    )


def _step(address: int, step: StepOfRow, measures: Mapping[tuple[str, int], Measured]) -> StepView:
    one = None if step.step is None else measures.get((step.trainer, step.step))
    known = {} if one is None else one.of_row(address)
    return StepView(step.trainer, step.step, step.committed, step.reason, known, step.experiment)
