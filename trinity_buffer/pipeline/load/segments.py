"""Reads segments from the database or an archive. No torch: the inspector reads with it too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trinity_buffer.codec.blob import Buffer
from trinity_buffer.codec.segments import decode_segment
from trinity_buffer.errors import ArchivedSegmentError, CodecError, DamagedSegmentError, StoreError
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.archive import read_archive
from trinity_buffer.store import segments
from trinity_buffer.store.transaction import ReadSession, SegmentParts


@dataclass(frozen=True, slots=True)
class Absence:
    """Why the tensors of a segment are not available.

    Attributes:
        why: the event that removed them from the database, and the remedy.
        deleted: whether they are gone for good; else their archive cannot be read here and now.
    """

    why: str
    deleted: bool


@dataclass(frozen=True, slots=True)
class StoredSegments:
    """Parts of segments, and the segments that are absent.

    Attributes:
        parts: unchecked parts, see `blobs_of`, without families that a segment lacks.
        absent: key -> why, of segments that left the database and cannot be fetched.
    """

    parts: SegmentParts
    absent: Mapping[bytes, Absence]

    def all_parts(self) -> SegmentParts:
        """Return the parts.

        Raises:
            ArchivedSegmentError: one of the segments is absent.
        """
        for key, absence in self.absent.items():
            raise ArchivedSegmentError(f"segment {key.hex()}: {absence.why}")
        return self.parts


def read_segments(s: ReadSession, keys: Iterable[bytes], families: Sequence[str]) -> StoredSegments:
    """Return the parts of segments, from the database or from their archive."""
    parts: SegmentParts = {}
    absent: dict[bytes, Absence] = {}
    wanted = list(dict.fromkeys(keys)) if families else []
    size = sizes().segments_per_load
    for start in range(0, len(wanted), size):
        asked = wanted[start : start + size]
        parts |= s.segments(asked, families)
    there = {key for key, _ in parts}
    if gone := [key for key in wanted if key not in there]:
        fetched = _fetched(s, gone, families)
        parts |= fetched.parts
        absent |= fetched.absent
    return StoredSegments(parts, absent)


def _fetched(s: ReadSession, keys: Sequence[bytes], families: Sequence[str]) -> StoredSegments:
    """Fetch segments that are not in the database from their archives."""
    left = s.read(segments.archived_at, keys)
    parts: SegmentParts = {}
    absent: dict[bytes, Absence] = {}
    by_event: dict[tuple[int, str | None], list[bytes]] = {}
    for key, event in left.items():
        by_event.setdefault(event, []).append(key)
    for (position, uri), lacking in by_event.items():
        if uri is None:
            why = (
                f"the tensors were deleted for good by the event at position {position} "
                "(SegmentsArchived): only a backup that is older has them"
            )
            absent |= dict.fromkeys(lacking, Absence(why, deleted=True))
            continue
        try:
            parts |= s.compute(read_archive, uri, lacking, families)
        except StoreError as error:
            why = (
                f"the tensors were archived to {uri} by the event at position {position} "
                f"(SegmentsArchived), and {error}"
            )
            absent |= dict.fromkeys(lacking, Absence(why, deleted=False))
    return StoredSegments(parts, absent)


def blobs_of(parts: SegmentParts) -> dict[bytes, dict[str, Buffer]]:
    """Return key -> family -> blob. Computes checksums: call it off the event loop.

    Raises:
        DamagedSegmentError: a checksum does not hold.
    """
    blobs: dict[bytes, dict[str, Buffer]] = {}
    for (key, family), pieces in parts.items():
        blobs.setdefault(key, {})[family] = segments.blob_of(key, family, pieces)
    return blobs


def unreadable_among(
    s: ReadSession, wanted: Mapping[bytes, Collection[str]], families: Sequence[str]
) -> dict[bytes, str]:
    """Return key -> ``deleted`` or ``damaged``, of segments that can never be read.

    If some were deleted, only those are returned, and damaged ones with the next call. An archive
    that cannot be read at the moment is neither.

    Args:
        wanted: key -> those of ``families`` that the segment must have, if known.
        families: the families to read.
    """
    stored = read_segments(s, wanted, families)
    deleted = {key: "deleted" for key, absence in stored.absent.items() if absence.deleted}
    if deleted:
        return deleted
    by_key: dict[bytes, SegmentParts] = {key: {} for key in wanted if key not in stored.absent}
    for (key, family), parts in stored.parts.items():
        by_key[key][key, family] = parts

    def damaged() -> list[bytes]:
        return [key for key, parts in by_key.items() if not _whole(key, parts, wanted[key])]

    return dict.fromkeys(s.compute(damaged), "damaged")


def _whole(key: bytes, parts: SegmentParts, families: Collection[str]) -> bool:
    try:
        blobs = blobs_of(parts).get(key, {})
        for blob in blobs.values():
            decode_segment(blob)
    except (CodecError, DamagedSegmentError):
        return False
    return bool(blobs) and blobs.keys() >= set(families)
