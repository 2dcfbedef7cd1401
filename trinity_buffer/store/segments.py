"""Segments: the columnar blobs that events refer to, in parts, each with a checksum."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

import xxhash
from sqlalchemy import bindparam, select
from sqlalchemy import delete as sql_delete

from trinity_buffer.errors import DamagedSegmentError
from trinity_buffer.sizes import sizes
from trinity_buffer.store.tables import archived, segment
from trinity_buffer.store.transaction import Prepared, Transaction


def new_key() -> bytes:
    """Return a fresh key: 48 bits of milliseconds, which keep inserts together, and 80 random."""
    return int(time.time() * 1000).to_bytes(6, "big") + os.urandom(10)


def checksum(key: bytes, family: str, part: int, data: bytes | memoryview) -> int:
    """Return XXH3-64 of ``data``, as the signed number that both databases have a column for.

    Its seed is XXH3-64 of where the data belongs, so that two rows exchanged are seen. It is for
    damage, not for malice, and runs at the speed of memory.
    """
    seed = xxhash.xxh3_64_intdigest(b"%b/%b/%d" % (key, family.encode(), part))
    return int.from_bytes(xxhash.xxh3_64_digest(data, seed), "big", signed=True)


def _holds(key: bytes, family: str, part: int, recorded: int, data: bytes) -> bool:
    """Return whether a checksum holds: ours, or that of the data alone, which 0001 wrote."""
    if checksum(key, family, part, data) == recorded:
        return True
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True) == recorded


def rows_of(key: bytes, families: Mapping[str, bytes]) -> list[dict[str, object]]:
    """Return the rows that store ``families`` under ``key``. Computes: not in a transaction."""
    rows, size = [], sizes().bytes_per_part
    for family, blob in families.items():
        view = memoryview(blob)
        for part, start in enumerate(range(0, max(len(blob), 1), size)):
            data = view[start : start + size]
            whole = len(data) == len(blob)
            rows.append(
                {
                    "key": key,
                    "family": family,
                    "part": part,
                    "checksum": checksum(key, family, part, data),
                    "data": blob if whole else bytes(data),
                }
            )
    return rows


def write(tx: Transaction, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert what `rows_of` made."""
    tx.add(segment, [tuple(row.values()) for row in rows])


def read(
    tx: Transaction, keys: Sequence[bytes], families: Sequence[str]
) -> dict[tuple[bytes, str], list[tuple[int, int, bytes]]]:
    """Return (key, family) -> parts as (part, checksum, data), to be checked with `joined`."""
    if not keys or not families:
        return {}
    values: dict[str, object] = {f"key{number}": key for number, key in enumerate(keys)}
    values |= {f"family{number}": family for number, family in enumerate(families)}
    found: dict[tuple[bytes, str], list[tuple[int, int, bytes]]] = {}
    rows = _parts_of(len(keys), len(families)).rows(tx, **values)
    for key, family, part, recorded, data in rows:
        found.setdefault((key, family), []).append((part, recorded, data))
    return found


@lru_cache(maxsize=128)
def _parts_of(keys: int, families: int) -> Prepared:
    """Return the statement for so many keys and families."""
    query = select(segment).where(
        segment.c.key.in_([bindparam(f"key{number}") for number in range(keys)]),
        segment.c.family.in_([bindparam(f"family{number}") for number in range(families)]),
    )
    return Prepared(query.order_by(segment.c.key, segment.c.family, segment.c.part))


def delete(tx: Transaction, keys: Sequence[bytes]) -> None:
    """Delete segments that an ``archived`` row names; a trigger refuses all others."""
    tx.execute(sql_delete(segment).where(segment.c.key.in_(keys)))


def archived_at(tx: Transaction, keys: Sequence[bytes]) -> dict[bytes, tuple[int, str | None]]:
    """Return (position of the event, file) of those of ``keys`` that have left the database."""
    query = select(archived.c.segment, archived.c.position, archived.c.uri)
    rows = tx.execute(query.where(archived.c.segment.in_(keys)))
    return {bytes(key): (int(position), uri) for key, position, uri in rows.all()}


def joined(key: bytes, family: str, parts: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Return the blob of ``parts``. Computes checksums: call it outside transactions.

    Raises:
        DamagedSegmentError: a part is missing or its checksum does not hold.
    """
    for expected, (part, recorded, data) in enumerate(parts):
        if part != expected or not _holds(key, family, part, recorded, data):
            raise DamagedSegmentError(
                f"segment {key.hex()} family {family!r} part {part}: the checksum does not hold; "
                "`trinity-buffer verify` lists every damaged segment, restore it from a backup"
            )
    if not parts:
        raise DamagedSegmentError(f"segment {key.hex()} family {family!r} is missing")
    return parts[0][2] if len(parts) == 1 else b"".join(data for _, _, data in parts)
