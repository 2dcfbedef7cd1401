"""Segments: the columnar blobs that events refer to, in parts, each with a checksum."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import xxhash
from sqlalchemy import delete as sql_delete
from sqlalchemy import func, select, text
from typing_extensions import override

from trinity_buffer.codec.blob import Blob, Buffer
from trinity_buffer.errors import DamagedSegmentError
from trinity_buffer.limits import sizes
from trinity_buffer.store.counters import all_numbers
from trinity_buffer.store.tables import segment
from trinity_buffer.store.transaction import (
    ReadSession,
    SegmentParts,
    Statement,
    Transaction,
    one_statement,
)


class SegmentRow(NamedTuple):
    """One part of a segment, as the table `segment` has it."""

    key: bytes
    family: str
    part: int
    checksum: int
    data: Blob


class SegmentStore(ABC):
    """Where the blobs of segments are kept; each `Database` has one.

    A blob is `put` before the transaction whose event names it. It is part of the store once that
    transaction, which attaches the rows that `put` returned, has committed.
    """

    @abstractmethod
    def put(self, key: bytes, families: Mapping[str, Blob | Buffer]) -> list[SegmentRow]:
        """Prepare blobs and return their rows, to be attached. Slow: not in a transaction."""

    @abstractmethod
    def attach(self, tx: Transaction, rows: Sequence[SegmentRow]) -> None:
        """Make rows that `put` returned part of the store once ``tx`` commits."""

    @abstractmethod
    def get(self, s: ReadSession, keys: Sequence[bytes], families: Sequence[str]) -> SegmentParts:
        """Return the parts of some segments, unchecked; missing ones are left out."""

    @abstractmethod
    def delete(self, tx: Transaction, keys: Sequence[bytes]) -> None:
        """Delete segments that an ``archived`` row names, once ``tx`` commits."""

    @abstractmethod
    def keys(self, tx: Transaction) -> set[bytes]:
        """Return the keys of all segments, of all experiments."""

    @abstractmethod
    def segment_parts(self, tx: Transaction) -> int:
        """Return how many parts there are, of all segments."""


class TableSegments(SegmentStore):
    """Segments in the table `segment`, beside the events that name them."""

    @override
    def put(self, key: bytes, families: Mapping[str, Blob | Buffer]) -> list[SegmentRow]:
        # Checksums are computed here, before the transaction that `attach` is part of.
        rows, size = [], sizes().bytes_per_part
        for family, whole in families.items():
            blob = whole if isinstance(whole, Blob) else Blob([whole])
            for part, data in enumerate(blob.cut(size)):
                rows.append(SegmentRow(key, family, part, checksum(key, family, part, data), data))
        return rows

    @override
    def attach(self, tx: Transaction, rows: Sequence[SegmentRow]) -> None:
        tx.insert_blobs(segment, rows)

    @override
    def get(self, s: ReadSession, keys: Sequence[bytes], families: Sequence[str]) -> SegmentParts:
        return s.read(_read, keys, families)

    @override
    def delete(self, tx: Transaction, keys: Sequence[bytes]) -> None:
        # A trigger refuses those that no ``archived`` row names.
        tx.execute(sql_delete(segment).where(segment.c.key.in_(keys)))

    @override
    def keys(self, tx: Transaction) -> set[bytes]:
        return {bytes(key) for (key,) in tx.execute(select(segment.c.key).distinct())}

    @override
    def segment_parts(self, tx: Transaction) -> int:
        """Return how many parts there are, of all experiments."""
        left = any(("", "SegmentsArchived") in numbers for numbers in all_numbers(tx).values())
        # SQLite numbers them, without a gap until some leave.
        number = text("max(rowid)") if tx.dialect.name == "sqlite" and not left else func.count()
        return int(tx.execute(select(number).select_from(segment)).scalar_one() or 0)


def new_key() -> bytes:
    """Return a fresh key: 48 bits of milliseconds, which keep inserts together, and 80 random."""
    return int(time.time() * 1000).to_bytes(6, "big") + os.urandom(10)


def checksum(key: bytes, family: str, part: int, data: Blob | Buffer) -> int:
    """Return XXH3-64 of ``data``, as the signed number that both databases have a column for.

    Its seed is XXH3-64 of where the data belongs, so that two rows exchanged are seen. It is for
    damage, not for malice, and runs at the speed of memory.
    """
    seed = xxhash.xxh3_64_intdigest(b"%b/%b/%d" % (key, family.encode(), part))
    made = xxhash.xxh3_64(seed=seed)
    for piece in data.pieces if isinstance(data, Blob) else (data,):
        made.update(piece)
    return int.from_bytes(made.digest(), "big", signed=True)


def _holds(key: bytes, family: str, part: int, recorded: int, data: Buffer) -> bool:
    """Return whether a checksum matches: ours, or that of the data alone, as 0001 wrote it."""
    if checksum(key, family, part, data) == recorded:
        return True
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True) == recorded


@one_statement
def _read(tx: Transaction, keys: Sequence[bytes], families: Sequence[str]) -> SegmentParts:
    if not keys or not families:
        return {}
    values: dict[str, object] = {f"key{number}": key for number, key in enumerate(keys)}
    values |= {f"family{number}": family for number, family in enumerate(families)}
    parts: SegmentParts = {}
    values["long"] = sizes().bytes_read_at_once
    rows = _parts_of(len(keys), len(families)).fetch_all(tx, **values)
    for key, family, part, recorded, data in tx.with_blobs(segment, rows):
        parts.setdefault((key, family), []).append((part, recorded, data))
    return parts


@lru_cache(maxsize=128)
def _parts_of(keys: int, families: int) -> Statement:
    """Return the statement for so many keys and families.

    On SQLite a long blob is NULL in it. A flipped bit can make a number, a text or NULL of a blob
    there, which is then an empty one: its checksum does not hold.
    """
    wanted = f"key IN ({_places('key', keys)}) AND family IN ({_places('family', families)})"
    ordered = f"FROM segment WHERE {wanted} ORDER BY key, family, part"
    data = "CASE WHEN typeof(data) <> 'blob' THEN x'' WHEN length(data) <= :long THEN data END"
    return Statement(
        f"SELECT key, family, part, checksum, {data}, rowid, length(data) {ordered}",
        f"SELECT key, family, part, checksum, data {ordered}",
    )


def _places(name: str, number: int) -> str:
    return ", ".join(f":{name}{place}" for place in range(number))


@one_statement
def archived_at(tx: Transaction, keys: Sequence[bytes]) -> dict[bytes, tuple[int, str | None]]:
    """Return (position of the event, file) of those of ``keys`` that have left the database."""
    if not keys:
        return {}
    number = 1 << (len(keys) - 1).bit_length()  # a statement for each number would be many
    values = {f"key{place}": keys[min(place, len(keys) - 1)] for place in range(number)}
    rows = _archived_of(number).fetch_all(tx, **values)
    return {bytes(key): (int(position), uri) for key, position, uri in rows}


@cache
def _archived_of(keys: int) -> Statement:
    """Return the statement for so many keys."""
    return Statement(
        f"SELECT segment, position, uri FROM archived WHERE segment IN ({_places('key', keys)})"
    )


def blob_of(key: bytes, family: str, parts: Sequence[tuple[int, int, Buffer]]) -> Buffer:
    """Return the blob of ``parts``. Computes checksums: call it outside transactions.

    Raises:
        DamagedSegmentError: a part is missing or its checksum does not hold.
    """
    for expected, (part, recorded, data) in enumerate(parts):
        if part != expected or not _holds(key, family, part, recorded, data):
            raise DamagedSegmentError(
                f"segment {key.hex()} family {family!r} part {part}: the checksum does not match; "
                "`trinity-buffer verify` lists every damaged segment, restore it from a backup"
            )
    if not parts:
        raise DamagedSegmentError(f"segment {key.hex()} family {family!r} is missing")
    # Most segments have one part, which is not copied.
    return parts[0][2] if len(parts) == 1 else b"".join(data for _, _, data in parts)
