"""From rows to experiences in memory: segments are read, checked and decoded off the loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeAlias

from trinity_buffer.codec import decode_segment
from trinity_buffer.errors import ArchivedSegmentError, CodecError, DamagedSegmentError
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.background import in_thread
from trinity_buffer.pipeline.encoding import decode_experiences
from trinity_buffer.pipeline.events import decoded
from trinity_buffer.sizes import sizes
from trinity_buffer.store import log, segments
from trinity_buffer.store.address import position_of, slot_of
from trinity_buffer.store.database import Database
from trinity_buffer.store.rows import ExperienceRow

SegmentParts: TypeAlias = dict[tuple[bytes, str], list[tuple[int, int, bytes]]]
"""(key, family) -> its parts as (part, checksum, data), as they lie in the database."""


async def read_segments(
    database: Database, keys: Iterable[bytes], families: Sequence[str]
) -> SegmentParts:
    """Return the parts of some segments, unchecked; a family that a segment lacks is absent.

    Raises:
        ArchivedSegmentError: a segment has left the database.
    """
    wanted = list(dict.fromkeys(keys))
    found: SegmentParts = {}
    size = sizes().segments_per_load
    for start in range(0, len(wanted), size):
        some = wanted[start : start + size]
        found |= await database.read(partial(segments.read, keys=some, families=families))
    there = {key for key, _ in found}
    await _refuse_archived(database, [key for key in wanted if key not in there])
    return found


def joined(parts: SegmentParts) -> dict[bytes, dict[str, bytes]]:
    """Return key -> family -> blob. Computes checksums: call it off the event loop.

    Raises:
        DamagedSegmentError: a checksum does not hold.
    """
    found: dict[bytes, dict[str, bytes]] = {}
    for (key, family), some in parts.items():
        found.setdefault(key, {})[family] = segments.joined(key, family, some)
    return found


async def load_segments(
    database: Database, keys: Iterable[bytes], families: Sequence[str]
) -> dict[bytes, dict[str, bytes]]:
    """Return key -> family -> blob, checked; a family that a segment does not have is absent.

    Raises:
        DamagedSegmentError: a checksum does not hold.
        ArchivedSegmentError: a segment has left the database.
    """
    wanted = list(dict.fromkeys(keys))
    found = await in_thread(joined, await read_segments(database, wanted, families))
    return {key: found.get(key, {}) for key in wanted}


async def damaged_among(
    database: Database, keys: Iterable[bytes], families: Sequence[str]
) -> set[bytes]:
    """Return those of ``keys`` whose blobs cannot be read, or are not there."""
    damaged = set()
    for key in dict.fromkeys(keys):
        try:
            blobs = (await load_segments(database, [key], families))[key]
            for blob in blobs.values():
                await in_thread(decode_segment, blob)
        except (CodecError, DamagedSegmentError):
            damaged.add(key)
        else:
            if not blobs:
                damaged.add(key)
    return damaged


async def _refuse_archived(database: Database, empty: Sequence[bytes]) -> None:
    """Say where the tensors of a segment are that is not in the database."""
    if not empty:
        return
    gone = await database.read(partial(segments.archived_at, keys=empty))
    for key, (position, uri) in gone.items():
        where = f"archived to {uri}" if uri else "deleted for good"
        raise ArchivedSegmentError(
            f"the tensors of segment {key.hex()} were {where} by the event at position {position}"
        )


async def load_experiences(
    database: Database, experiment: int, rows: Sequence[ExperienceRow], families: Sequence[str]
) -> list[Experience]:
    """Return the experiences of ``rows``, in their order, with the columns of ``families``.

    Each carries its log address as ``address``. What a caller changes in its tensors never reaches
    the store.
    """
    parts = await read_segments(database, (row.segment for row in rows), families)
    positions = sorted({position_of(row.address) for row in rows})
    stored = await database.read(
        partial(log.read_at, experiment_id=experiment, positions=positions)
    )

    def decode() -> list[Experience]:
        bodies = {event.position: decoded("", event).body for event in stored}
        blobs = joined(parts)
        by_event: OrderedDict[int, list[ExperienceRow]] = OrderedDict()
        for row in rows:
            by_event.setdefault(position_of(row.address), []).append(row)
        found: dict[int, Experience] = {}
        for position, some in by_event.items():
            buffers = {
                family: bytearray(blob) for family, blob in blobs.get(some[0].segment, {}).items()
            }
            slots = [slot_of(row.address) for row in some]
            meta = bodies[position]["meta"]
            decoded_rows = decode_experiences(buffers, meta, slots, loaded=families)
            for row, experience in zip(some, decoded_rows, strict=True):
                experience.address = row.address
                found[row.address] = experience
        return [found[row.address] for row in rows]

    return await in_thread(decode)
