"""Are the segments there that events name, whole, and of the content that was recorded?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread

from trinity_buffer.codec import Segment, decode_segment, digests_of_segments
from trinity_buffer.errors import CodecError, DamagedSegmentError
from trinity_buffer.pipeline.verifying.findings import Problem
from trinity_buffer.pipeline.verifying.log_audit import uids_of
from trinity_buffer.sizes import sizes
from trinity_buffer.store import segments
from trinity_buffer.store.address import address_of, written_as
from trinity_buffer.store.database import Database
from trinity_buffer.store.scratch import DecodedEvent

Parts = dict[tuple[bytes, str], list[tuple[int, int, bytes]]]


@dataclass(frozen=True, slots=True)
class _Named:
    """An event that names a segment."""

    position: int
    body: Mapping[str, Any]

    @property
    def key(self) -> bytes:
        return bytes(self.body["segment"])

    @property
    def size(self) -> int:
        return sum(self.body["families"].values())

    @property
    def rows(self) -> int:
        meta = self.body.get("meta")
        return len(self.body["experiences"] if meta is None else meta["batch"])


async def check_segments(
    database: Database, events: Sequence[DecodedEvent]
) -> tuple[int, list[tuple[bytes, Problem]]]:
    """Return how many segments ``events`` name, and what is wrong with which of them."""
    named = [
        _Named(event.position, event.body)
        for event in events
        if event.kind in ("ExperiencesRecorded", "ExperiencesAnnotated") and event.body["segment"]
    ]
    problems: list[tuple[bytes, Problem]] = []
    for some in _by_size(named):
        families = sorted({family for one in some for family in one.body["families"]})
        parts = await database.read(segments.read, [one.key for one in some], families)
        problems += await anyio.to_thread.run_sync(partial(_check, some, parts))
    return len(named), problems


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


def _check(named: Sequence[_Named], parts: Parts) -> list[tuple[bytes, Problem]]:
    return [(one.key, problem) for one in named for problem in _check_one(one, parts)]


def _check_one(one: _Named, parts: Parts) -> Iterator[Problem]:
    where = f"segment {one.key.hex()} of position {one.position}"
    decoded: list[Segment] = []
    for family, size in one.body["families"].items():
        try:
            blob = segments.joined(one.key, family, parts.get((one.key, family), []))
            if len(blob) != size:
                what = f"family {family!r} has {len(blob)} bytes, its event says {size}"
                yield Problem("segments", where, what)
                continue
            segment = decode_segment(blob)
        except (DamagedSegmentError, CodecError) as error:
            yield Problem("segments", where, str(error).partition(";")[0])
            continue
        if segment.rows != one.rows:
            what = f"family {family!r} has {segment.rows} rows, its event {one.rows}"
            yield Problem("segments", where, what)
            continue
        decoded.append(segment)
    if len(decoded) == len(one.body["families"]) and "meta" in one.body:
        yield from _check_digests(one, decoded)


def _check_digests(one: _Named, decoded: Sequence[Segment]) -> Iterator[Problem]:
    meta = one.body["meta"]
    try:
        found = digests_of_segments(meta, decoded)
    except CodecError as error:
        yield Problem("digests", f"position {one.position}", str(error))
        return
    if found == list(meta["digest"]):
        return
    uids = list(uids_of(meta))
    for slot, (digest, recorded) in enumerate(zip(found, meta["digest"], strict=True)):
        if digest != recorded:
            where = f"experience {written_as(address_of(one.position, slot))} ({uids[slot]})"
            what = f"its content has the digest {digest.hex()}, recorded is {recorded.hex()}"
            yield Problem("digests", where, what)
