"""Segments of events, decoded for reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trinity_buffer.codec import Segment, decode_segment
from trinity_buffer.events import WithSegment
from trinity_buffer.inspect.source import Source
from trinity_buffer.pipeline.archive_file import SegmentParts
from trinity_buffer.pipeline.events import Event, decoded
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.loading.segments import joined, read_segments
from trinity_buffer.store import log
from trinity_buffer.store.transaction import ReadSession


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
    experiment: Experiment | Source, positions: Iterable[int], families: Sequence[str]
) -> dict[int, EventWithSegment]:
    """Return the events at ``positions`` with those of their families that are wanted.

    Raises:
        DamagedSegmentError: a checksum does not hold.
    """
    wanted = sorted(set(positions))
    stored = await experiment.database.read(log.read_at, experiment.key, wanted)
    events = [decoded(experiment.name, one) for one in stored]
    keys = {event.fact.segment for event in events if isinstance(event.fact, WithSegment)}

    def read(s: ReadSession) -> tuple[dict[bytes, dict[str, Segment]], dict[bytes, str]]:
        stored_segments = read_segments(s, sorted(keys), families)
        absent = {key: absence.why for key, absence in stored_segments.absent.items()}
        return s.compute(_decoded, stored_segments.parts), absent

    found, absent = await experiment.database.read_session(read)
    by_position = {}
    for event in events:
        fact = event.fact
        assert isinstance(fact, WithSegment)  # where rows are of
        by_position[event.position] = EventWithSegment(
            event, fact, found.get(fact.segment, {}), absent.get(fact.segment)
        )
    return by_position


def _decoded(parts: SegmentParts) -> dict[bytes, dict[str, Segment]]:
    return {
        key: {family: decode_segment(blob) for family, blob in families.items()}
        for key, families in joined(parts).items()
    }
