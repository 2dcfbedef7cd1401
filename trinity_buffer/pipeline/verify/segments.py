"""Checks of what lies outside the log: segments, archives, and the database around them.

Segments must be there, whole, and of the content that was recorded; columns of an event must be
what its tensors hold; archives must be as they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import numpy.typing as npt

from trinity_buffer import events
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
from trinity_buffer.events import WithSegment
from trinity_buffer.identity import FAMILIES
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.archive import digest_of, read_archive
from trinity_buffer.pipeline.handle import by_size
from trinity_buffer.pipeline.load.reading import blobs_of
from trinity_buffer.pipeline.verify.log_audit import Problem
from trinity_buffer.pipeline.verify.projections import facts_of
from trinity_buffer.sampling import SEGMENTS, sampled
from trinity_buffer.store import log, schema, segments
from trinity_buffer.store.connection import Database
from trinity_buffer.store.rows import address_of, format_address
from trinity_buffer.store.transaction import SegmentParts

Integers = npt.NDArray[np.int64]
_UNKNOWN = -1


def wrong_columns(
    columns: events.ExperienceColumns, sampling: Mapping[int, Any], segments: Sequence[Segment]
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
    yield from _wrong_of_info(columns, sampling, segments)


def _sizes(
    segments: Sequence[Segment],
    field: str,
    columns: events.ExperienceColumns,
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
    columns: events.ExperienceColumns, sampling: Mapping[int, Any], segments: Sequence[Segment]
) -> Iterator[tuple[int, str]]:
    """Compare policy version, finish reason and sampling with what ``info`` says of them."""
    infos, cuts = (
        next((s.objects[name].pieces for s in segments if name in s.objects), [b""] * len(columns))
        for name in ("info", "truncate_status")
    )
    known: dict[tuple[bytes, bytes], tuple[dict[str, Any], tuple[int | None, str | None]]] = {}
    for slot, pieces in enumerate(zip(infos, cuts, strict=True)):
        if pieces not in known:  # rows of one write mostly say the same
            info, cut = (unpack_object(piece) if piece else None for piece in pieces)
            info = info if isinstance(info, dict) else {}
            version, reason = info.get("model_version"), info.get("finish_reason") or cut
            version = None if version is None else int(version)
            known[pieces] = info, (version, None if reason is None else str(reason))
        info, wanted = known[pieces]
        if wanted != (recorded := (columns.policy_version[slot], columns.finish_reason[slot])):
            what = "its policy version and finish reason are"
            yield slot, f"{what} {wanted}, its event says {recorded}"
        if slot in sampling or SEGMENTS in info:
            lengths = columns.prompt_length[slot], columns.length[slot]
            ways = [*map(list, sampled(info, *lengths) or ())]
            if [*map(list, sampling.get(slot, ()))] != ways:
                yield slot, f"it was sampled with {ways}, its event says {sampling.get(slot)}"


async def check_segments(
    database: Database, facts: Sequence[events.PlacedFact]
) -> tuple[int, list[tuple[bytes, Problem]]]:
    """Return how many segments ``facts`` name, and what is wrong with which of them."""
    named = [
        (placed.position, placed.fact)
        for placed in facts
        if isinstance(placed.fact, WithSegment) and placed.fact.segment
    ]
    problems: list[tuple[bytes, Problem]] = []
    most, most_segments = sizes.bytes_per_audit, sizes.segments_per_audit
    for group in by_size(named, bytes_of, most, lambda group, _: len(group) == most_segments):
        keys = [fact.segment for _, fact in group]
        families = sorted({family for _, fact in group for family in fact.families})
        read = partial(database.segments.get, keys=keys, families=families)
        parts = await database.read_session(read)
        checked = (
            (fact.segment, problem)
            for position, fact in group
            for problem in _check_segment(position, fact, parts)
        )
        problems += await anyio.to_thread.run_sync(list, checked)
    return len(named), problems


def bytes_of(named: tuple[int, WithSegment]) -> int:
    """Return how many bytes the segment of an event has; it comes with its position."""
    return sum(named[1].families.values())


def sound_family(fact: WithSegment, family: str, parts: SegmentParts) -> tuple[Buffer, Segment]:
    """Return a family of the segment that an event names: its bytes, and what they hold.

    Raises:
        DamagedSegmentError, CodecError: they are damaged, or not what the event says of them.
    """
    key, size = fact.segment, fact.families[family]
    blob = segments.blob_of(key, family, parts.get((key, family), []))
    if len(blob) != size:
        raise CodecError(f"family {family!r} has {len(blob)} bytes, its event says {size}")
    segment = decode_segment(blob)
    if segment.rows != fact.rows:
        raise CodecError(f"family {family!r} has {segment.rows} rows, its event {fact.rows}")
    return blob, segment


def _check_segment(position: int, fact: WithSegment, parts: SegmentParts) -> Iterator[Problem]:
    where = f"segment {fact.segment.hex()} of position {position}"
    sound = list[tuple[Buffer, Segment]]()
    for family in fact.families:
        try:
            sound.append(sound_family(fact, family, parts))
        except (DamagedSegmentError, CodecError) as error:
            yield Problem("segments", where, str(error).partition(";")[0])
    if len(sound) < len(fact.families):
        return
    blobs = [blob for blob, _ in sound]
    if isinstance(fact, events.ExperiencesRecorded):
        yield from _check_rows(position, fact, [segment for _, segment in sound])
    elif fact.digest is not None and (digest := content_digest(blobs)) != fact.digest:
        what = f"it has the digest {digest.hex()}, its event says {fact.digest.hex()}"
        yield Problem("digests", where, what)


def _check_rows(
    position: int, fact: events.ExperiencesRecorded, decoded: Sequence[Segment]
) -> Iterator[Problem]:
    columns, recorded = fact.columns, list(fact.columns.digest)
    uids, wrong = list(columns.uids()), list[tuple[str, int, str]]()
    try:
        digests = digests_of_segments(columns, decoded)
        if fact.scorable and not is_scorable({k: v for s in decoded for k, v in s.columns.items()}):
            what = "its event says that one number per row can stand for an annotation: it cannot"
            yield Problem("segments", f"segment {fact.segment.hex()} of position {position}", what)
        in_columns = wrong_columns(columns, fact.sampling or {}, decoded)
        wrong += (("segments", slot, what) for slot, what in in_columns)
    except (CodecError, TypeError, ValueError) as error:
        yield Problem("digests", f"position {position}", str(error))
        digests = recorded
    for slot, digest in enumerate(digests if digests != recorded else ()):
        if digest != recorded[slot]:
            what = f"its content has the digest {digest.hex()}, recorded is {recorded[slot].hex()}"
            wrong.append(("digests", slot, what))
    for check, slot, what in wrong:
        where = f"experience {format_address(address_of(position, slot))} ({uids[slot]})"
        yield Problem(check, where, what)


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
        try:
            if not Path(path).is_file():
                yield Problem("archives", path, f"there is no such file, and {what}")
            elif not quick and digest is None:  # of a version that noted none
                blobs_of(read_archive(path, keys, tuple(FAMILIES)))
            elif not quick and (sha256 := digest_of(Path(path))) != digest:
                yield Problem("archives", path, f"its sha256 is {sha256}, {what} with {digest}")
        except (OSError, StoreError, DamagedSegmentError) as error:
            yield Problem("archives", path, f"{what}, and {error}")


async def check_surroundings(
    database: Database, named: Collection[bytes], *, quick: bool
) -> list[Problem]:
    """Return problems beside the log; a quick run looks at names, triggers and indexes alone.

    Args:
        database: the store.
        named: keys of the segments that events of one experiment name.
        quick: open no segment.
    """
    unnamed = await database.read(log.damaged_names)
    wrong = [*await database.read(schema.unsound), *unnamed]
    if not quick:
        wrong += await database.read(schema.damaged_pages)
    problems = [Problem("database", database.name, what) for what in wrong]
    if quick or unnamed:  # other experiments are read by their names
        return problems
    orphans = (await database.read(database.segments.keys)).difference(named)
    others = await database.read(log.experiment_names) if orphans else {}
    for key in others.values():
        async for _, fact in facts_of(database, key, WithSegment):
            orphans.discard(fact.segment)
    what = "no event names it"  # of any experiment
    return problems + [Problem("segments", f"segment {key.hex()}", what) for key in orphans]
