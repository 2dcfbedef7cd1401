"""Queries for people: reads only, and no explorer or trainer waits for one."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from trinity_buffer.identity import EID
from trinity_buffer.limits import sizes
from trinity_buffer.store import writer_queries
from trinity_buffer.store.rows import EXPERIENCE_COLUMNS, SLOT_BITS, ExperienceRow, experience_row
from trinity_buffer.store.transaction import Statement, Transaction

_ABOVE_ALL = 1 << 62
"""No address is as high."""


def position_before(
    tx: Transaction, experiment: int, count: int, wanted: Sequence[str], up_to: int
) -> int:
    """Return the position before the last ``count`` events of ``wanted`` kinds up to ``up_to``."""
    return int(_POSITION.value(tx, of=experiment, kinds=wanted, last=up_to, count=count) or 0)


_POSITION = Statement(
    "SELECT position FROM event WHERE experiment = :of AND kind IN TEXTS(:kinds) "
    "AND position <= :last ORDER BY position DESC LIMIT 1 OFFSET :count"
)


def size_bytes(tx: Transaction) -> int:
    """Return the size of the database on disk, without its write-ahead log."""
    return int(_SIZE.value(tx))


_SIZE = Statement(
    "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size",
    "SELECT pg_database_size(current_database())",
)


def newest_groups(
    tx: Transaction, experiment: int, limit: int, before: int | None = None
) -> list[tuple[str, str]]:
    """Return (batch, task) of the groups that were recorded last, the newest first.

    With ``before``, only of groups whose experiences all have a lower address.
    """
    groups: dict[tuple[str, str], None] = {}
    query = _NEWEST if before is None else _NEWEST_BEFORE
    shown = before = _ABOVE_ALL if before is None else before
    while len(groups) < limit:
        page = {"before": before, "most": sizes.rows_per_page}
        rows = query.fetch_all(tx, of=experiment, shown=shown, **page)
        if not rows:
            break
        groups.update(dict.fromkeys((batch, task) for _, batch, task in rows))
        before = int(rows[-1][0])
    return list(groups)[:limit]


_GROUPS = "SELECT address, batch, task FROM experience e WHERE experiment = :of"
_DOWN = "AND address < :before ORDER BY address DESC LIMIT :most"
_NEWEST = Statement(f"{_GROUPS} {_DOWN}")
# A group that goes on behind the page was shown on the one before. "+ 0": looked up by its key, for
# by their addresses all later rows would be looked at for each row of the page.
_NEWEST_BEFORE = Statement(
    f"{_GROUPS} AND NOT EXISTS (SELECT 1 FROM experience later WHERE later.experiment = :of "
    "AND later.batch = e.batch AND later.task = e.task AND later.address + 0 >= :shown "
    f"OFFSET 0) {_DOWN}"
)


def groups_of_batch(
    tx: Transaction, experiment: int, key: str, limit: int, before: int | None = None
) -> list[tuple[str, str]]:
    """Return the groups of one batch, as `newest_groups` does."""
    page = {"before": _ABOVE_ALL if before is None else before, "most": limit}
    return [(key, task) for task, _ in _OF_BATCH.fetch_all(tx, of=experiment, batch=key, **page)]


# A batch has few tasks, unlike an experiment: they can be grouped before they are ordered.
_OF_BATCH = Statement(
    "SELECT task, max(address) AS newest FROM experience WHERE experiment = :of AND batch = :batch "
    "GROUP BY task HAVING max(address) < :before ORDER BY newest DESC LIMIT :most"
)


def members(
    tx: Transaction, experiment: int, groups: Sequence[tuple[str, str]]
) -> list[ExperienceRow]:
    """Return the experiences of (batch, task) groups, by address."""
    rows = writer_queries.of_groups(tx, _MEMBERS, experiment, groups)
    return sorted((experience_row(row) for _, *row in rows), key=lambda row: row.address)


_MEMBERS = writer_queries.in_batch(EXPERIENCE_COLUMNS, writer_queries.IN_TASKS)


def find(tx: Transaction, experiment: int, eid: EID) -> ExperienceRow | None:
    """Return the experience of this address, or None."""
    keys = {"batch": str(eid.batch), "task": str(eid.task), "suffix": eid.suffix}
    rows = _FIND.fetch_all(tx, of=experiment, run=eid.run, step=eid.step, **keys)
    return experience_row(rows[0]) if rows else None


_FIND = Statement(
    f"SELECT {EXPERIENCE_COLUMNS} FROM experience WHERE experiment = :of AND batch = :batch "
    "AND task = :task AND run = :run AND step = :step AND suffix = :suffix"
)


def annotation_rows(
    tx: Transaction, experiment: int, addresses: Sequence[int]
) -> list[tuple[str, int, int]]:
    """Return (set, address of the experience, address of the annotation), sorted."""
    rows = _ANNOTATIONS.fetch_all(tx, of=experiment, addresses=addresses)
    return sorted(rows, key=itemgetter(0, 2))


# Only what its index holds, and not sorted: else SQLite walks through every annotation.
_ANNOTATIONS = Statement(
    "SELECT consumer, experience, address FROM annotation "
    "WHERE experiment = :of AND experience IN INTS(:addresses)"
)


def deliveries(
    tx: Transaction, experiment: int, trainers: Sequence[str], addresses: Sequence[int], source: str
) -> list[tuple[str, int, int]]:
    """Return (trainer, address of the annotation, step) of the steps that hold annotation rows.

    Args:
        experiment: the trainers'.
        source: the experiment of the rows, where it is another one.
    """
    wanted = {"by": trainers, "addresses": addresses, "source": source}
    return _DELIVERIES.fetch_all(tx, of=experiment, **wanted)


_OF_THESE = "WHERE experiment = :of AND consumer IN TEXTS(:by) AND address IN INTS(:addresses)"
_DELIVERIES = Statement(
    f"SELECT consumer, address, step FROM delivery {_OF_THESE} AND source = :source "
    "ORDER BY consumer, step"
)


class RejectedRow(NamedTuple):
    """A row of `tables.rejection`: an experience, or of a trainer an annotation, left out."""

    consumer: str
    address: int
    reason: str
    position: int


def rejections(
    tx: Transaction, experiment: int, consumers: Sequence[str], addresses: Sequence[int]
) -> list[RejectedRow]:
    """Return which of ``addresses`` these consumers rejected."""
    rows = _REJECTIONS.fetch_all(tx, of=experiment, by=consumers, addresses=addresses)
    return list(map(RejectedRow._make, rows))


_REJECTED = "SELECT consumer, address, reason, position FROM rejection"
_REJECTIONS = Statement(f"{_REJECTED} {_OF_THESE} ORDER BY consumer, address")


def rejected(
    tx: Transaction,
    experiment: int,
    name: str,
    *,
    reason: str | None,
    limit: int,
    before: int | None = None,
) -> list[RejectedRow]:
    """Return rows that a consumer rejected, the last first; with ``before``, those behind it.

    Of `DOOR`, the experiences that were refused there.
    """
    page = {"before": _ABOVE_ALL if before is None else before, "most": limit}
    query = _REFUSED_FOR if name == writer_queries.DOOR else _REJECTED_FOR
    rows = query.fetch_all(tx, of=experiment, by=name, reason=reason, kind=f"{reason}:", **page)
    return list(map(RejectedRow._make, rows))


# A reason, or all of that kind. No LIKE, for which upper and lower case are the same in SQLite
# alone.
_FOR = (
    "AND (CAST(:reason AS text) IS NULL OR {0} = :reason "
    "OR substr({0}, 1, length(CAST(:kind AS text))) = :kind)"
)
# By the event that rejected: a group that was long incomplete is rejected after newer ones.
_REJECTED_FOR = Statement(
    f"{_REJECTED} WHERE experiment = :of AND consumer = :by {_FOR.format('reason')} "
    "AND (position, address) < (coalesce((SELECT position FROM rejection WHERE experiment = :of "
    "AND consumer = :by AND address = :before), :before), :before) "
    "ORDER BY position DESC, address DESC LIMIT :most"
)
_REFUSED_FOR = Statement(
    f"SELECT '{writer_queries.DOOR}', address, refused, address >> {SLOT_BITS} FROM experience "
    f"WHERE experiment = :of AND refused IS NOT NULL {_FOR.format('refused')} {_DOWN}"
)


def who_rejected(tx: Transaction, experiment: int) -> list[str]:
    """Return the consumers that rejected rows, trainers of other experiments too."""
    names: list[str] = []
    while name := _NEXT.value(tx, of=experiment, after=names[-1] if names else ""):
        names.append(name)  # a look at the index for each, and not at each row
    return names


_NEXT = Statement(
    "SELECT min(consumer) FROM rejection WHERE experiment = :of AND consumer > :after"
)


def actors(tx: Transaction, experiment: int, positions: Sequence[int]) -> dict[int, str]:
    """Return position -> the actor that recorded the event."""
    return dict(_ACTORS.fetch_all(tx, of=experiment, positions=positions))


_ACTORS = Statement(
    "SELECT position, actor FROM event WHERE experiment = :of AND position IN INTS(:positions)"
)


def annotated_experiences(
    tx: Transaction, experiment: int, sets: Sequence[str], addresses: Sequence[int]
) -> dict[int, int]:
    """Return address of annotation -> address of experience."""
    return dict(_EXPERIENCES.fetch_all(tx, of=experiment, by=sets, addresses=addresses))


_EXPERIENCES = Statement(f"SELECT address, experience FROM annotation {_OF_THESE}")
