"""Segments of events, decoded for reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trinity_buffer.codec import Segment, decode_segment
from trinity_buffer.pipeline.archive_file import SegmentParts
from trinity_buffer.pipeline.background import in_thread
from trinity_buffer.pipeline.events import Event, decoded
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.stored_segments import joined, read_segments
from trinity_buffer.store import log


@dataclass(frozen=True, slots=True)
class EventWithSegment:
    """An event and the segment that it names, family by family.

    Attributes:
        archived: why the segment cannot be had any more, None where it can.
    """

    event: Event
    families: Mapping[str, Segment]
    archived: str | None


async def events_with_segments(
    experiment: Experiment, positions: Iterable[int], families: Sequence[str]
) -> dict[int, EventWithSegment]:
    """Return the events at ``positions`` with those of their families that are wanted.

    Raises:
        DamagedSegmentError: a checksum does not hold.
    """
    wanted = sorted(set(positions))
    async with experiment.database.reading() as tx:
        stored = await log.read_at(tx, experiment.key, wanted)
    events = [decoded(experiment.name, one) for one in stored]
    keys = {bytes(event.body["segment"]) for event in events if event.body.get("segment")}
    stored_segments = await read_segments(experiment.database, sorted(keys), families)
    found = await in_thread(_decoded, stored_segments.parts)
    absent = {key: absence.why for key, absence in stored_segments.absent.items()}
    by_position = {}
    for event in events:
        key = bytes(event.body["segment"] or b"")
        by_position[event.position] = EventWithSegment(event, found.get(key, {}), absent.get(key))
    return by_position


def _decoded(parts: SegmentParts) -> dict[bytes, dict[str, Segment]]:
    return {
        key: {family: decode_segment(blob) for family, blob in families.items()}
        for key, families in joined(parts).items()
    }
