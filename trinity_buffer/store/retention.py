"""Segments that no trainer needs any more."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT
from trinity_buffer.store.trainer_queries import Reader, guest_name, readers
from trinity_buffer.store.transaction import Statement, Transaction

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
_SEGMENT = (
    "(SELECT e.segment FROM experience e WHERE e.experiment = :of AND e.address = heads.address)"
)
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
    for position, segment in _ARCHIVES.fetch_all(tx, of=experiment):
        segments.setdefault(int(position), []).append(bytes(segment))
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
        reader = need.reader
        rows = _LEFT.fetch_all(
            tx,
            of=experiment,
            first=held[0].first,
            last=held[-1].last,
            set=need.annotation_set,
            holder=reader.experiment,
            trainer=reader.name,
            source=reader.source,
            horizon=need.horizon,
            rejecting=reader.rejecting,
        )
        left.update(address for (address,) in rows)
    ordered = sorted(left)
    return [segment for segment in held if not _any_between(ordered, segment)] if needs else []


def _any_between(left: Sequence[int], segment: Held) -> bool:
    place = bisect_left(left, segment.first)
    return place < len(left) and left[place] <= segment.last


# Experiences that a set has not decided, or whose annotations a trainer may still train on. Keys
# and indexes answer each look; joined, the tables would be walked.
_LEFT = Statement(
    "SELECT e.address FROM experience e WHERE e.experiment = :of AND e.address >= :first "
    "AND e.address <= :last AND e.refused IS NULL AND NOT EXISTS (SELECT 1 FROM rejection r "
    "WHERE r.experiment = :of AND r.consumer = :set AND r.address = e.address OFFSET 0) "
    "AND (NOT EXISTS (SELECT 1 FROM annotation a WHERE a.experiment = :of "
    "AND a.consumer = :set AND a.experience = e.address OFFSET 0) "
    "OR EXISTS (SELECT 1 FROM annotation a WHERE a.experiment = :of AND a.consumer = :set "
    "AND a.experience = e.address AND NOT EXISTS (SELECT 1 FROM delivery d "
    "WHERE d.experiment = :holder AND d.consumer = :trainer AND d.source = :source "
    "AND d.address = a.address AND d.step <= :horizon OFFSET 0) AND NOT EXISTS "
    "(SELECT 1 FROM rejection r WHERE r.experiment = :of AND r.consumer = :rejecting "
    "AND r.address = a.address OFFSET 0) OFFSET 0))"
)
