"""One experience: its columns, what became of it, and what trainers measured of it. No torch.

Segments are decoded here for all readers: an event whose segment is damaged or archived costs only
its own rows. So `search` goes on through all texts of rollouts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.codec.objects import unpack_object
from trinity_buffer.codec.segments import Column, Segment, decode_segment
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
from trinity_buffer.inspector.fates import Fate, StepView, fates
from trinity_buffer.inspector.source import Source, now
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.handle import Event, decoded, require_positions
from trinity_buffer.pipeline.load.reading import StoredSegments, read_segments
from trinity_buffer.pipeline.store import Experiment
from trinity_buffer.pipeline.verify.projections import Progress, no_progress
from trinity_buffer.store import fold, inspection, log, segments, trainer_queries, writer_queries
from trinity_buffer.store.row_numbers import addresses
from trinity_buffer.store.rows import (
    SLOT_BITS,
    ExperienceRow,
    StepRow,
    first_address,
    format_address,
    position_of,
    slot_of,
)
from trinity_buffer.store.transaction import ReadSession, Transaction

Damage = errors.ArchivedSegmentError | errors.CodecError | errors.DamagedSegmentError
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
    """An event and the segment that it names.

    Attributes:
        segment: the families that were read, as one: no two of an experience share a field.
        archived: why the segment cannot be had any more, None where it can.
    """

    event: Event
    fact: WithSegment
    segment: Segment
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
    readable, damaged = await readable_events(experiment, wanted, families)
    for position, error in damaged.items():
        # Archived tensors are a state of the row, which `EventWithSegment.archived` shows.
        if not isinstance(error, errors.ArchivedSegmentError):
            raise type(error)(str(Unreadable(wanted[position], position, str(error)))) from error
    return readable


async def readable_events(
    experiment: Experiment | Source, positions: Iterable[int], families: Sequence[str]
) -> tuple[dict[int, EventWithSegment], dict[int, Damage]]:
    """Return the readable events at ``positions``, and why others are not, by position.

    An event whose segment is damaged is there with the families that can be read; one whose
    segment is in an archive that cannot be read, with none.
    """
    wanted = sorted(set(positions))
    readable: dict[int, EventWithSegment] = {}
    damaged: dict[int, Damage] = {}

    def decode(event: Event, fact: WithSegment, stored: StoredSegments) -> None:
        segment, gone = Segment(0), stored.absent.get(fact.segment)
        for family in (name for name in families if gone is None and name in fact.families):
            parts = stored.parts.get((fact.segment, family), [])
            try:
                part = decode_segment(segments.blob_of(fact.segment, family, parts))
            except (errors.CodecError, errors.DamagedSegmentError) as error:
                damaged[event.position] = error
                continue
            columns, objects = segment.columns | part.columns, segment.objects | part.objects
            segment = Segment(part.rows, columns, objects)
        if gone is not None and not gone.deleted:
            damaged[event.position] = errors.ArchivedSegmentError(gone.why)
        why = None if gone is None else gone.why
        readable[event.position] = EventWithSegment(event, fact, segment, why)

    def read(s: ReadSession) -> None:
        events: list[tuple[Event, WithSegment]] = []
        stored = {at.position: at for at in s.read(log.read_at, experiment.key, wanted)}
        for position in wanted:
            try:
                require_positions(experiment.name, [position], stored)
                event = decoded(experiment.name, stored[position])
            except errors.CodecError as error:
                damaged[position] = error
                continue
            if isinstance(event.fact, WithSegment):
                events.append((event, event.fact))
            else:  # its kind was changed
                where = f"the event at position {position}"
                wrong = errors.CodecError(f"{where} records no rows; run `trinity-buffer verify`")
                damaged[position] = wrong
        keys = sorted({fact.segment for _, fact in events})
        stored_segments = read_segments(s, keys, families)
        for event, fact in events:
            decode(event, fact, stored_segments)

    await experiment.database.read_session(read)
    return readable, damaged


Numbers = npt.NDArray[Any]

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


def values_of(column: Column) -> Numbers | None:
    """Return the elements of a column as numbers, None of dtypes that NumPy cannot read."""
    if column.dtype == "bfloat16":
        # NumPy has no bfloat16: its bits are the upper half of a float32.
        return (column.elements.astype(np.uint32) << 16).view(np.float32)
    if column.dtype.startswith(("float8", "float4", "complex")):
        return None
    return column.elements


def places_of(column: Column, rows: Sequence[int]) -> Sequence[int | None]:
    """Return where rows of the segment are in its column, None of those without a tensor there."""
    if column.rows is None:
        return rows
    places = {row: place for place, row in enumerate(column.rows.tolist())}
    return [places.get(row) for row in rows]


def summaries(segment: Segment, row: int) -> Iterator[tuple[str, TensorSummary]]:
    """Yield field and summary of each tensor in one row of a segment."""
    columns = ((name, column) for name, columns in segment.columns.items() for column in columns)
    for name, column in columns:
        (place,) = places_of(column, [row])
        if place is None:
            continue
        begin, end = column.offsets[place : place + 2].tolist()
        values = values_of(column)
        numbers: tuple[Any, Any, Any, tuple[Any, ...]] = (None, None, None, ())
        if values is not None and begin < end:
            own = values[begin:end]
            real = own.astype(np.float64)
            first = tuple(own[:FIRST_VALUES].tolist())
            numbers = (float(real.min()), float(real.mean()), float(real.max()), first)
        shape, is_scaled = tuple(column.shapes[place].tolist()), column.encoding == "scaled_mask"
        yield name, TensorSummary(column.dtype, shape, *numbers, is_scaled)


def mean_of(segment: Segment, field: str, row: int) -> float | None:
    """Return the mean of one field in one row, of a scaled mask its scale; None if it has none."""
    elements = elements_of(segment, field, row)
    return None if elements is None or not len(elements) else float(elements.astype(float).mean())


def means_of(segment: Segment, field: str) -> tuple[Numbers, Numbers]:
    """Return `mean_of` for all rows, up to rounding, and which of them have one."""
    means, known = np.zeros(segment.rows), np.zeros(segment.rows, bool)
    for column in segment.columns.get(field, []):
        values, begins, sizes = values_of(column), column.offsets[:-1], column.sizes
        if values is None or not len(values):
            continue
        # reduceat of an empty slice is the element behind it, not 0.
        full = sizes > 0
        rows = np.flatnonzero(full) if column.rows is None else column.rows[full]
        sums = np.add.reduceat(values.astype(np.float64), begins[full])
        means[rows], known[rows] = sums / sizes[full], True
    return means, known


def elements_of(segment: Segment, field: str, row: int) -> Numbers | None:
    """Return the elements of one field in one row; see `elements_of_rows`."""
    return elements_of_rows(segment, field, [row])[0]


def elements_of_rows(segment: Segment, field: str, rows: Sequence[int]) -> list[Numbers | None]:
    """Return the elements of one field in some rows, each flat; None where NumPy can read none.

    Of a scaled mask it is the one number that stands before the mask.
    """
    elements: list[Numbers | None] = [None] * len(rows)
    for column in segment.columns.get(field, []):
        values, ends = values_of(column), column.offsets.tolist()
        if values is None:
            continue
        for at, place in enumerate(places_of(column, rows)):
            if place is not None and elements[at] is None:
                elements[at] = values[ends[place] : ends[place + 1]]
    return elements


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What a trainer measured in one step; `StepMeter` says what each number is.

    Attributes:
        metrics: numbers of the whole step.
        rows: name -> ``[rows]``; NaN where a row has no such number.
        tokens: name -> ``[tokens]`` of each row, where that was asked for; else it has no columns.
        places: (experiment, address of the annotation) -> row; "" is the trainer's own experiment.
    """

    metrics: Mapping[str, float]
    rows: Mapping[str, Numbers]
    tokens: Segment
    places: Mapping[tuple[str, int], int]

    def of_row(self, annotation: int, experiment: str = "") -> dict[str, float]:
        """Return the numbers that a row has, by the address of its annotation."""
        row = self.places[experiment, annotation]
        numbers = {name: float(values[row]) for name, values in self.rows.items()}
        return {name: number for name, number in numbers.items() if not np.isnan(number)}

    def of_tokens(self, annotation: int, experiment: str = "") -> dict[str, Numbers]:
        """Return name -> ``[tokens]`` of a row; empty where none were recorded."""
        row = self.places[experiment, annotation]
        columns = {name: elements_of(self.tokens, name, row) for name in self.tokens.columns}
        return {name: values for name, values in columns.items() if values is not None}


async def measured(
    source: Source, trainer: str, rows: Sequence[StepRow], *, tokens: bool = False
) -> dict[int, Measured]:
    """Return step -> what ``trainer`` measured in it, of the committed ones that it measured.

    Args:
        tokens: also what it recorded token by token.

    Raises:
        DamagedSegmentError: a checksum does not hold.
    """
    committed = {row.step: row for row in rows if row.committed_at}
    # No table knows where a measurement is: it is looked for behind its commit.
    commits = await source.events([row.committed_at or 0 for row in committed.values()])
    behind = [
        at + number
        for at, event in commits.items()
        if isinstance(event.fact, StepsCommitted)
        for number in range(1, len(event.fact.steps) + 2)  # a PolicyPublished may come first
    ]
    facts = ((at, event.fact) for at, event in (await source.events(behind)).items())
    of_steps = {
        at: fact
        for at, fact in facts
        if isinstance(fact, StepMeasured) and fact.consumer == trainer and fact.step in committed
    }
    whose = {at: f"step {fact.step} of {trainer}" for at, fact in of_steps.items()}
    # Apart: a name may be measured of rows and of tokens.
    events = await events_with_segments(source, whose, [MEASURED_ROWS])
    by_token = await events_with_segments(source, whose, [MEASURED_TOKENS]) if tokens else {}
    leases = await source.leases([committed[fact.step].leased_at for fact in of_steps.values()])
    measures = {}
    for position, fact in of_steps.items():
        by_row = events[position].segment.columns
        columns = {name: parts[0].elements for name, parts in by_row.items()}
        own_tokens = by_token[position].segment if tokens else Segment(0)
        lease = leases[committed[fact.step].leased_at]
        names = zip(experiments_of(lease), lease.annotations, strict=True)
        places = {name: place for place, name in enumerate(names)}
        measures[fact.step] = Measured(fact.metrics, columns, own_tokens, places)
    return measures


async def measured_in(source: Source, step: StepView, *, tokens: bool = False) -> Measured | None:
    """Return the measures of one step; None unless its commit is in this log, with any."""
    if step.step is None or not step.committed or step.experiment:
        return None
    row = await source.read(trainer_queries.step_at, source.key, step.trainer, step.step)
    if row is None:  # lost, which `verify` names and `rebuild` mends
        return None
    return (await measured(source, step.trainer, [row], tokens=tokens)).get(step.step)


def experiments_of(lease: BatchLeased) -> list[str]:
    """Return of each row its experiment: "" for the trainer's own, else the expert's."""
    names = ["", *lease.sources]
    return [names[at] for at in lease.source] if lease.source else [""] * len(lease.experiences)


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
        kind: as it was recorded; but a mask that hides nothing of one answer is ``single_turn``.
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
    source = now(experiment)
    row, own = await row_and_fates(source, uid)
    slot, position = slot_of(row.address), position_of(row.address)
    recorded = (await events_with_segments(source, {position: uid}, tuple(FAMILIES)))[position]
    event, fact = recorded.event, recorded.fact
    assert isinstance(fact, ExperiencesRecorded)  # where the row is of
    objects = {name: values[slot] for name, values in recorded.segment.objects.items()}
    noted = {position_of(fate.first): uid for fate in own if fate.first is not None}
    notes = await events_with_segments(source, noted, ["annotation"])
    sets = []
    for fate in own:
        annotation, copies, tensors, steps = None, len(fate.annotations), {}, list[StepView]()
        if fate.first is not None:
            segment, annotation = notes[position_of(fate.first)].segment, format_address(fate.first)
            tensors = dict(summaries(segment, slot_of(fate.first)))
        for at, step in ((at, step) for at, held in fate.annotations.items() for step in held):
            of_step = await measured_in(source, step)
            steps.append(step if of_step is None else replace(step, measured=of_step.of_row(at)))
        of_set = (fate.annotation_set, fate.state, fate.reason)
        sets.append(SetView(*of_set, annotation, copies, tensors, tuple(steps)))
    shown = row._asdict() | {"address": format_address(row.address)}
    shown |= {"digest": row.digest.hex(), "segment": row.segment.hex()}
    return ExperienceView(
        uid=shown.pop("eid").uid,
        actor=event.actor,
        recorded_at=event.recorded_at,
        kind=_kind_of(fact.columns.kind[slot], recorded.segment, slot),
        archived=recorded.archived,
        tensors=dict(summaries(recorded.segment, slot)),
        objects={name: value for name, value in objects.items() if value is not None},
        sets=tuple(sets),
        **shown,
    )


def _kind_of(recorded: str, segment: Segment, slot: int) -> str:
    """Return the kind that is shown: one is recorded as ``multi_turn`` as soon as it has a mask."""
    mask = elements_of(segment, "action_mask", slot)
    messages = segment.objects["messages"][slot] if "messages" in segment.objects else None
    roles = [message.get("role") for message in messages or () if isinstance(message, Mapping)]
    is_one = mask is not None and bool(mask.all()) and roles.count("assistant") <= 1
    return "single_turn" if recorded == "multi_turn" and is_one else recorded


async def row_and_fates(source: Source, uid: str) -> tuple[ExperienceRow, list[Fate]]:
    """Return the experience ``uid`` and what became of it, by annotation set.

    Raises:
        InvalidArgumentError: not ``batch/task/run/step/suffix``.
        UnknownNameError: there is no such experience.
    """
    eid = parse_uid(uid)

    def read(tx: Transaction) -> tuple[ExperienceRow, list[Fate]]:
        row = inspection.find(tx, source.key, eid)
        if row is None:
            raise errors.UnknownNameError(
                f"experiment {source.name!r} holds no experience {uid!r}; `trinity-buffer "
                "groups` shows what there is"
            )
        return row, fates(tx, source.key, [row])[row.address]

    return await source.read(read)


AROUND = 40
"""So many characters stand before and after what was found."""


@dataclass(frozen=True, slots=True)
class Match:
    """A text that holds what was looked for.

    Attributes:
        address: of the experience, as an integer.
        field: of the experience, such as ``response_text`` or ``messages[2].content``.
        excerpt: the first place, with what stands around it.
    """

    uid: str
    field: str
    excerpt: str
    reward: float | None
    policy_version: int | None
    address: int = 0


async def search(
    source: Source,
    text: str,
    *,
    exact: bool = False,
    after: int = -1,
    progress: Progress = no_progress,
    unreadable: list[Unreadable] | None = None,
    on_page: Callable[[int], bool | None] = lambda _: None,
) -> AsyncIterator[Match]:
    """Yield each text of a rollout that holds ``text``, in order of the log, as soon as found.

    Texts are those of the family ``text``: prompt, response, messages, tools, and the messages of
    what was chosen and rejected. Reads those of all rollouts, some events at a time; stop when
    there is enough.

    Args:
        source: the experiment.
        text: what to look for.
        exact: upper and lower case are different.
        after: only in experiences above this address.
        progress: called with the position that was reached, and the last one.
        unreadable: gets the rows whose texts cannot be read; None: the error at the end names them.
        on_page: called with the last address that some events can have, once they were searched;
            the search ends if it returns True.

    Raises:
        InvalidArgumentError: ``text`` is empty.
        DamagedSegmentError: at the end, where ``unreadable`` is None.
    """
    if not text:
        raise errors.InvalidArgumentError(
            "text is empty, and every text holds that: say what to look for"
        )
    # What is recorded meanwhile is left out, or a search of a running store might never end.
    head, reached = await source.head(), after
    damaged: list[Unreadable] = [] if unreadable is None else unreadable
    # By rows, not events: one event may hold a thousand long texts.
    page = partial(addresses, experiment=source.key, limit=sizes.rows_per_page)
    while len(wanted := await source.read(page, after=reached)):
        positions = [at for at in np.unique(wanted >> SLOT_BITS).tolist() if at <= head]
        if not positions:
            break
        events, broken = await readable_events(source, positions, ["text"])
        matches = await source.database.compute(_matches, events, text, after, exact=exact)
        for position in positions:
            if position in broken:
                rows = await source.read(writer_queries.rows_of_event, source.key, position)
                damaged += [
                    Unreadable(row.eid.uid, position, str(broken[position]))
                    for row in rows
                    if row.refused is None and row.address > after
                ]
            for match in matches.get(position, ()):
                yield match
        # After the matches: a caller may stop at this address and go on behind it.
        progress("search", positions[-1], head)
        reached = first_address(positions[-1] + 1) - 1
        if on_page(reached):
            break
    if unreadable is None and damaged:
        raise errors.DamagedSegmentError("; ".join(map(str, damaged)))


def _matches(
    events: Mapping[int, EventWithSegment], text: str, after: int, *, exact: bool
) -> dict[int, list[Match]]:
    """Return position -> what was found in its rows above ``after``, where anything was."""
    matches = {}
    for position, event in events.items():
        objects = event.segment.objects.items()
        columns = [(of.pieces, _held(name, of.pieces, text, exact=exact)) for name, of in objects]
        if any(held for _, held in columns):
            assert isinstance(event.fact, ExperiencesRecorded)  # the kind that was read
            rows = fold.rows_recorded_by(position, event.fact)
            matches[position] = [
                Match(row.eid.uid, *text_match, row.reward, row.policy_version, row.address)
                for slot, row in enumerate(rows)
                if row.refused is None and row.address > after
                for pieces, held in columns
                for text_match in held.get(pieces[slot], ())
            ]
    return matches


_Held = dict[bytes, list[tuple[str, str]]]


def _held(name: str, pieces: Iterable[bytes], text: str, *, exact: bool) -> _Held:
    """Return packed value of a column -> field and excerpt of each text in it that holds ``text``.

    All are looked at as one, and one by one only where that holds it: few columns do.
    """
    texts = {piece: list(_texts(name, unpack_object(piece))) for piece in set(pieces) if piece}
    # A match that spans two texts costs a second look, and is not found below.
    joined = "\0".join(value for fields in texts.values() for _, value in fields)
    if (text if exact else text.casefold()) not in (joined if exact else joined.casefold()):
        return {}
    return {
        piece: [
            (field, excerpt)
            for field, value in fields
            if (excerpt := _excerpt(value, text, exact=exact)) is not None
        ]
        for piece, fields in texts.items()
    }


def _excerpt(value: str, text: str, *, exact: bool) -> str | None:
    at, size = value.find(text), len(text)
    if not exact:
        folded, wanted = value.casefold(), text.casefold()
        at, size = folded.find(wanted), len(wanted)
        if at >= 0 and len(folded) != len(value):  # such as "ss" for "ß"
            ends = list(accumulate(len(character.casefold()) for character in value))
            last = bisect_right(ends, at + size - 1)
            at = bisect_right(ends, at)
            size = last + 1 - at
    return None if at < 0 else value[max(0, at - AROUND) : at + size + AROUND]


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from _texts(f"{name}[{at}]", inner)
