"""Decodes experiences off the event loop."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from msgspec import structs

from trinity_buffer.errors import CodecError, CodecVersionError, DamagedSegmentError
from trinity_buffer.events import ExperiencesRecorded, WithSegment
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.coordination.waiting import one_line
from trinity_buffer.pipeline.encoding import decode_experiences
from trinity_buffer.pipeline.load.reading import EventCache, StoredSegments, blobs_of, read_segments
from trinity_buffer.store.database import Database
from trinity_buffer.store.rows import ExperienceRow, position_of, slot_of
from trinity_buffer.store.transaction import ReadSession

_logger = logging.getLogger(__name__)


async def load_experiences(
    database: Database, cache: EventCache, rows: Sequence[ExperienceRow], families: Sequence[str]
) -> list[Experience]:
    """Return the experiences of ``rows``, in their order, with the columns of ``families``.

    Each carries its log address as ``address``. Changes to its tensors never reach the store. If
    its tensors are gone, ``archived`` says why; if it cannot be decoded, ``damaged`` does.

    Raises:
        CodecVersionError: bytes of a newer version.
    """

    def load(s: ReadSession, asked: Sequence[ExperienceRow]) -> list[Experience]:
        try:
            stored = read_segments(s, (row.segment for row in asked), families)
            events = cache.events(s, {position_of(row.address) for row in asked})
            return s.compute(_decoded, asked, events, stored, families)
        except CodecVersionError:
            raise
        except (CodecError, DamagedSegmentError) as error:
            if len(asked) == 1:
                return [_damaged_experience(asked[0], error)]
        middle = len(asked) // 2  # bisect: damaged rows are few
        return load(s, asked[:middle]) + load(s, asked[middle:])

    return await database.read_session(lambda s: load(s, rows))


def _damaged_experience(row: ExperienceRow, error: Exception) -> Experience:
    """Return an experience with what the projection knows of an undecodable row."""
    _logger.warning(
        "experience %s cannot be read: %s", one_line(f"{row.eid}"), one_line(f"{error}")
    )
    return Experience.from_state(
        {
            "eid": row.eid,
            "prompt_length": row.prompt_length,
            "reward": row.reward,
            "experience_type": "single_turn",
            "address": row.address,
            "archived": None,
            "damaged": str(error),
            "_length": row.length,
            "_response_length": row.length - row.prompt_length,
            "_policy_version": row.policy_version,
            "_finish_reason": row.finish_reason,
        }
    )


def _decoded(
    rows: Sequence[ExperienceRow],
    events: Mapping[int, WithSegment],
    stored: StoredSegments,
    families: Sequence[str],
) -> list[Experience]:
    """Decode ``rows`` from their events and segments."""
    blobs = blobs_of(stored.parts)
    by_event: OrderedDict[int, list[ExperienceRow]] = OrderedDict()
    for row in rows:
        by_event.setdefault(position_of(row.address), []).append(row)
    made: dict[int, Experience] = {}
    for position, rows_of_event in by_event.items():
        buffers = blobs.get(rows_of_event[0].segment, {})
        slots = [slot_of(row.address) for row in rows_of_event]
        event = events[position]
        assert isinstance(event, ExperiencesRecorded)  # rows are recorded by no other kind
        absence = stored.absent.get(rows_of_event[0].segment)
        if absence is None and any(f in event.families and f not in buffers for f in families):
            raise DamagedSegmentError(
                f"segment {rows_of_event[0].segment.hex()} is missing: run `verify`"
            )
        held = [f for f in families if absence is None or f not in event.families]
        decoded_rows = decode_experiences(
            buffers, structs.asdict(event.columns), slots, loaded=held
        )
        for row, experience in zip(rows_of_event, decoded_rows, strict=True):
            experience.address = row.address
            experience.archived = None if absence is None else absence.why
            made[row.address] = experience
    return [made[row.address] for row in rows]
