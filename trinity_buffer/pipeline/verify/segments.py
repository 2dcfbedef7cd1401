"""Checks of what lies outside the log: segments, archives, and the database around them.

Segments must be there, whole, and of the content that was recorded; columns of an event must be
what its tensors hold; archives must be as they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
import numpy as np
import numpy.typing as npt
from msgspec import structs

from trinity_buffer.codec.blob import Buffer
from trinity_buffer.codec.objects import unpack_object
from trinity_buffer.codec.segments import (
    Column,
    Segment,
    content_digest,
    decode_segment,
    digests_of_segments,
    is_scorable,
)
from trinity_buffer.errors import CodecError, DamagedSegmentError, StoreError
from trinity_buffer.events import (
    ExperienceColumns,
    ExperiencesRecorded,
    PlacedFact,
    WithSegment,
    kinds_of,
)
from trinity_buffer.identity import FAMILIES
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.archive import digest_of, read_archive
from trinity_buffer.pipeline.load.segments import blobs_of
from trinity_buffer.pipeline.verify.projections import readable_events
from trinity_buffer.pipeline.verify.report import Problem
from trinity_buffer.sampling import SEGMENTS, sampled
from trinity_buffer.store import log, schema, segments
from trinity_buffer.store.database import Database
from trinity_buffer.store.rows import address_of, written_as
from trinity_buffer.store.transaction import SegmentParts

F = TypeVar("F", bound=WithSegment)
Integers = npt.NDArray[np.int64]
_UNKNOWN = -1


def wrong_columns(
    columns: ExperienceColumns, sampling: Mapping[int, Any], segments: Sequence[Segment]
) -> Iterator[tuple[int, str]]:
    """Yield (slot, what is wrong) where a column is not what the decoded segments hold.

    Args:
        columns, sampling: of the event.
        segments: of it.

    Raises:
        CodecError: an object is damaged.
    """
    pairs = np.array([kind == "dpo" for kind in columns.kind])
    tokens, mask = _sizes(segments, "tokens", columns), _sizes(segments, "action_mask", columns)
    chosen, rejected = _sizes(segments, "chosen", columns), _sizes(segments, "rejected", columns)
    expected = {
        "length": tokens,
        "response_length": np.where(pairs, np.maximum(chosen, rejected), mask),
        "trained_tokens": np.where(
            pairs,
            np.where((chosen >= 0) & (rejected >= 0), chosen + rejected, _UNKNOWN),
            _sizes(segments, "action_mask", columns, _trained),
        ),
    }
    for name, wanted in expected.items():
        recorded = np.array(getattr(columns, name), np.int64)
        for slot in np.flatnonzero((wanted != _UNKNOWN) & (recorded != wanted)).tolist():
            yield slot, f"its {name} is {wanted[slot]}, its event says {recorded[slot]}"
    yield from _wrong_of_info(columns, segments)
    yield from _wrong_sampling(columns, sampling, segments)


def _sizes(
    segments: Sequence[Segment],
    field: str,
    columns: ExperienceColumns,
    of: Callable[[Column], Integers] = attrgetter("sizes"),
) -> Integers:
    """Return how many elements a field has in each row, or what ``of`` says; -1: it has none."""
    numbers = np.full(len(columns), _UNKNOWN, np.int64)
    for segment in segments:
        for column in segment.columns.get(field, ()):
            numbers[slice(None) if column.rows is None else column.rows] = of(column)
    return numbers


def _trained(mask: Column) -> Integers:
    """Return how many tokens each row of a mask trains."""
    nonzero = np.concatenate([[0], np.cumsum(mask.elements != 0)])
    trained: Integers = nonzero[mask.offsets[1:]] - nonzero[mask.offsets[:-1]]
    return trained


def _wrong_of_info(
    columns: ExperienceColumns, segments: Sequence[Segment]
) -> Iterator[tuple[int, str]]:
    """Compare the policy version and the finish reason with what ``info`` says of them."""
    infos, cuts = (_pieces(segments, name, columns) for name in ("info", "truncate_status"))
    known: dict[tuple[bytes, bytes], tuple[int | None, str | None]] = {}
    pairs = zip(columns.policy_version, columns.finish_reason, strict=True)
    for slot, (pieces, recorded) in enumerate(
        zip(zip(infos, cuts, strict=True), pairs, strict=True)
    ):
        if pieces not in known:  # rows of one write mostly say the same
            known[pieces] = _of_info(*pieces)
        if known[pieces] != recorded:
            what = "its policy version and finish reason are"
            yield slot, f"{what} {known[pieces]}, its event says {recorded}"


def _wrong_sampling(
    columns: ExperienceColumns, sampling: Mapping[int, Any], segments: Sequence[Segment]
) -> Iterator[tuple[int, str]]:
    """Compare how rows were sampled with what ``info`` says of it."""
    key = SEGMENTS.encode()
    infos = _pieces(segments, "info", columns)
    for slot in sorted({*sampling, *(slot for slot, info in enumerate(infos) if key in info)}):
        unpacked = unpack_object(infos[slot]) if infos[slot] else None
        sizes = columns.prompt_length[slot], columns.length[slot]
        wanted = [*map(list, sampled(unpacked if isinstance(unpacked, dict) else {}, *sizes) or ())]
        if [*map(list, sampling.get(slot, ()))] != wanted:
            yield slot, f"it was sampled with {wanted}, its event says {sampling.get(slot)}"


def _pieces(segments: Sequence[Segment], name: str, columns: ExperienceColumns) -> list[bytes]:
    for segment in segments:
        if name in segment.objects:
            return segment.objects[name].pieces
    return [b""] * len(columns)


def _of_info(info: bytes, truncated: bytes) -> tuple[int | None, str | None]:
    unpacked = unpack_object(info) if info else None
    unpacked = unpacked if isinstance(unpacked, dict) else {}
    version = unpacked.get("model_version")
    reason = unpacked.get("finish_reason") or (unpack_object(truncated) if truncated else None)
    return None if version is None else int(version), None if reason is None else str(reason)


async def check_segments(
    database: Database, events: Sequence[PlacedFact]
) -> tuple[int, list[tuple[bytes, Problem]]]:
    """Return how many segments ``events`` name, and what is wrong with which of them."""
    named = [
        (event.position, event.fact)
        for event in events
        if isinstance(event.fact, WithSegment) and event.fact.segment
    ]
    problems: list[tuple[bytes, Problem]] = []
    for group in by_size(named, sizes().bytes_per_audit, sizes().segments_per_audit):
        keys = [fact.segment for _, fact in group]
        families = sorted({family for _, fact in group for family in fact.families})
        read = partial(database.segments.get, keys=keys, families=families)
        parts = await database.read_session(read)
        problems += await anyio.to_thread.run_sync(_check_group, group, parts)
    return len(named), problems


def by_size(
    named: Iterable[tuple[int, F]], most_bytes: int, most: int | None = None
) -> Iterator[list[tuple[int, F]]]:
    """Yield (position, event that names a segment) in groups of so many bytes, and so many events.

    A segment that is larger goes alone.
    """
    group: list[tuple[int, F]] = []
    total = 0
    for position, fact in named:
        size = sum(fact.families.values())
        if group and (total + size > most_bytes or len(group) == most):
            yield group
            group, total = [], 0
        group.append((position, fact))
        total += size
    if group:
        yield group


def _check_group(
    named: Sequence[tuple[int, WithSegment]], parts: SegmentParts
) -> list[tuple[bytes, Problem]]:
    return [
        (fact.segment, problem)
        for position, fact in named
        for problem in _check_segment(position, fact, parts)
    ]


def _check_segment(position: int, fact: WithSegment, parts: SegmentParts) -> Iterator[Problem]:
    key, where = fact.segment, f"segment {fact.segment.hex()} of position {position}"
    decoded: list[Segment] = []
    blobs: list[Buffer] = []
    for family, size in fact.families.items():
        try:
            blob = segments.blob_of(key, family, parts.get((key, family), []))
            if len(blob) != size:
                what = f"family {family!r} has {len(blob)} bytes, its event says {size}"
                yield Problem("segments", where, what)
                continue
            segment = decode_segment(blob)
            blobs.append(blob)
        except (DamagedSegmentError, CodecError) as error:
            yield Problem("segments", where, str(error).partition(";")[0])
            continue
        if segment.rows != fact.rows:
            what = f"family {family!r} has {segment.rows} rows, its event {fact.rows}"
            yield Problem("segments", where, what)
            continue
        decoded.append(segment)
    if len(blobs) == len(fact.families) and not isinstance(fact, ExperiencesRecorded):
        yield from _check_digest(where, fact.digest, blobs)
    elif len(decoded) == len(fact.families) and isinstance(fact, ExperiencesRecorded):
        yield from _check_digests(position, fact, decoded)


def _check_digest(where: str, recorded: bytes | None, blobs: Sequence[Buffer]) -> Iterator[Problem]:
    if recorded is not None and (digest := content_digest(blobs)) != recorded:
        what = f"it has the digest {digest.hex()}, its event says {recorded.hex()}"
        yield Problem("digests", where, what)


def _check_digests(
    position: int, fact: ExperiencesRecorded, decoded: Sequence[Segment]
) -> Iterator[Problem]:
    columns = fact.columns
    uids = list(columns.uids())
    try:
        digests = digests_of_segments(structs.asdict(columns), decoded)
        if fact.scorable and not is_scorable({k: v for s in decoded for k, v in s.columns.items()}):
            what = "its event says that one number per row can stand for an annotation: it cannot"
            yield Problem("segments", f"segment {fact.segment.hex()} of position {position}", what)
        for slot, what in wrong_columns(columns, fact.sampling or {}, decoded):
            where = f"experience {written_as(address_of(position, slot))} ({uids[slot]})"
            yield Problem("segments", where, what)
    except (CodecError, TypeError, ValueError) as error:
        yield Problem("digests", f"position {position}", str(error))
        return
    if digests == list(columns.digest):
        return
    for slot, (digest, recorded) in enumerate(zip(digests, columns.digest, strict=True)):
        if digest != recorded:
            where = f"experience {written_as(address_of(position, slot))} ({uids[slot]})"
            what = f"its content has the digest {digest.hex()}, recorded is {recorded.hex()}"
            yield Problem("digests", where, what)


def check_archives(
    files: Mapping[str, tuple[int, str | None]],
    archived: Mapping[bytes, str | None],
    *,
    quick: bool,
) -> Iterator[Problem]:
    """Yield what is wrong with the files of segments that are not in the database.

    Args:
        files: path -> position of the event that names it, and the sha256 that it says.
        archived: key -> path.
        quick: open none, only look whether it is there.
    """
    held: dict[str, list[bytes]] = {}
    for key, path in archived.items():
        if path is not None:
            held.setdefault(path, []).append(key)
    for path, keys in held.items():
        position, digest = files[path]
        what = f"position {position} archived {len(keys)} segments to it"
        if not Path(path).is_file():
            yield Problem("archives", path, f"there is no such file, and {what}")
        elif not quick:
            yield from _check_archive(path, keys, digest, what)


def _check_archive(
    path: str, keys: list[bytes], digest: str | None, what: str
) -> Iterator[Problem]:
    try:
        if digest is not None:
            sha256 = digest_of(Path(path))
            if sha256 != digest:
                what = f"its sha256 is {sha256}, {what} with {digest}"
                yield Problem("archives", path, what)
            return
        blobs_of(read_archive(path, keys, tuple(FAMILIES)))  # of a version that noted no digest
    except (OSError, StoreError, DamagedSegmentError) as error:
        yield Problem("archives", path, f"{what}, and {error}")


_KINDS = kinds_of(WithSegment)


async def check_surroundings(
    database: Database, named: Collection[bytes], *, quick: bool
) -> list[Problem]:
    """Return problems beside the log; a quick run looks at triggers and indexes alone.

    Args:
        database: the store.
        named: keys of the segments that events of one experiment name.
        quick: open no segment.
    """
    wrong = await database.read(schema.unsound)
    if not quick:
        wrong += await database.read(schema.damaged_pages)
    problems = [Problem("database", database.name, what) for what in wrong]
    if quick:
        return problems
    return problems + await _orphans(database, named)


async def _orphans(database: Database, named: Collection[bytes]) -> list[Problem]:
    """Return the segments that no event of any experiment names."""
    orphans = (await database.read(database.segments.keys)).difference(named)
    if not orphans:
        return []
    for key in (await database.read(log.experiment_names)).values():
        after = 0
        while page := await database.read(
            log.read_after, key, after, limit=sizes().events_per_page, kinds=_KINDS
        ):
            after = page[-1].position
            facts = [event.fact for event in readable_events(page)]
            orphans -= {fact.segment for fact in facts if isinstance(fact, WithSegment)}
    return [Problem("segments", f"segment {key.hex()}", "no event names it") for key in orphans]
