"""From rows to experiences in memory: segments are read, checked and decoded off the loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from trinity_buffer.codec import decode_segment
from trinity_buffer.errors import CodecError, DamagedSegmentError
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.archive_file import SegmentParts
from trinity_buffer.pipeline.encoding import decode_experiences
from trinity_buffer.pipeline.events import decoded
from trinity_buffer.pipeline.stored_segments import StoredSegments, joined, read_segments
from trinity_buffer.store import log
from trinity_buffer.store.address import position_of, slot_of
from trinity_buffer.store.database import Database
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.rows import ExperienceRow
from trinity_buffer.store.transaction import ReadSession


def unreadable_among(
    s: ReadSession, keys: Iterable[bytes], families: Sequence[str]
) -> dict[bytes, str]:
    """Return of those of ``keys`` that can never be read why: ``deleted``, else ``damaged``.

    What was deleted comes alone, the damaged with the next call. An archive that cannot be read now
    is neither.
    """
    wanted = list(dict.fromkeys(keys))
    found = read_segments(s, wanted, families)
    deleted = {key: "deleted" for key, absence in found.absent.items() if absence.deleted}
    readable = [] if deleted else [key for key in wanted if key not in found.absent]
    return deleted or dict.fromkeys(s.compute(_damaged, found.parts, readable), "damaged")


def _damaged(parts: SegmentParts, keys: Sequence[bytes]) -> list[bytes]:
    """Return those of ``keys`` that are not there, or not whole."""
    by_key: dict[bytes, SegmentParts] = {key: {} for key in keys}
    for (key, family), some in parts.items():
        by_key[key][key, family] = some
    return [key for key in keys if not _whole(key, by_key[key])]


def _whole(key: bytes, parts: SegmentParts) -> bool:
    try:
        blobs = joined(parts).get(key, {})
        for blob in blobs.values():
            decode_segment(blob)
    except (CodecError, DamagedSegmentError):
        return False
    return bool(blobs)


async def load_experiences(
    database: Database, experiment: int, rows: Sequence[ExperienceRow], families: Sequence[str]
) -> list[Experience]:
    """Return the experiences of ``rows``, in their order, with the columns of ``families``.

    Each carries its log address as ``address``. What a caller changes in its tensors never reaches
    the store. Of rows whose tensors cannot be had any more, ``archived`` says why.
    """

    def load(s: ReadSession) -> list[Experience]:
        found = read_segments(s, (row.segment for row in rows), families)
        positions = sorted({position_of(row.address) for row in rows})
        stored = s.read(log.read_at, experiment, positions)
        return s.compute(_decoded, rows, stored, found, families)

    return await database.read_session(load)


def _decoded(
    rows: Sequence[ExperienceRow],
    stored: Sequence[StoredEvent],
    found: StoredSegments,
    families: Sequence[str],
) -> list[Experience]:
    """Return the experiences of ``rows``, whose events and segments are given."""
    bodies = {event.position: decoded("", event).body for event in stored}
    blobs = joined(found.parts)
    by_event: OrderedDict[int, list[ExperienceRow]] = OrderedDict()
    for row in rows:
        by_event.setdefault(position_of(row.address), []).append(row)
    made: dict[int, Experience] = {}
    for position, some in by_event.items():
        buffers = {
            family: bytearray(blob) for family, blob in blobs.get(some[0].segment, {}).items()
        }
        slots = [slot_of(row.address) for row in some]
        body = bodies[position]
        absence = found.absent.get(some[0].segment)
        held = [f for f in families if absence is None or f not in body["families"]]
        decoded_rows = decode_experiences(buffers, body["meta"], slots, loaded=held)
        for row, experience in zip(some, decoded_rows, strict=True):
            experience.address = row.address
            experience.archived = None if absence is None else absence.why
            made[row.address] = experience
    return [made[row.address] for row in rows]
