"""One experience: its columns, what became of it, and what trainers measured of it. No torch.

Segments are decoded here for all readers: an event whose segment is damaged or archived costs only
its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from trinity_buffer.codec import Column, Segment, decode_segment
from trinity_buffer.errors import (
    ArchivedSegmentError,
    CodecError,
    DamagedSegmentError,
    UnknownNameError,
)
from trinity_buffer.events import (
    MEASURED_ROWS,
    MEASURED_TOKENS,
    BatchLeased,
    ExperiencesRecorded,
    StepMeasured,
    StepsCommitted,
    WithSegment,
)
from trinity_buffer.identity import FAMILIES, parse_uid
from trinity_buffer.inspector.fates import AnnotationRow, Fate, StepOfRow, fates
from trinity_buffer.inspector.source import Source, now
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.handle import Event, decoded
from trinity_buffer.pipeline.load.segments import Absence, read_segments
from trinity_buffer.store import inspection, log, segments, trainer_queries
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.rows import ExperienceRow, StepRow, position_of, slot_of, written_as
from trinity_buffer.store.transaction import ReadSession, SegmentParts, Transaction

Damage = ArchivedSegmentError | CodecError | DamagedSegmentError
"""The first where an archive cannot be read; what was deleted for good is no damage."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row of which something cannot be read.

    Attributes:
        position: of the event whose body or segment is damaged.
    """

    uid: str
    position: int
    why: str

    @override
    def __str__(self) -> str:
        return f"{self.uid}: event {self.position} cannot be read: {self.why}"


@dataclass(frozen=True, slots=True)
class EventWithSegment:
    """An event and the segment that it names, family by family.

    Attributes:
        archived: why the segment cannot be had any more, None where it can.
    """

    event: Event
    fact: WithSegment
    families: Mapping[str, Segment]
    archived: str | None


async def events_with_segments(
    experiment: Experiment | Source, wanted: Mapping[int, str], families: Sequence[str]
) -> dict[int, EventWithSegment]:
    """Return the events at some positions with those of their families that are wanted.

    Args:
        experiment: whose events.
        wanted: position -> what of it is shown, such as a uid.
        families: of columns.

    Raises:
        CodecError, DamagedSegmentError: one of them cannot be read; says whose, and where.
    """
    found, damaged = await readable_events(experiment, wanted, families)
    for position, error in damaged.items():
        if isinstance(error, ArchivedSegmentError):  # `EventWithSegment.archived` says so
            continue
        raise type(error)(str(Unreadable(wanted[position], position, str(error)))) from error
    return found


async def readable_events(
    experiment: Experiment | Source, positions: Iterable[int], families: Sequence[str]
) -> tuple[dict[int, EventWithSegment], dict[int, Damage]]:
    """Return what can be read of the events at ``positions``, and why the rest cannot, by position.

    An event whose segment is damaged is there with the families that can be read; one whose
    segment is in an archive that cannot be read, with none.
    """
    wanted = sorted(set(positions))
    stored = await experiment.database.read(log.read_at, experiment.key, wanted)
    events, damaged = decoded_each(experiment.name, stored)
    found, broken = await with_segments(experiment, events, families)
    return found, damaged | broken


def decoded_each(
    experiment: str, stored: Iterable[StoredEvent]
) -> tuple[list[Event], dict[int, Damage]]:
    """Return those of the events whose bodies can be read, and why the rest cannot, by position."""
    events: list[Event] = []
    damaged: dict[int, Damage] = {}
    for one in stored:
        try:
            events.append(decoded(experiment, one))
        except CodecError as error:
            damaged[one.position] = error
    return events, damaged


async def with_segments(
    experiment: Experiment | Source, events: Iterable[Event], families: Sequence[str]
) -> tuple[dict[int, EventWithSegment], dict[int, Damage]]:
    """Return position -> event with what can be read of its segment, and why the rest cannot."""
    named: dict[int, tuple[Event, WithSegment]] = {}
    for event in events:
        assert isinstance(event.fact, WithSegment)  # where rows are of
        named[event.position] = event, event.fact
    facts = {fact.segment: fact for _, fact in named.values()}

    def read(
        s: ReadSession,
    ) -> tuple[dict[bytes, dict[str, Segment]], dict[bytes, Damage], Mapping[bytes, Absence]]:
        stored_segments = read_segments(s, sorted(facts), families)
        absent = stored_segments.absent
        there = {
            key: [family for family in families if family in fact.families]
            for key, fact in facts.items()
            if key not in absent
        }
        return *s.compute(_decoded, there, stored_segments.parts), absent

    found, broken, absent = await experiment.database.read_session(read)
    by_position: dict[int, EventWithSegment] = {}
    damaged: dict[int, Damage] = {}
    for position, (event, fact) in named.items():
        key = fact.segment
        gone = absent.get(key)
        why = None if gone is None else gone.why
        by_position[position] = EventWithSegment(event, fact, found.get(key, {}), why)
        if key in broken:
            damaged[position] = broken[key]
        elif gone is not None and not gone.deleted:
            damaged[position] = ArchivedSegmentError(gone.why)
    return by_position, damaged


def _decoded(
    wanted: Mapping[bytes, Sequence[str]], parts: SegmentParts
) -> tuple[dict[bytes, dict[str, Segment]], dict[bytes, Damage]]:
    found: dict[bytes, dict[str, Segment]] = {key: {} for key in wanted}
    damaged: dict[bytes, Damage] = {}
    for key, family in ((key, family) for key, some in wanted.items() for family in some):
        try:
            blob = segments.blob_of(key, family, parts.get((key, family), []))
            found[key][family] = decode_segment(blob)
        except (CodecError, DamagedSegmentError) as error:
            damaged[key] = error
    return found, damaged


FIRST_VALUES = 8


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor as people read it.

    Attributes:
        minimum, mean, maximum: None of an empty tensor, and of bits that NumPy cannot read.
        first: the first elements.
        scaled_mask: stored as one number that stands for ``number * action_mask``.
    """

    dtype: str
    shape: tuple[int, ...]
    minimum: float | None
    mean: float | None
    maximum: float | None
    first: tuple[float | int | bool, ...]
    scaled_mask: bool = False


def values_of(column: Column) -> npt.NDArray[Any] | None:
    """Return the elements of a column as numbers, None of dtypes that NumPy cannot read."""
    if column.dtype == "bfloat16":
        return (column.elements.astype(np.uint32) << 16).view(np.float32)
    if column.dtype.startswith(("float8", "float4", "complex")):
        return None
    return column.elements


def row_of(column: Column, row: int) -> int | None:
    """Return where ``row`` of the segment is in its column, None if it has no tensor there."""
    if column.rows is None:
        return row
    place = int(np.searchsorted(column.rows, row))
    return place if place < len(column.rows) and column.rows[place] == row else None


def summaries(segment: Segment, row: int) -> Iterator[tuple[str, TensorSummary]]:
    """Yield field and summary of each tensor in one row of a segment."""
    for name, columns in segment.columns.items():
        for column in columns:
            place = row_of(column, row)
            if place is not None:
                yield name, _summary(column, place)


def _summary(column: Column, place: int) -> TensorSummary:
    begin, end = column.offsets[place : place + 2].tolist()
    shape = tuple(column.shapes[place].tolist())
    scaled = column.encoding == "scaled_mask"
    elements = values_of(column)
    if elements is None or begin == end:
        return TensorSummary(column.dtype, shape, None, None, None, (), scaled)
    values = elements[begin:end]
    numbers = values.astype(np.float64)
    return TensorSummary(
        column.dtype,
        shape,
        float(numbers.min()),
        float(numbers.mean()),
        float(numbers.max()),
        tuple(values[:FIRST_VALUES].tolist()),
        scaled,
    )


def mean_of(segment: Segment, field: str, row: int) -> float | None:
    """Return the mean of one field in one row, of a scaled mask its scale; None if it has none."""
    for column in segment.columns.get(field, []):
        place = row_of(column, row)
        if place is not None:
            return _summary(column, place).mean
    return None


def means_of(segment: Segment, field: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return `mean_of` for all rows, up to rounding, and which of them have one."""
    means, known = np.zeros(segment.rows), np.zeros(segment.rows, bool)
    for column in segment.columns.get(field, []):
        values, begins, sizes = values_of(column), column.offsets[:-1], column.sizes
        if values is None or not len(values):
            continue
        full = sizes > 0
        rows = np.flatnonzero(full) if column.rows is None else column.rows[full]
        sums = np.add.reduceat(values.astype(np.float64), begins[full])
        means[rows], known[rows] = sums / sizes[full], True
    return means, known


def elements_of(segment: Segment, field: str, row: int) -> npt.NDArray[Any] | None:
    """Return the elements of one field in one row; see `elements_of_rows`."""
    return elements_of_rows(segment, field, [row])[0]


def elements_of_rows(
    segment: Segment, field: str, rows: Sequence[int]
) -> list[npt.NDArray[Any] | None]:
    """Return the elements of one field in some rows, each flat; None where NumPy can read none.

    Of a scaled mask it is the one number that stands before the mask.
    """
    found: list[npt.NDArray[Any] | None] = [None] * len(rows)
    for column in segment.columns.get(field, []):
        values, ends = values_of(column), column.offsets.tolist()
        if values is None:
            continue
        places = None if column.rows is None else _places(column.rows)
        for at, row in enumerate(rows):
            place = row if places is None else places.get(row)
            if place is not None and found[at] is None:
                found[at] = values[ends[place] : ends[place + 1]]
    return found


def _places(rows: npt.NDArray[Any]) -> dict[int, int]:
    return {row: place for place, row in enumerate(rows.tolist())}


Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What a trainer measured in one step; `StepMeter` says what each number is.

    Attributes:
        metrics: numbers of the whole step.
        rows: name -> ``[rows]``; NaN where a row has no such number.
        tokens: name -> ``[tokens]`` of each row, where that was asked for.
        places: (experiment, address of the annotation) -> row; "" is the trainer's own experiment.
    """

    step: int
    metrics: Mapping[str, float]
    rows: Mapping[str, Numbers]
    tokens: Segment | None
    places: Mapping[tuple[str, int], int]

    def of_row(self, annotation: int, experiment: str = "") -> dict[str, float]:
        """Return the numbers that a row has, by the address of its annotation."""
        row = self.places[experiment, annotation]
        found = {name: float(values[row]) for name, values in self.rows.items()}
        return {name: value for name, value in found.items() if not np.isnan(value)}

    def of_tokens(self, annotation: int, experiment: str = "") -> dict[str, Numbers]:
        """Return name -> ``[tokens]`` of a row; empty where none were recorded."""
        if self.tokens is None:
            return {}
        row = self.places[experiment, annotation]
        found = {name: elements_of(self.tokens, name, row) for name in self.tokens.columns}
        return {name: values for name, values in found.items() if values is not None}


async def measured(
    source: Source, trainer: str, steps: Sequence[int], *, tokens: bool = False
) -> dict[int, Measured]:
    """Return step -> what ``trainer`` measured in it, of the committed ones that it measured.

    Args:
        tokens: also what it recorded token by token.

    Raises:
        DamagedSegmentError: a checksum does not hold.
    """
    if not steps:
        return {}
    rows = await source.read(
        trainer_queries.steps,
        source.key,
        trainer,
        after=min(steps) - 1,
        limit=max(steps) - min(steps) + 1,
    )
    wanted = {row.step: row for row in rows if row.step in set(steps) and row.committed_at}
    positions = await _positions(source, trainer, wanted)
    families = [MEASURED_ROWS, *([MEASURED_TOKENS] if tokens else [])]
    whose = {position: f"step {step} of {trainer}" for step, position in positions.items()}
    told = await events_with_segments(source, whose, families)
    places = await _manifest_places(source, [wanted[step] for step in positions])
    found = {}
    for step, position in positions.items():
        fact, segments = told[position].fact, told[position].families
        assert isinstance(fact, StepMeasured)  # what stands at these positions
        one = segments.get(MEASURED_ROWS)
        columns = {} if one is None else {n: some[0].elements for n, some in one.columns.items()}
        kept = segments.get(MEASURED_TOKENS)
        found[step] = Measured(step, fact.metrics, columns, kept, places[step])
    return found


async def _positions(source: Source, trainer: str, wanted: Mapping[int, StepRow]) -> dict[int, int]:
    """Return step -> position of its `StepMeasured`: it stands behind the commit of the step."""
    commits = await source.events([row.committed_at or 0 for row in wanted.values()])
    behind = [
        at + number
        for at, event in commits.items()
        if isinstance(event.fact, StepsCommitted)
        for number in range(1, len(event.fact.steps) + 2)  # a PolicyPublished may come first
    ]
    found = {}
    for position, event in (await source.events(behind)).items():
        fact = event.fact
        if isinstance(fact, StepMeasured) and fact.consumer == trainer and fact.step in wanted:
            found[fact.step] = position
    return found


async def _manifest_places(
    source: Source, rows: Sequence[StepRow]
) -> dict[int, dict[tuple[str, int], int]]:
    """Return step -> where each annotation stands in its manifest, as it was served last."""
    leases = await source.leases([row.leased_at for row in rows])
    return {
        row.step: {name: place for place, name in enumerate(_names(leases[row.leased_at]))}
        for row in rows
    }


def _names(lease: BatchLeased) -> Iterator[tuple[str, int]]:
    """Yield experiment and address of the annotation of each row."""
    names = ["", *lease.sources]
    for row, annotation in enumerate(lease.annotations):
        yield names[lease.source[row]] if lease.source else "", annotation


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
