"""Numbers of rows by state, mostly from the counters: they cost the same however long a run is.

Some terms are differences, so that their sums always hold. `verify` counts total and terms
independently, from the events alone, so that a row that is lost or duplicated breaks the equation.
Each function needs one transaction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from trinity_buffer.limits import sizes
from trinity_buffer.store import counters, writer_queries
from trinity_buffer.store.counters import Numbers
from trinity_buffer.store.rows import ConsumerRow, first_address, position_of
from trinity_buffer.store.trainer_queries import SO_FAR, Reader, first_undelivered
from trinity_buffer.store.transaction import Statement, Transaction


@dataclass(frozen=True, slots=True)
class StrategyCounts:
    """Experiences as one annotation set sees them.

    Attributes:
        recorded: all stored experiences.
        unseen: beyond the cursor.
        waiting: seen and undecided.
        annotated: with at least one annotation; `rows` counts copies too.
        rejected: by reason, what was refused at the door included.
    """

    consumer: str
    recorded: int
    unseen: int
    waiting: int
    annotated: int
    rejected: dict[str, int]
    rows: int

    @property
    def holds(self) -> bool:
        """Whether nothing is missing and nothing is there twice."""
        parts = self.unseen + self.waiting + self.annotated + sum(self.rejected.values())
        return self.recorded == parts


@dataclass(frozen=True, slots=True)
class TrainerCounts:
    """Annotation rows of one set as one trainer sees them, on the live line.

    Attributes:
        rows: of the set.
        ready: neither handed out nor rejected.
        leased: handed out and not committed.
        committed: in a committed step.
        rejected: by reason.
    """

    consumer: str
    annotation_set: str
    rows: int
    ready: int
    leased: int
    committed: int
    rejected: dict[str, int]

    @property
    def holds(self) -> bool:
        """Whether nothing is missing and nothing is there twice."""
        parts = self.ready + self.leased + self.committed + sum(self.rejected.values())
        return self.rows == parts


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """Planned rollouts, (batch, task, run) each."""

    planned: int
    stored: int

    @property
    def missing(self) -> int:
        """How many are still to be generated."""
        return self.planned - self.stored


def of_plans(tx: Transaction, experiment: int, numbers: Numbers) -> PlanCounts:
    """Return the planned rollouts; only those of open batches are counted anew."""
    in_open = int(_STORED_OF_OPEN.value(tx, of=experiment) or 0)
    stored = numbers.get(("", counters.STORED_ROLLOUTS), 0) + in_open
    return PlanCounts(numbers.get(("", counters.PLANNED_ROLLOUTS), 0), stored)


_STORED_OF_OPEN = Statement(
    f"SELECT sum({counters.STORED}) FROM batch WHERE experiment = :of AND {writer_queries.IS_OPEN}"
)


def of_strategy(
    tx: Transaction, experiment: int, row: ConsumerRow, numbers: Numbers
) -> StrategyCounts:
    """Return the counts of one annotation set; the rest of the experiences is waiting."""
    recorded = numbers.get(("", counters.RECORDED), 0)
    annotated, rows = (numbers.get((row.name, of), 0) for of in (counters.ANNOTATED, counters.ROWS))
    rejected = sum((Counter(counters.reasons(numbers, by)) for by in ("", row.name)), Counter())
    undecided = recorded - annotated - rejected.total()
    # The counters know nothing of cursors. One that has read nothing has seen none.
    behind = unseen(tx, experiment, row)[0] if row.cursor else undecided
    parts = (recorded, behind, undecided - behind, annotated)
    return StrategyCounts(row.name, *parts, dict(sorted(rejected.items())), rows)


_UNSEEN = Statement(
    "SELECT count(*), min(address) FROM experience "
    "WHERE experiment = :of AND address >= :start AND refused IS NULL"
)


def of_trainer(
    tx: Transaction, experiment: int, row: ConsumerRow, numbers: Numbers
) -> TrainerCounts:
    """Return the counts of one trainer; rows above the last one that was handed out are ready."""
    of, mine = str(row.config.get("strategy", "")), {"of": experiment, "by": row.name}
    so_far = SO_FAR.fetch_all(tx, **mine, leased=row.leased_step, committed=row.committed_step)
    handed = {number: int(own) for number, _, own in so_far}
    delivered, committed = handed.get(row.leased_step, 0), handed.get(row.committed_step, 0)
    rejected = counters.reasons(numbers, row.name)
    # All are ready until one was handed out.
    rows = ready = numbers.get((of, counters.ROWS), 0)
    start = first_undelivered(tx, Reader(experiment, row.name, "", row.name))
    if start > 1:
        # Rows are handed out in order of their addresses.
        ready = _ROWS_FROM.value(tx, of=experiment, by=of, start=start)
    # Rejected rows above the last that was handed out are not ready either.
    if any(rejected.values()):
        ready -= _LEFT_OUT.value(tx, **mine, set=of, start=start)
    return TrainerCounts(row.name, of, rows, ready, delivered - committed, committed, rejected)


_ANNOTATIONS = "FROM annotation WHERE experiment = :of AND consumer = :by AND address >= :start"
_ROWS_FROM = Statement(f"SELECT count(*) {_ANNOTATIONS}")
# Rows of the set that a trainer rejected before their turn.
_LEFT_OUT = Statement(
    "SELECT count(*) FROM rejection r WHERE r.experiment = :of AND r.consumer = :by "
    "AND r.address >= :start AND EXISTS (SELECT 1 FROM annotation a "
    "WHERE a.experiment = r.experiment AND a.consumer = :set AND a.address = r.address OFFSET 0)"
)


BATCHES_LOOKED_AT = 64
"""Only the oldest ones: the first few are what a waiting process needs to see."""


def unseen(tx: Transaction, experiment: int, strategy: ConsumerRow | None) -> tuple[int, int]:
    """Return how many experiences a strategy has not seen, and the position of the first, or 0.

    Args:
        tx: a transaction.
        experiment: its key.
        strategy: None for one that never ran, which has seen none.
    """
    behind = first_address(1 if strategy is None else strategy.cursor + 1)
    ((count, first),) = _UNSEEN.fetch_all(tx, of=experiment, start=behind)
    return int(count), position_of(int(first or 0))


def unrewarded(tx: Transaction, turns: int, experiment: int) -> tuple[int, int]:
    """Return how many rollouts of ``turns`` are not in ``experiment``, and the first's position."""
    ((count, first),) = _UNREWARDED.fetch_all(tx, turns=turns, of=experiment)
    return int(count), position_of(int(first or 0))


# All columns lie in the index of EIDs; else SQLite walks the whole experiment for each row.
_UNREWARDED = Statement(
    "SELECT count(*), min(first) FROM (SELECT min(e.address) AS first FROM experience e "
    "WHERE e.experiment = :turns AND NOT EXISTS (SELECT 1 FROM experience closed "
    "WHERE closed.experiment = :of AND closed.batch = e.batch AND closed.task = e.task "
    "AND closed.run = e.run OFFSET 0) GROUP BY e.batch, e.task, e.run) AS each_rollout"
)


def open_groups(tx: Transaction, experiment: int, row: ConsumerRow) -> dict[str, dict[str, int]]:
    """Return batch -> task -> stored runs, of groups that a strategy has not decided.

    Of waiting and of unseen rows, up to some thousand each: a strategy that has decided nothing
    has not moved its cursor, however much it has read.
    """
    most, up_to = sizes.waiting_rows_per_page, row.cursor
    mine, behind = (tx, experiment), first_address(up_to + 1) - 1
    seen = writer_queries.waiting_addresses(*mine, row.name, after=-1, up_to=up_to, limit=most)
    rows = writer_queries.experience_rows(*mine, seen)
    rows += writer_queries.experiences(*mine, writer_queries.Filter(), after=behind, limit=most)
    runs_of: dict[str, dict[str, set[int]]] = {}
    for eid in (experience.eid for experience in rows):
        runs_of.setdefault(str(eid.batch), {}).setdefault(str(eid.task), set()).add(eid.run)
    return {key: {task: len(runs) for task, runs in own.items()} for key, own in runs_of.items()}


class OpenBatch(NamedTuple):
    """A planned batch that is not sealed: its key, its actor, and the position of its plan."""

    key: str
    actor: str
    planned_at: int


def open_batches(
    tx: Transaction, experiment: int, most: int = BATCHES_LOOKED_AT
) -> list[OpenBatch]:
    """Return the oldest batches that are planned and not sealed, up to ``most``."""
    rows = _OPEN_BATCHES.fetch_all(tx, of=experiment, most=most)
    return list(map(OpenBatch._make, rows))


ALL = 1 << 31
"""For a question that has to know of every batch."""


_OPEN_BATCHES = Statement(
    "SELECT batch, actor, planned_at FROM batch WHERE experiment = :of "
    f"AND {writer_queries.IS_OPEN} ORDER BY planned_at LIMIT :most"
)


def first_row(tx: Transaction, experiment: int, annotation_set: str, start: int) -> int | None:
    """Return the position of the first annotation of a set from the address ``start`` on."""
    address = _FIRST_ROW.value(tx, of=experiment, by=annotation_set, start=start)
    return None if address is None else position_of(int(address))


_FIRST_ROW = Statement(f"SELECT min(address) {_ANNOTATIONS}")
