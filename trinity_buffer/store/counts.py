"""Numbers of rows by state: from the counters, and row by row from the projections.

The functions that take the `Numbers` of `counters` cost the same however long a run is. They derive
some terms as differences, so their sums always hold. The ``recount_`` functions, for `verify`,
count total and terms independently, so that a row that is lost or duplicated breaks the equation;
only two numbers are differences: rows that are ``leased`` (handed out less committed) and planned
rollouts that are ``missing`` (planned less stored). Each function needs one transaction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import and_, case, func, select

from trinity_buffer.limits import sizes
from trinity_buffer.store import counters, log
from trinity_buffer.store.counters import Numbers
from trinity_buffer.store.rows import ConsumerRow, first_address, position_of
from trinity_buffer.store.tables import (
    annotation,
    batch,
    delivery,
    experience,
    rejection,
    step,
    waiting,
)
from trinity_buffer.store.transaction import Statement, Transaction, has_row, in_list
from trinity_buffer.store.writer_queries import is_open, waiting_addresses


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


LogEnds = tuple[int, float | None, float | None]
"""The last position of a log that counts, and when its first and that event were recorded."""


def log_ends(tx: Transaction, experiment: int, up_to: int | None = None) -> LogEnds:
    """Return the ends of a log, up to a position; times in seconds since 1970."""
    head = log.head(tx, experiment) if up_to is None else up_to
    times = {at: us / 1e6 for at, us in _ENDS.fetch_all(tx, of=experiment, last=head)}
    return head, times.get(1), times.get(head)


_ENDS = Statement(
    "SELECT position, recorded_at FROM event "
    "WHERE experiment = :of AND (position = 1 OR position = :last)"
)


def of_plans(tx: Transaction, experiment: int, numbers: Numbers) -> PlanCounts:
    """Return the planned rollouts; only those of open batches are counted anew."""
    in_open = int(_STORED_OF_OPEN.value(tx, of=experiment) or 0)
    stored = numbers.get(("", counters.STORED_ROLLOUTS), 0) + in_open
    return PlanCounts(numbers.get(("", counters.PLANNED_ROLLOUTS), 0), stored)


_STORED_OF_OPEN = Statement(
    f"SELECT sum({counters.STORED}) FROM batch "
    "WHERE experiment = :of AND planned_at > 0 AND sealed_at IS NULL"
)


def of_strategy(
    tx: Transaction, experiment: int, row: ConsumerRow, numbers: Numbers
) -> StrategyCounts:
    """Return the counts of one annotation set; the rest of the experiences is waiting."""
    recorded, refused = numbers.get(("", counters.RECORDED), 0), counters.reasons(numbers, "")
    annotated, own = (
        numbers.get((row.name, counters.ANNOTATED), 0),
        counters.reasons(numbers, row.name),
    )
    rejected = Counter(own) + Counter(refused)
    undecided = recorded - annotated - rejected.total()
    # The counters know nothing of cursors.
    unseen = undecided  # of one that has read nothing
    if row.cursor:
        behind = first_address(row.cursor + 1)
        unseen = int(_UNSEEN.value(tx, of=experiment, start=behind))
    return StrategyCounts(
        row.name,
        recorded,
        unseen,
        undecided - unseen,
        annotated,
        dict(sorted(rejected.items())),
        numbers.get((row.name, counters.ROWS), 0),
    )


_UNSEEN = Statement(
    "SELECT count(*) FROM experience "
    "WHERE experiment = :of AND address >= :start AND refused IS NULL"
)


def of_trainer(
    tx: Transaction, experiment: int, row: ConsumerRow, numbers: Numbers
) -> tuple[TrainerCounts, int, int]:
    """Return the counts of one trainer, and how many planned groups were handed out and committed.

    Rows above the last one that was handed out are ready.
    """
    of, mine = str(row.config.get("strategy", "")), {"of": experiment, "by": row.name}
    so_far = _SO_FAR.fetch_all(tx, **mine, leased=row.leased_step, committed=row.committed_step)
    handed = {number: (groups, own) for number, groups, own in so_far}
    groups_delivered, delivered = handed.get(row.leased_step, (0, 0))
    groups_committed, committed = handed.get(row.committed_step, (0, 0))
    rejected = counters.reasons(numbers, row.name)
    # All are ready until one was handed out.
    rows = ready = numbers.get((of, counters.ROWS), 0)
    last = _LAST_HANDED.value(tx, **mine)
    if last:
        # Rows are handed out in order of their addresses.
        ready = int(_ROWS_FROM.value(tx, of=experiment, by=of, start=last + 1))
    # Rejected rows above the last that was handed out are not ready either.
    if any(rejected.values()):
        ready -= int(_LEFT_OUT.value(tx, of=experiment, by=row.name, set=of, start=(last or 0) + 1))
    leased = int(delivered) - int(committed)
    terms = TrainerCounts(row.name, of, rows, ready, leased, int(committed), rejected)
    return terms, int(groups_delivered), int(groups_committed)


_LAST_HANDED = Statement(
    "SELECT max(address) FROM delivery WHERE experiment = :of AND consumer = :by AND source = ''"
)
_SO_FAR = Statement(
    "SELECT step, planned_groups_so_far, own_rows_so_far FROM step "
    "WHERE experiment = :of AND consumer = :by AND (step = :leased OR step = :committed)"
)
_ROWS_FROM = Statement(
    "SELECT count(*) FROM annotation "
    "WHERE experiment = :of AND consumer = :by AND address >= :start"
)
# Rows of the set that a trainer rejected before their turn.
_LEFT_OUT = Statement(
    "SELECT count(*) FROM rejection r WHERE r.experiment = :of AND r.consumer = :by "
    "AND r.address >= :start AND EXISTS (SELECT 1 FROM annotation a "
    "WHERE a.experiment = r.experiment AND a.consumer = :set AND a.address = r.address OFFSET 0)"
)


def recount_strategy(tx: Transaction, experiment: int, row: ConsumerRow) -> StrategyCounts:
    """Count the rows of one annotation set."""
    # What was refused no strategy ever sees.
    is_unseen = (
        experience.c.address >= first_address(row.cursor + 1),
        experience.c.refused.is_(None),
    )
    stored = select(func.count(), func.count(case((and_(*is_unseen), 1))))
    recorded, unseen = tx.execute(stored.where(experience.c.experiment == experiment)).one()
    still = select(func.count()).where(
        waiting.c.experiment == experiment, waiting.c.consumer == row.name
    )
    noted = select(func.count(), func.count(annotation.c.experience.distinct())).where(
        annotation.c.experiment == experiment, annotation.c.consumer == row.name
    )
    rows, annotated = tx.execute(noted).one()
    waits = int(tx.execute(still).scalar_one())
    rejected = Counter(reasons(tx, experiment, row.name)) + Counter(refused(tx, experiment))
    parts = (int(recorded), int(unseen), waits, int(annotated))
    return StrategyCounts(row.name, *parts, dict(sorted(rejected.items())), int(rows))


def recount_trainer(tx: Transaction, experiment: int, row: ConsumerRow) -> TrainerCounts:
    """Count the rows of one trainer."""
    name, of = row.name, str(row.config.get("strategy", ""))
    own = (
        delivery.c.experiment == experiment,
        delivery.c.consumer == name,
        delivery.c.source == "",  # an expert's rows are not of this set
    )
    is_held = has_row(*own, delivery.c.address == annotation.c.address)
    is_left_out = has_row(
        rejection.c.experiment == experiment,
        rejection.c.consumer == name,
        rejection.c.address == annotation.c.address,
    )
    in_set = select(func.count(), func.count(case((and_(~is_held, ~is_left_out), 1)))).where(
        annotation.c.experiment == experiment, annotation.c.consumer == of
    )
    is_committed = case((delivery.c.step <= row.committed_step, 1))
    handed_out = select(func.count(), func.count(is_committed)).where(*own)
    rows, ready = map(int, tx.execute(in_set).one())
    delivered, committed = map(int, tx.execute(handed_out).one())
    rejected = reasons(tx, experiment, name)
    return TrainerCounts(name, of, rows, ready, delivered - committed, committed, rejected)


def recount_plans(tx: Transaction, experiment: int) -> PlanCounts:
    """Count planned rollouts, and those of them that are stored."""
    ((planned, stored),) = _PLANS.fetch_all(tx, of=experiment)
    return PlanCounts(int(planned or 0), int(stored or 0))


_PLANS = Statement(
    "SELECT sum(rollouts_per_group * (SELECT count(*) FROM plan p "
    "WHERE p.experiment = batch.experiment AND p.batch = batch.batch)), "
    f"sum({counters.STORED}) FROM batch WHERE experiment = :of"
)


def reasons(tx: Transaction, experiment: int, name: str) -> dict[str, int]:
    """Return reason -> how many experiences (of a trainer: rows) a consumer rejected for it."""
    query = select(rejection.c.reason, func.count()).where(
        rejection.c.experiment == experiment, rejection.c.consumer == name
    )
    query = query.group_by(rejection.c.reason).order_by(rejection.c.reason)
    return {reason: int(count) for reason, count in tx.execute(query).all()}


def refused(tx: Transaction, experiment: int) -> dict[str, int]:
    """Return reason -> how many experiences were refused at the door for it."""
    query = select(experience.c.refused, func.count()).where(
        experience.c.experiment == experiment, experience.c.refused.is_not(None)
    )
    query = query.group_by(experience.c.refused)
    return {reason: int(count) for reason, count in tx.execute(query).all()}


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
    query = select(func.count(), func.min(experience.c.address)).where(
        experience.c.experiment == experiment,
        experience.c.address >= behind,
        experience.c.refused.is_(None),
    )
    count, first = tx.execute(query).one()
    return int(count), position_of(int(first or 0))


def unrewarded(tx: Transaction, turns: int, experiment: int) -> tuple[int, int]:
    """Return how many rollouts of ``turns`` are not in ``experiment``, and the first's position."""
    rollout = (experience.c.batch, experience.c.task, experience.c.run)
    closed = experience.alias()
    is_closed = has_row(
        closed.c.experiment == experiment, *(closed.c[column.name] == column for column in rollout)
    )
    # All columns lie in the index of EIDs; else SQLite walks the whole experiment for each row.
    each = (
        select(func.min(experience.c.address).label("first"))
        .where(experience.c.experiment == turns, ~is_closed)
        .group_by(*rollout)
        .subquery()
    )
    count, first = tx.execute(select(func.count(), func.min(each.c.first))).one()
    return int(count), position_of(int(first or 0))


def open_groups(
    tx: Transaction, experiment: int, strategy: ConsumerRow
) -> dict[str, dict[str, int]]:
    """Return batch -> task -> stored runs, of groups that a strategy has not decided.

    Of waiting and of unseen rows, up to some thousand each: a strategy that has decided nothing
    has not moved its cursor, however much it has read.
    """
    most = sizes().waiting_rows_per_page
    seen = waiting_addresses(
        tx, experiment, strategy.name, after=-1, up_to=strategy.cursor, limit=most
    )
    behind = experience.c.address >= first_address(strategy.cursor + 1)
    runs_of: dict[str, dict[str, set[int]]] = {}
    for condition in (
        (in_list(tx, experience.c.address, seen),),
        (behind, experience.c.refused.is_(None)),
    ):
        query = select(experience.c.batch, experience.c.task, experience.c.run)
        query = query.where(experience.c.experiment == experiment, *condition)
        rows = tx.execute(query.order_by(experience.c.address).limit(most))
        for key, task, run in rows.all():
            runs_of.setdefault(key, {}).setdefault(task, set()).add(int(run))
    return {key: {task: len(runs) for task, runs in own.items()} for key, own in runs_of.items()}


class OpenBatch(NamedTuple):
    """A planned batch that is not sealed: its key, its actor, and the position of its plan."""

    key: str
    actor: str
    planned_at: int


def open_batches(tx: Transaction, experiment: int) -> list[OpenBatch]:
    """Return the oldest batches that are planned and not sealed."""
    query = select(batch.c.batch, batch.c.actor, batch.c.planned_at).where(
        batch.c.experiment == experiment, *is_open()
    )
    rows = tx.execute(query.order_by(batch.c.planned_at).limit(BATCHES_LOOKED_AT)).all()
    return [OpenBatch(key, actor, int(planned_at)) for key, actor, planned_at in rows]


def first_uncommitted(tx: Transaction, experiment: int, trainer: ConsumerRow) -> int | None:
    """Return the position where the first uncommitted step of a trainer was leased, or None."""
    query = select(func.min(step.c.leased_at)).where(
        step.c.experiment == experiment,
        step.c.consumer == trainer.name,
        step.c.step > trainer.committed_step,
    )
    position = tx.execute(query).scalar()
    return None if position is None else int(position)


def first_row(tx: Transaction, experiment: int, annotation_set: str, start: int) -> int | None:
    """Return the position of the first annotation of a set from the address ``start`` on."""
    query = select(func.min(annotation.c.address)).where(
        annotation.c.experiment == experiment,
        annotation.c.consumer == annotation_set,
        annotation.c.address >= start,
    )
    address = tx.execute(query).scalar()
    return None if address is None else position_of(int(address))
