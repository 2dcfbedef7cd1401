"""Segments of events, decoded for reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread

from trinity_buffer.codec import Segment, decode_segment
from trinity_buffer.pipeline.events import Event, decoded
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.store import log, segments


@dataclass(frozen=True, slots=True)
class EventWithSegment:
    """An event and the segment that it names, family by family."""

    event: Event
    families: Mapping[str, Segment]


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
    async with experiment.database.reading() as tx:
        parts = await segments.read(tx, sorted(keys), families)
    found = await anyio.to_thread.run_sync(partial(_decoded, parts))
    return {
        event.position: EventWithSegment(event, found.get(bytes(event.body["segment"] or b""), {}))
        for event in events
    }


def _decoded(parts: Any) -> dict[bytes, dict[str, Segment]]:
    found: dict[bytes, dict[str, Segment]] = {}
    for (key, family), some in parts.items():
        found.setdefault(key, {})[family] = decode_segment(segments.joined(key, family, some))
    return found
