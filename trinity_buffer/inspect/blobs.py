"""Segments of events, decoded for reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from trinity_buffer.codec import Segment, decode_segment
from trinity_buffer.errors import ArchivedSegmentError, CodecError, DamagedSegmentError
from trinity_buffer.events import WithSegment
from trinity_buffer.inspect.source import Source
from trinity_buffer.pipeline.events import Event, decoded
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.loading.segments import Absence, read_segments
from trinity_buffer.store import log, segments
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.transaction import ReadSession, SegmentParts

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
