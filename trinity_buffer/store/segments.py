"""Segments: the columnar blobs that events refer to, in parts with checksums; who needs which."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import xxhash

from trinity_buffer.codec.blob import Buffer
from trinity_buffer.errors import DamagedSegmentError
from trinity_buffer.limits import sizes
from trinity_buffer.store import transaction
from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT
from trinity_buffer.store.tables import segment
from trinity_buffer.store.trainer_queries import Reader, guest_name, readers
from trinity_buffer.store.transaction import SegmentParts, Statement, Transaction, one_statement


class SegmentRow(NamedTuple):
    """One part of a segment, as the table `segment` has it, with its data in pieces."""

    key: bytes
    family: str
    part: int
    checksum: int
    data: Sequence[Buffer]


class SegmentStore:
    """Where the blobs of segments are kept: here in the table `segment`, beside their events.

    Each `Database` has one; another place is a class of its own with these methods. A blob is
    `put` before the transaction whose event names it. It is part of the store once that
    transaction, which attaches the rows that `put` returned, has committed.
    """

    def put(self, key: bytes, families: Mapping[str, Sequence[Buffer]]) -> list[SegmentRow]:
        """Prepare blobs, given in pieces, and return their rows, to be attached.

        Slow, as checksums are computed here: not in a transaction.
        """
        rows, size = [], sizes.bytes_per_part
        for family, pieces in families.items():
            is_short = sum(map(len, pieces)) <= size
            for part, data in enumerate([pieces] if is_short else _cut(pieces, size)):
                made = checksum(key, family, part, *data)
                rows.append(SegmentRow(key, family, part, made, data))
        return rows

    def attach(self, tx: Transaction, rows: Sequence[SegmentRow]) -> None:
        """Make rows that `put` returned part of the store once ``tx`` commits."""
        tx.insert_blobs(segment, rows)

    def get(
        self, s: transaction.ReadSession, keys: Sequence[bytes], families: Sequence[str]
    ) -> SegmentParts:
        """Return the parts of some segments, unchecked; missing ones are left out."""
        return s.read(_read, keys, families) if keys and families else {}

    def delete(self, tx: Transaction, keys: Sequence[bytes]) -> None:
        """Delete segments that an ``archived`` row names, once ``tx`` commits."""
        _DELETE.execute_later(tx, keys=keys)

    def keys(self, tx: Transaction) -> set[bytes]:
        """Return the keys of all segments, of all experiments."""
        return {bytes(key) for (key,) in _KEYS.fetch_all(tx)}

    def segment_parts(self, tx: Transaction) -> int:
        """Return how many parts there are, of all segments of all experiments."""
        # SQLite numbers them, without a gap until some leave.
        counted = tx.dialect.name != "sqlite" or _LEFT_EVER.value(tx)
        number = "count(*)" if counted else "max(rowid)"
        return int(Statement(f"SELECT {number} FROM segment").value(tx) or 0)


_DELETE = Statement("DELETE FROM segment WHERE key IN BYTES(:keys)")
_KEYS = Statement("SELECT DISTINCT key FROM segment")
_LEFT_EVER = Statement("SELECT 1 FROM counter WHERE consumer = '' AND key = 'SegmentsArchived'")


def _cut(pieces: Sequence[Buffer], size: int) -> Iterator[list[Buffer]]:
    """Yield the same bytes in parts of ``size`` bytes, the last one perhaps smaller."""
    part, room = list[Buffer](), size
    for piece in pieces:
        view = memoryview(piece)
        while view:
            part.append(view[:room])
            view, room = view[room:], room - len(part[-1])
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part


def new_key() -> bytes:
    """Return a fresh key: 48 bits of milliseconds, which keep inserts together, and 80 random."""
    return int(time.time() * 1000).to_bytes(6, "big") + os.urandom(10)


def checksum(key: bytes, family: str, part: int, *pieces: Buffer) -> int:
    """Return XXH3-64 of the data, as the signed number that both databases have a column for.

    Its seed is XXH3-64 of where the data belongs, so that two rows exchanged are seen. It is for
    damage, not for malice, and runs at the speed of memory.
    """
    seed = xxhash.xxh3_64_intdigest(b"%b/%b/%d" % (key, family.encode(), part))
    made = xxhash.xxh3_64(seed=seed)
    for piece in pieces:
        made.update(piece)
    return int.from_bytes(made.digest(), "big", signed=True)


@one_statement
def _read(tx: Transaction, keys: Sequence[bytes], families: Sequence[str]) -> SegmentParts:
    parts: SegmentParts = {}
    long = sizes.bytes_read_at_once
    rows = tx.with_blobs(segment, _PARTS.fetch_all(tx, keys=keys, families=families, long=long))
    for key, family, part, recorded, data in rows:
        parts.setdefault((key, family), []).append((part, recorded, data))
    return parts


# On SQLite a long blob is NULL. A flipped bit can make a number, a text or NULL of a blob there,
# which is then an empty one: its checksum does not hold.
_PART = "SELECT key, family, part, checksum,"
_OF_SEGMENTS = (
    "FROM segment WHERE key IN BYTES(:keys) AND family IN TEXTS(:families) "
    "ORDER BY key, family, part"
)
_PARTS = Statement(
    f"{_PART} CASE WHEN typeof(data) <> 'blob' THEN x'' WHEN length(data) <= :long THEN data END, "
    f"rowid, length(data) {_OF_SEGMENTS}",
    f"{_PART} data {_OF_SEGMENTS}",
)


@one_statement
def archived_at(tx: Transaction, keys: Sequence[bytes]) -> dict[bytes, tuple[int, str | None]]:
    """Return (position of the event, file) of those of ``keys`` that have left the database."""
    rows = _ARCHIVED.fetch_all(tx, keys=keys)
    return {bytes(key): (int(position), uri) for key, position, uri in rows}


_ARCHIVED = Statement("SELECT segment, position, uri FROM archived WHERE segment IN BYTES(:keys)")


def blob_of(key: bytes, family: str, parts: Sequence[tuple[int, int, Buffer]]) -> Buffer:
    """Return the blob of ``parts``. Computes checksums: call it outside transactions.

    Raises:
        DamagedSegmentError: a part is missing or its checksum does not hold.
    """
    for expected, (part, recorded, data) in enumerate(parts):
        # Ours, or that of the data alone, as schema 0001 wrote it.
        is_sound = part == expected and (
            recorded == checksum(key, family, part, data)
            or recorded == int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)
        )
        if not is_sound:
            raise DamagedSegmentError(
                f"segment {key.hex()} family {family!r} part {part}: the checksum does not match; "
                "`trinity-buffer verify` lists every damaged segment, restore it from a backup"
            )
    if not parts:
        raise DamagedSegmentError(f"segment {key.hex()} family {family!r} is missing")
    # Most segments have one part, which is not copied.
    return parts[0][2] if len(parts) == 1 else b"".join(data for _, _, data in parts)


_BEHIND_ALL = 1 << 62
"""No address is as high."""

EXPERTS_SET = "recorded"
"""The set of an expert's experiment that other experiments mix in."""


class Held(NamedTuple):
    """A segment of experiences that is still in the database.

    Attributes:
        ordinal: its number among all segments of the query, archived ones included: 1, 2, ...
        first, last: addresses of its rows.
    """

    ordinal: int
    segment: bytes
    first: int
    last: int


class Need(NamedTuple):
    """A trainer that reads the experiences of an experiment.

    Attributes:
        reader: the trainer.
        annotation_set: what it reads.
        horizon: the last step whose data may leave.
    """

    reader: Reader
    annotation_set: str
    horizon: int


def held_segments(tx: Transaction, experiment: int, *, after: int, limit: int) -> list[Held]:
    """Return the next segments behind address ``after`` that have not been archived.

    Steps from event to event: the cost grows with the number of writes, not of experiences.
    """
    rows = _HELD.fetch_all(tx, of=experiment, after=after, most=limit)
    return sorted(Held(int(n), bytes(key), int(a), int(z)) for n, key, a, z in rows)


# The first address of each event with experiences, in order; then their segments. A count and not
# an EXISTS, of which PostgreSQL makes a join: the heads must stay in order.
_NEXT_EVENT = f"(heads.address / {MAX_ROWS_PER_EVENT} + 1) * {MAX_ROWS_PER_EVENT}"
_SEGMENT = "(SELECT segment FROM experience WHERE experiment = :of AND address = heads.address)"
_HELD = Statement(
    "WITH RECURSIVE heads(address, ordinal) AS ("
    "SELECT min(e.address), 1 FROM experience e WHERE e.experiment = :of AND e.address > :after "
    "UNION ALL SELECT (SELECT min(e.address) FROM experience e WHERE e.experiment = :of "
    f"AND e.address >= {_NEXT_EVENT}), heads.ordinal + 1 FROM heads "
    "WHERE heads.address IS NOT NULL) "
    f"SELECT heads.ordinal, {_SEGMENT}, heads.address, (SELECT max(e.address) FROM experience e "
    "WHERE e.experiment = :of AND e.address >= heads.address "
    f"AND e.address < {_NEXT_EVENT}) FROM heads WHERE heads.address IS NOT NULL "
    "AND (SELECT count(*) FROM archived a WHERE a.experiment = :of "
    f"AND a.segment = {_SEGMENT}) = 0 LIMIT :most"
)


def archives(tx: Transaction, experiment: int) -> dict[int, list[bytes]]:
    """Return position -> segments that its event archived to a file, in the order of the log."""
    segments: dict[int, list[bytes]] = {}
    for position, key in _ARCHIVES.fetch_all(tx, of=experiment):
        segments.setdefault(int(position), []).append(bytes(key))
    return segments


_ARCHIVES = Statement(
    "SELECT position, segment FROM archived WHERE experiment = :of AND uri IS NOT NULL "
    "ORDER BY position, segment"
)


def needs_of(tx: Transaction, experiment: int, *, keep_steps: int) -> list[Need]:
    """Return the readers of an experiment: its trainers, and trainers that mix it in."""
    needs = []
    for key, name, source, trainer in readers(tx, experiment):
        rejecting = guest_name(name, trainer.name) if source else trainer.name
        reader = Reader(key, trainer.name, source, rejecting)
        annotation_set = EXPERTS_SET if source else trainer.config["strategy"]
        needs.append(Need(reader, annotation_set, trainer.committed_step - keep_steps))
    return needs


def finished(
    tx: Transaction, experiment: int, held: Sequence[Held], needs: Sequence[Need]
) -> list[Held]:
    """Return those of ``held``, which follow each other, that no trainer needs any more.

    Without any trainer all are still needed.
    """
    left: set[int] = set()
    for need in needs:
        span = {"of": experiment, "first": held[0].first, "last": held[-1].last}
        rows = _LEFT.fetch_all(tx, **span, **need.reader._asdict(), **need._asdict())
        left.update(address for (address,) in rows)
    ordered = [*sorted(left), _BEHIND_ALL]
    return [at for at in held if needs and ordered[bisect_left(ordered, at.first)] > at.last]


# Experiences that a set has not decided, or whose annotations a trainer may still train on. Keys
# and indexes answer each look; joined, the tables would be walked.
_LEFT = Statement(
    "SELECT e.address FROM experience e WHERE e.experiment = :of AND e.address >= :first "
    "AND e.address <= :last AND e.refused IS NULL AND NOT EXISTS (SELECT 1 FROM rejection r "
    "WHERE r.experiment = :of AND r.consumer = :annotation_set AND r.address = e.address OFFSET 0) "
    "AND (NOT EXISTS (SELECT 1 FROM annotation a WHERE a.experiment = :of "
    "AND a.consumer = :annotation_set AND a.experience = e.address OFFSET 0) OR EXISTS "
    "(SELECT 1 FROM annotation a WHERE a.experiment = :of AND a.consumer = :annotation_set "
    "AND a.experience = e.address AND NOT EXISTS (SELECT 1 FROM delivery d "
    "WHERE d.experiment = :experiment AND d.consumer = :name AND d.source = :source "
    "AND d.address = a.address AND d.step <= :horizon OFFSET 0) AND NOT EXISTS "
    "(SELECT 1 FROM rejection r WHERE r.experiment = :of AND r.consumer = :rejecting "
    "AND r.address = a.address OFFSET 0) OFFSET 0))"
)
