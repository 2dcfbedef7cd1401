"""Queries of trainers: ready rows, delivered steps, and the backlog for admission control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trinity_buffer.store import rows as store_rows
from trinity_buffer.store import writer_queries
from trinity_buffer.store.fold import LAST_ORDINAL
from trinity_buffer.store.tables import NOT_FREQUENT
from trinity_buffer.store.transaction import Statement, Transaction


class Reader(NamedTuple):
    """A trainer as it reads an annotation set, of its own experiment or of another.

    Attributes:
        experiment: the trainer's own, whose deliveries count.
        name: the trainer.
        source: name of the experiment that is read; "" for its own.
        rejecting: by which name it rejects in the experiment that is read.
    """

    experiment: int
    name: str
    source: str
    rejecting: str


def guest_name(experiment: str, trainer: str) -> str:
    """Return the name by which a trainer of ``experiment`` rejects in others that it reads.

    It is unique: `writer_queries.registered` refuses names with a slash.
    """
    return "/".join(name.replace("%", "%25").replace("/", "%2F") for name in (experiment, trainer))


def readers(tx: Transaction, experiment: int) -> list[tuple[int, str, str, store_rows.ConsumerRow]]:
    """Return the trainers that read an experiment: its own, and those that mix in rows of it.

    Each with the key and the name of its own experiment, and the name that its deliveries give the
    one that is read: "" its own.
    """
    rows = _READERS.fetch_all(tx, of=experiment)
    return [(key, name, source, store_rows.read_consumer(row)) for key, name, source, *row in rows]


# A look at the primary key for each trainer: joined, PostgreSQL may read every delivery.
_READERS = Statement(
    "SELECT c.experiment, x.name, CASE c.experiment WHEN :of THEN '' ELSE own.name END, "
    f"c.{store_rows.CONSUMER_COLUMNS.replace(', ', ', c.')} "
    "FROM consumer c JOIN experiment x ON x.id = c.experiment "
    "JOIN experiment own ON own.id = :of WHERE c.kind = 'trainer' AND (c.experiment = :of "
    "OR EXISTS (SELECT 1 FROM delivery d WHERE d.experiment = c.experiment "
    "AND d.consumer = c.name AND d.source = own.name OFFSET 0)) ORDER BY c.experiment, c.name"
)


def annotated_page(
    tx: Transaction,
    experiment: int,
    *,
    annotation_set: str,
    trainer: Reader,
    start: int,
    limit: int,
) -> tuple[list[int], set[int]]:
    """Return the positions of the events that hold the next ``limit`` rows from ``start`` on.

    And the addresses of those of their rows that ``trainer`` holds or rejected: read in the same
    transaction, so that no row is leased twice.
    """
    page = {"of": experiment, "by": annotation_set, "start": start, "most": limit}
    positions = [position for (position,) in _POSITIONS.fetch_all(tx, **page)]
    if not positions:
        return positions, set()
    span = {"of": experiment, "start": start, "end": store_rows.first_address(positions[-1] + 1)}
    spent = _SPENT.fetch_all(tx, **span, **trainer._asdict())
    return positions, {address for (address,) in spent}


# The limit comes before the DISTINCT, which would read all rows that follow.
_POSITIONS = Statement(
    "SELECT DISTINCT position FROM (SELECT address >> 20 AS position FROM annotation "
    "WHERE experiment = :of AND consumer = :by AND address >= :start "
    "ORDER BY address LIMIT :most) AS page ORDER BY position"
)
# Two ranges of two primary keys; a join of the tables would visit each row of both.
_SPENT = Statement(
    "SELECT address FROM delivery WHERE experiment = :experiment AND consumer = :name "
    "AND source = :source AND address >= :start AND address < :end UNION ALL "
    "SELECT address FROM rejection WHERE experiment = :of AND consumer = :rejecting "
    "AND address >= :start AND address < :end"
)


_ALL = (1 << 63) - 1


def steps(
    tx: Transaction, experiment: int, name: str, *, after: int = 0, limit: int = _ALL
) -> list[store_rows.StepRow]:
    """Return the steps of a trainer above ``after``, in order."""
    rows = _STEPS.fetch_all(tx, of=experiment, by=name, after=after, most=limit)
    return list(map(store_rows.read_step, rows))


_OF_TRAINER = "FROM step WHERE experiment = :of AND consumer = :by"
_STEPS = Statement(
    f"SELECT {store_rows.STEP_COLUMNS} {_OF_TRAINER} AND step > :after ORDER BY step LIMIT :most"
)


def step_at(tx: Transaction, experiment: int, name: str, number: int) -> store_rows.StepRow | None:
    """Return one step of a trainer, or None."""
    rows = steps(tx, experiment, name, after=number - 1, limit=1)
    return rows[0] if rows and rows[0].step == number else None


def steps_without_heads(tx: Transaction, experiment: int, name: str) -> int:
    """Return the last step that a trainer committed before the events had heads, or 0."""
    return int(_WITHOUT_HEADS.value(tx, of=experiment, by=name) or 0)


_WITHOUT_HEADS = Statement(
    f"SELECT max(step) {_OF_TRAINER} AND committed_at < (SELECT min(position) FROM event "
    f"WHERE experiment = :of AND kind = 'ChainStarted' AND {NOT_FREQUENT})"
)


def step_with_rows(tx: Transaction, experiment: int, name: str, number: int) -> int:
    """Return the ``number``-th step of a trainer that has rows; 0 for the 0th.

    Steps that were not handed out yet count as steps with rows.
    """
    if number < 1:
        return 0
    mine = {"of": experiment, "by": name}
    stored = _WITH_ROWS.value(tx, **mine, before=number - 1)
    return number + int(_EMPTY.value(tx, **mine)) if stored is None else int(stored)


_WITH_ROWS = Statement(
    f'SELECT step {_OF_TRAINER} AND "rows" > 0 ORDER BY step LIMIT 1 OFFSET :before'
)
_EMPTY = Statement(f'SELECT count(*) {_OF_TRAINER} AND "rows" = 0')


def steps_from_link(
    tx: Transaction, experiment: int, name: str, before: int, *, limit: int = _ALL
) -> list[store_rows.StepRow]:
    """Return the steps from the last one up to ``before`` whose link of the chain is recorded.

    All steps where no commit recorded the chain of its manifests, as in old versions.
    """
    last = _LAST_LINK.value(tx, of=experiment, by=name, before=before)
    return steps(tx, experiment, name, after=int(last or 1) - 1, limit=limit)


_LAST_LINK = Statement(
    f"SELECT step {_OF_TRAINER} AND step <= :before AND chain IS NOT NULL "
    "ORDER BY step DESC LIMIT 1"
)


def last_checkpoint(tx: Transaction, experiment: int, name: str) -> store_rows.StepRow | None:
    """Return the last committed step of the live line that names a checkpoint."""
    rows = _LAST_CHECKPOINT.fetch_all(tx, of=experiment, by=name)
    return store_rows.read_step(rows[0]) if rows else None


_LAST_CHECKPOINT = Statement(
    f"SELECT {store_rows.STEP_COLUMNS} {_OF_TRAINER} AND committed_at IS NOT NULL "
    "AND checkpoint IS NOT NULL ORDER BY step DESC LIMIT 1"
)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Planned groups on their way to a trainer, and the newest policy, for admission.

    Attributes:
        undelivered: planned groups that were neither handed to the trainer nor rejected.
        uncommitted: planned groups whose gradient step is not committed; rejected ones do not
            count.
        published: the newest policy version, 0 before the first.
        committed_step: the trainer's last one, 0 before the first.
    """

    undelivered: int
    uncommitted: int
    published: int
    committed_step: int = 0

    def without(self, groups: int) -> Backlog:
        """Return it less a number of groups that will never come."""
        undelivered, uncommitted = self.undelivered - groups, self.uncommitted - groups
        return replace(self, undelivered=max(0, undelivered), uncommitted=max(0, uncommitted))


def backlog(tx: Transaction, experiment: int, trainer: str) -> Backlog:
    """Return the backlog in front of ``trainer``, at a cost that does not grow with the run."""
    planned = int(LAST_ORDINAL.value(tx, of=experiment))
    row = writer_queries.consumer_row(tx, experiment, trainer)
    delivered = committed = 0
    if row is None:  # what every set leaves out, none will hand to a trainer to come
        consumers = writer_queries.consumers(tx, experiment).values()
        sets = [each.rejected_groups for each in consumers if each.kind == "strategy"]
        rejected = min(sets, default=0)
    else:
        strategy = writer_queries.consumer_row(tx, experiment, str(row.config.get("strategy", "")))
        rejected = row.rejected_groups + (strategy.rejected_groups if strategy else 0)
        leased, done = row.leased_step, row.committed_step
        so_far = SO_FAR.fetch_all(tx, of=experiment, by=trainer, leased=leased, committed=done)
        totals = {int(number): int(groups) for number, groups, _ in so_far}
        delivered, committed = totals.get(leased, 0), totals.get(done, 0)
    newest = writer_queries.newest_policy(tx, experiment, trainer)
    published, last = newest[0] if newest else 0, row.committed_step if row is not None else 0
    return Backlog(planned - rejected - delivered, planned - rejected - committed, published, last)


SO_FAR = Statement(
    f"SELECT step, planned_groups_so_far, own_rows_so_far {_OF_TRAINER} "
    "AND (step = :leased OR step = :committed)"
)


def rejects_all(
    tx: Transaction, experiment: int, trainer: str, *, faults: Sequence[str], rows: int
) -> bool:
    """Return whether ``trainer``, or the strategy of its set, rejects all rows as faulty.

    Args:
        faults: beginnings of the reasons that count.
        rows: at least so many were rejected for them since the last row that was not.
    """
    row = writer_queries.consumer_row(tx, experiment, trainer)
    if row is None:
        return False
    strategy = str(row.config.get("strategy", ""))
    last_kept = {
        trainer: _LAST_LEASED.value(tx, of=experiment, by=trainer),
        strategy: _LAST_ANNOTATED.value(tx, of=experiment, by=strategy),
    }
    for name, after in last_kept.items():
        newest = _LAST_REJECTED.fetch_all(tx, of=experiment, by=name, most=rows)
        faulty = sum(at > (after or 0) and why.startswith(tuple(faults)) for why, at in newest)
        if faulty >= rows:
            return True
    return False


_LAST_LEASED = Statement(f"SELECT leased_at {_OF_TRAINER} ORDER BY step DESC LIMIT 1")
_LAST_ANNOTATED = Statement(
    "SELECT address >> 20 FROM annotation WHERE experiment = :of AND consumer = :by "
    "ORDER BY address DESC LIMIT 1"
)
_LAST_REJECTED = Statement(
    "SELECT reason, position FROM rejection WHERE experiment = :of AND consumer = :by "
    "ORDER BY address DESC LIMIT :most"
)


def first_undelivered(tx: Transaction, trainer: Reader) -> int:
    """Return the lowest address above everything that ``trainer`` was handed.

    Groups are handed out in the order of their addresses, but one that is too old is rejected
    before its turn: what was rejected says nothing of what lies below it.
    """
    return int(_LAST_HANDED.value(tx, **trainer._asdict()) or 0) + 1


_LAST_HANDED = Statement(
    "SELECT max(address) FROM delivery "
    "WHERE experiment = :experiment AND consumer = :name AND source = :source"
)


def weights_after(
    tx: Transaction, experiment: int, trainer: str, leased: store_rows.StepRow
) -> tuple[str, str] | None:
    """Return digest and place of the policy that was published after a step of ``trainer``.

    The first one since its commit: mostly that of the same transaction. Else the last before. Those
    of other trainers are passed over. None: none was.
    """
    committed = leased.committed_at or leased.leased_at
    mine = {"of": experiment, "by": trainer, "version": leased.step}
    rows = _PUBLISHED.fetch_all(tx, **mine, committed=committed)
    return rows[0] if rows else None


_PUBLISHED = Statement(
    "SELECT digest, uri FROM policy "
    f"WHERE experiment = :of AND version = :version AND {writer_queries.OF_NO_OTHER_TRAINER} "
    "ORDER BY position < :committed, abs(position - :committed) LIMIT 1"
)
