"""Are the segments there that events name, whole, and of the content that was recorded?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import anyio.to_thread

from trinity_buffer.blob import Buffer
from trinity_buffer.codec import (
    Segment,
    content_digest,
    decode_segment,
    digests_of_segments,
    is_scorable,
)
from trinity_buffer.errors import CodecError, DamagedSegmentError
from trinity_buffer.events import ExperiencesRecorded, PlacedFact, WithSegment
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.verifying.column_audit import wrong_columns
from trinity_buffer.pipeline.verifying.findings import Problem
from trinity_buffer.store import segments
from trinity_buffer.store.database import Database
from trinity_buffer.store.rows import address_of, written_as
from trinity_buffer.store.transaction import SegmentParts


@dataclass(frozen=True, slots=True)
class _Named:
    """An event that names a segment."""

    position: int
    fact: WithSegment

    @property
    def key(self) -> bytes:
        return self.fact.segment

    @property
    def size(self) -> int:
        return sum(self.fact.families.values())


async def check_segments(
    database: Database, events: Sequence[PlacedFact]
) -> tuple[int, list[tuple[bytes, Problem]]]:
    """Return how many segments ``events`` name, and what is wrong with which of them."""
    named = [
        _Named(event.position, event.fact)
        for event in events
        if isinstance(event.fact, WithSegment) and event.fact.segment
    ]
    problems: list[tuple[bytes, Problem]] = []
    for some in _by_size(named):
        parts = await _parts_of(database, some)
        problems += await anyio.to_thread.run_sync(partial(_check, some, parts))
    return len(named), problems


async def _parts_of(database: Database, named: Sequence[_Named]) -> SegmentParts:
    keys = [one.key for one in named]
    families = sorted({family for one in named for family in one.fact.families})
    return await database.read_session(lambda s: s.segments(keys, families))


def _by_size(named: Sequence[_Named]) -> Iterator[list[_Named]]:
    some: list[_Named] = []
    total = 0
    for one in named:
        too_large = total + one.size > sizes().bytes_per_audit
        if some and (too_large or len(some) == sizes().segments_per_audit):
            yield some
            some, total = [], 0
        some.append(one)
        total += one.size
    if some:
        yield some


def _check(named: Sequence[_Named], parts: SegmentParts) -> list[tuple[bytes, Problem]]:
    return [(one.key, problem) for one in named for problem in _check_one(one, parts)]


def _check_one(one: _Named, parts: SegmentParts) -> Iterator[Problem]:
    where = f"segment {one.key.hex()} of position {one.position}"
    decoded: list[Segment] = []
    blobs: list[Buffer] = []
    for family, size in one.fact.families.items():
        try:
            blob = segments.blob_of(one.key, family, parts.get((one.key, family), []))
            if len(blob) != size:
                what = f"family {family!r} has {len(blob)} bytes, its event says {size}"
                yield Problem("segments", where, what)
                continue
            segment = decode_segment(blob)
            blobs.append(blob)
        except (DamagedSegmentError, CodecError) as error:
            yield Problem("segments", where, str(error).partition(";")[0])
            continue
        if segment.rows != one.fact.rows:
            what = f"family {family!r} has {segment.rows} rows, its event {one.fact.rows}"
            yield Problem("segments", where, what)
            continue
        decoded.append(segment)
    if len(blobs) == len(one.fact.families) and not isinstance(one.fact, ExperiencesRecorded):
        yield from _check_digest(one, one.fact.digest, blobs)
    elif len(decoded) == len(one.fact.families) and isinstance(one.fact, ExperiencesRecorded):
        yield from _check_digests(one.position, one.fact, decoded)


def _check_digest(
    one: _Named, recorded: bytes | None, blobs: Sequence[Buffer]
) -> Iterator[Problem]:
    if recorded is not None and (found := content_digest(blobs)) != recorded:
        what = f"it has the digest {found.hex()}, its event says {recorded.hex()}"
        yield Problem("digests", f"segment {one.key.hex()} of position {one.position}", what)


def _check_digests(
    position: int, fact: ExperiencesRecorded, decoded: Sequence[Segment]
) -> Iterator[Problem]:
    columns = fact.columns
    uids = list(columns.uids())
    try:
        found = digests_of_segments(vars(columns), decoded)
        if fact.scorable and not is_scorable({k: v for s in decoded for k, v in s.columns.items()}):
            what = "its event says that one number per row can stand for an annotation: it cannot"
            yield Problem("segments", f"segment {fact.segment.hex()} of position {position}", what)
        for slot, what in wrong_columns(columns, fact.sampling or {}, decoded):
            where = f"experience {written_as(address_of(position, slot))} ({uids[slot]})"
            yield Problem("segments", where, what)
    except (CodecError, TypeError, ValueError) as error:
        yield Problem("digests", f"position {position}", str(error))
        return
    if found == list(columns.digest):
        return
    for slot, (digest, recorded) in enumerate(zip(found, columns.digest, strict=True)):
        if digest != recorded:
            where = f"experience {written_as(address_of(position, slot))} ({uids[slot]})"
            what = f"its content has the digest {digest.hex()}, recorded is {recorded.hex()}"
            yield Problem("digests", where, what)
