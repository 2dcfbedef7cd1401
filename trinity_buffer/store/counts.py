"""How many rows are in which state: from the counters, and row by row from the projections.

The functions that take the `Numbers` of `counters` cost the same however long a run is. What
follows from other numbers is a difference there, so their terms always add up. The ``recount_``
functions, for `verify`, count the total and its terms by themselves, so that a row that is lost or
there twice breaks the equation; only two numbers are differences: rows that are ``leased`` (handed
out less committed) and planned rollouts that are ``missing`` (planned less stored). Each function
needs one transaction; where ``of`` is None it answers for all experiments at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Executable,
    Integer,
    Select,
    and_,
    bindparam,
    case,
    func,
    select,
)

from trinity_buffer.events import BatchPlanned, BatchSealed, PolicyPublished
from trinity_buffer.sizes import sizes
from trinity_buffer.store import counters
from trinity_buffer.store.counters import Numbers
from trinity_buffer.store.queries import config_of, is_open, newest_policy, waiting_addresses
from trinity_buffer.store.rows import ConsumerRow, first_address, position_of
from trinity_buffer.store.tables import (
    annotation,
    batch,
    configuration,
    consumer,
    delivery,
    event,
    experience,
    experiment,
    plan,
    rejection,
    step,
    waiting,
)
from trinity_buffer.store.transaction import Prepared, Transaction, among, has_row


@dataclass(frozen=True, slots=True)
class StrategyCounts:
    """Experiences as one annotation set sees them.

    Attributes:
        recorded: all that are stored.
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


def _count(tx: Transaction, query: Executable) -> int:
    return int(tx.execute(query).scalar_one() or 0)


def _recorded(tx: Transaction, experiment: int) -> int:
    """Return how many experiences are stored."""
    query = select(func.count()).select_from(experience)
    return _count(tx, query.where(experience.c.experiment == experiment))


def recount_strategy(tx: Transaction, experiment: int, row: ConsumerRow) -> StrategyCounts:
    """Count for one annotation set."""
    mine = (experience.c.experiment == experiment,)
    unseen = select(func.count()).where(
        *mine, experience.c.address >= first_address(row.cursor + 1), experience.c.refused.is_(None)
    )
    still = select(func.count()).where(
        waiting.c.experiment == experiment, waiting.c.consumer == row.name
    )
    annotated = (annotation.c.experiment == experiment, annotation.c.consumer == row.name)
    rejected = reasons(tx, experiment, row.name)
    for reason, count in refused(tx, experiment).items():
        rejected[reason] = rejected.get(reason, 0) + count
    distinct = select(func.count(annotation.c.experience.distinct())).where(*annotated)
    return StrategyCounts(
        row.name,
        _recorded(tx, experiment),
        _count(tx, unseen),
        _count(tx, still),
        _count(tx, distinct),
        dict(sorted(rejected.items())),
        _count(tx, select(func.count()).where(*annotated)),
    )


def recount_trainer(tx: Transaction, experiment: int, row: ConsumerRow) -> TrainerCounts:
    """Count for one trainer."""
    name, of = row.name, str(row.config.get("strategy", ""))
    in_set = (annotation.c.experiment == experiment, annotation.c.consumer == of)
    own = (
        delivery.c.experiment == experiment,
        delivery.c.consumer == name,
        delivery.c.source == "",  # rows of an expert's experiment are none of this set
    )
    held = has_row(
        *own,
        delivery.c.address == annotation.c.address,
    )
    left_out = has_row(
        rejection.c.experiment == experiment,
        rejection.c.consumer == name,
        rejection.c.address == annotation.c.address,
    )
    is_committed: ColumnElement[int] = case((delivery.c.step <= row.committed_step, 1), else_=0)
    handed_out = select(func.count(), func.sum(is_committed, type_=Integer)).where(*own)
    delivered, committed = tx.execute(handed_out).one()
    return TrainerCounts(
        name,
        of,
        _count(tx, select(func.count()).where(*in_set)),
        _count(tx, select(func.count()).where(*in_set, ~held, ~left_out)),
        int(delivered) - int(committed or 0),
        int(committed or 0),
        reasons(tx, experiment, name),
    )


def recount_plans(tx: Transaction, experiment: int) -> PlanCounts:
    """Count planned rollouts, and those of them that are stored."""
    ((planned, stored),) = _PLANS.rows(tx, of=experiment)
    return PlanCounts(int(planned or 0), int(stored or 0))


def _plans() -> Prepared:
    of_batch = and_(batch.c.experiment == plan.c.experiment, batch.c.batch == plan.c.batch)
    # A look at an index for each group: joined, every experience would be looked up again.
    runs = select(func.count(experience.c.run.distinct())).where(
        experience.c.experiment == plan.c.experiment,
        experience.c.batch == plan.c.batch,
        experience.c.task == plan.c.task,
        experience.c.run < batch.c.rollouts_per_group,
    )
    planned, stored = batch.c.rollouts_per_group, runs.scalar_subquery()
    query = select(func.sum(planned, type_=Integer), func.sum(stored, type_=Integer))
    of = plan.c.experiment == bindparam("of")
    return Prepared(query.select_from(plan.join(batch, of_batch)).where(of))


_PLANS = _plans()


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
"""The oldest ones: who waits is helped by the first few."""


def unseen(tx: Transaction, experiment: int, strategy: ConsumerRow | None) -> tuple[int, int]:
    """Return how many experiences a strategy has not seen, and the position of the first, or 0.

    Args:
        tx: a transaction.
        experiment: its key.
        strategy: None: of one that was never run, which is all of them.
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
    told = has_row(
        closed.c.experiment == experiment,
        *(closed.c[column.name] == column for column in rollout),
    )
    # All columns lie in the index of EIDs; else SQLite walks the whole experiment for each row.
    each = (
        select(func.min(experience.c.address).label("first"))
        .where(experience.c.experiment == turns, ~told)
        .group_by(*rollout)
        .subquery()
    )
    count, first = tx.execute(select(func.count(), func.min(each.c.first))).one()
    return int(count), position_of(int(first or 0))


def open_groups(
    tx: Transaction, experiment: int, strategy: ConsumerRow
) -> dict[str, dict[str, int]]:
    """Return batch -> task -> runs that are stored, of groups that a strategy has not decided.

    Both of what waits and of what it has not seen, up to some thousand rows of each: a strategy
    that has decided nothing since has committed nothing, however much it has read.
    """
    most = sizes().waiting_rows_per_page
    seen = waiting_addresses(
        tx, experiment, strategy.name, after=-1, up_to=strategy.cursor, limit=most
    )
    behind = experience.c.address >= first_address(strategy.cursor + 1)
    found: dict[str, dict[str, set[int]]] = {}
    for some in (
        (among(tx, experience.c.address, seen),),
        (behind, experience.c.refused.is_(None)),
    ):
        query = select(experience.c.batch, experience.c.task, experience.c.run)
        query = query.where(experience.c.experiment == experiment, *some)
        rows = tx.execute(query.order_by(experience.c.address).limit(most))
        for key, task, run in rows.all():
            found.setdefault(key, {}).setdefault(task, set()).add(int(run))
    return {key: {task: len(runs) for task, runs in some.items()} for key, some in found.items()}


class OpenBatch(NamedTuple):
    """A planned batch that is not sealed: its key, who makes it, and the position of its plan."""

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
    found = tx.execute(query).scalar()
    return None if found is None else int(found)


def first_row(tx: Transaction, experiment: int, annotation_set: str, start: int) -> int | None:
    """Return the position of the first annotation of a set from the address ``start`` on."""
    query = select(func.min(annotation.c.address)).where(
        annotation.c.experiment == experiment,
        annotation.c.consumer == annotation_set,
        annotation.c.address >= start,
    )
    found = tx.execute(query).scalar()
    return None if found is None else position_of(int(found))


class LogCounts(NamedTuple):
    """How long a log is, and when it was written, in microseconds since 1970."""

    events: int
    first_at: int | None
    last_at: int | None


class BatchCounts(NamedTuple):
    """Batches that were planned, and sealed; groups and rollouts of the planned ones."""

    planned: int
    sealed: int
    groups: int
    plans: PlanCounts


class PolicyCounts(NamedTuple):
    """Policies that were published, and the version of the last one, None before the first."""

    number: int
    newest: int | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """All experiences of an experiment.

    Attributes:
        lowest_version, highest_version: of the policies that generated some; None where no version
            is known.
        refused: reason -> how many were refused at the door for it.
    """

    number: int
    lowest_version: int | None
    highest_version: int | None
    refused: dict[str, int]


@dataclass(frozen=True, slots=True)
class TrainerTally:
    """What a trainer was handed, and how many planned groups that were; see `TrainerProgress`."""

    counts: TrainerCounts
    groups_delivered: int
    groups_committed: int


def logs(tx: Transaction, of: int | None = None, up_to: int | None = None) -> dict[int, LogCounts]:
    """Return experiment -> its log, up to a position."""
    mine = event.c.experiment == experiment.c.id
    mine = mine if up_to is None else and_(mine, event.c.position <= up_to)
    first = select(event.c.recorded_at).where(mine).order_by(event.c.position).limit(1)
    last = select(event.c.position).where(mine).order_by(event.c.position.desc()).limit(1)
    ended = select(event.c.recorded_at).where(mine).order_by(event.c.position.desc()).limit(1)
    ends = select(experiment.c.id, *(one.scalar_subquery() for one in (last, first, ended)))
    return {
        int(key): LogCounts(int(events or 0), begun, ended)
        for key, events, begun, ended in tx.execute(_of(ends, experiment.c.id, of)).all()
    }


def finished(tx: Transaction, of: int | None = None) -> dict[int, bool]:
    """Return experiment -> whether it is finished."""
    query = select(configuration.c.experiment, configuration.c.finished)
    rows = tx.execute(_of(query, configuration.c.experiment, of)).all()
    return {int(key): bool(done) for key, done in rows}


def batches(tx: Transaction, experiment_key: int, numbers: Numbers) -> BatchCounts:
    """Return the batches of an experiment; rollouts are counted now of those that are open."""
    opened = int(_STORED_OF_OPEN.value(tx, of=experiment_key) or 0)
    stored = numbers.get(("", counters.STORED_ROLLOUTS), 0) + opened
    return BatchCounts(
        numbers.get(("", BatchPlanned.__name__), 0),
        numbers.get(("", BatchSealed.__name__), 0),
        numbers.get(("", counters.PLANNED_GROUPS), 0),
        PlanCounts(numbers.get(("", counters.PLANNED_ROLLOUTS), 0), stored),
    )


_STORED_OF_OPEN = Prepared(
    select(func.sum(counters.stored_rollouts(), type_=Integer)).where(
        batch.c.experiment == bindparam("of"), *is_open()
    )
)


def policies(tx: Transaction, experiment_key: int, numbers: Numbers) -> PolicyCounts:
    """Return the published policies of an experiment."""
    config, _ = config_of(tx, experiment_key) or ({}, False)
    newest = newest_policy(tx, experiment_key, config.get("trainer", "trainer"))
    number = numbers.get(("", PolicyPublished.__name__), 0)
    return PolicyCounts(number, None if newest is None else newest[0])


def consumers(tx: Transaction, of: int | None = None) -> dict[int, list[ConsumerRow]]:
    """Return experiment -> its strategies and trainers, by name."""
    query = _of(select(consumer), consumer.c.experiment, of)
    found: dict[int, list[ConsumerRow]] = {}
    for key, *row in tx.execute(query.order_by(consumer.c.name)).all():
        found.setdefault(int(key), []).append(ConsumerRow(*row))
    return found


def _of(query: Select[*Any], column: ColumnElement[int], of: int | None) -> Select[*Any]:
    return query if of is None else query.where(column == of)


def recorded(numbers: Numbers) -> Recorded:
    """Return how many experiences are stored."""
    return Recorded(
        numbers.get(("", counters.RECORDED), 0),
        numbers.get(("", counters.LOWEST_VERSION)),
        numbers.get(("", counters.HIGHEST_VERSION)),
        counters.reasons(numbers, ""),
    )


def of_strategy(
    tx: Transaction, experiment_key: int, row: ConsumerRow, numbers: Numbers
) -> StrategyCounts:
    """Return the numbers of one annotation set; what waits is what nothing else became of."""
    stored = recorded(numbers)
    own, refused = counters.reasons(numbers, row.name), stored.refused
    annotated = numbers.get((row.name, counters.ANNOTATED), 0)
    undecided = stored.number - sum(refused.values()) - annotated - sum(own.values())
    unseen = undecided  # of one that has seen nothing
    if row.cursor:
        behind = first_address(row.cursor + 1)
        unseen = int(_UNSEEN.value(tx, of=experiment_key, start=behind))
    rejected = {reason: own.get(reason, 0) + refused.get(reason, 0) for reason in own | refused}
    return StrategyCounts(
        row.name,
        stored.number,
        unseen,
        undecided - unseen,
        annotated,
        dict(sorted(rejected.items())),
        numbers.get((row.name, counters.ROWS), 0),
    )


_UNSEEN = Prepared(
    select(func.count()).where(
        experience.c.experiment == bindparam("of"),
        experience.c.address >= bindparam("start"),
        experience.c.refused.is_(None),
    )
)


def of_trainer(
    tx: Transaction, experiment_key: int, row: ConsumerRow, numbers: Numbers
) -> TrainerTally:
    """Return the numbers of one trainer; ready is what lies above all that it was handed."""
    of, mine = str(row.config.get("strategy", "")), {"of": experiment_key, "by": row.name}
    so_far = _SO_FAR.rows(tx, **mine, leased=row.leased_step, committed=row.committed_step)
    handed = {number: (groups, own) for number, groups, own in so_far}
    groups_delivered, delivered = handed.get(row.leased_step, (0, 0))
    groups_committed, committed = handed.get(row.committed_step, (0, 0))
    rejected = counters.reasons(numbers, row.name)
    ready = numbers.get((of, counters.ROWS), 0)
    if last := _LAST_HANDED.value(tx, **mine):
        ready = int(_ROWS_FROM.value(tx, of=experiment_key, by=of, start=last + 1))
    all_rejected = sum(rejected.values())
    if all_rejected:
        ready -= int(
            _LEFT_OUT.value(tx, of=experiment_key, by=row.name, set=of, start=(last or 0) + 1)
        )
    rows = numbers.get((of, counters.ROWS), 0)
    leased = int(delivered) - int(committed)
    counts = TrainerCounts(row.name, of, rows, ready, leased, int(committed), rejected)
    return TrainerTally(counts, int(groups_delivered), int(groups_committed))


_STEP = (step.c.experiment == bindparam("of"), step.c.consumer == bindparam("by"))
_LAST_HANDED = Prepared(
    select(func.max(delivery.c.address)).where(
        delivery.c.experiment == bindparam("of"),
        delivery.c.consumer == bindparam("by"),
        delivery.c.source == "",
    )
)
_SO_FAR = Prepared(
    select(step.c.step, step.c.planned_groups_so_far, step.c.own_rows_so_far).where(
        *_STEP, (step.c.step == bindparam("leased")) | (step.c.step == bindparam("committed"))
    )
)
_ROWS_FROM = Prepared(
    select(func.count()).where(
        annotation.c.experiment == bindparam("of"),
        annotation.c.consumer == bindparam("by"),
        annotation.c.address >= bindparam("start"),
    )
)
# Rows of the set that a trainer rejected before their turn.
_LEFT_OUT = Prepared(
    select(func.count()).where(
        rejection.c.experiment == bindparam("of"),
        rejection.c.consumer == bindparam("by"),
        rejection.c.address >= bindparam("start"),
        has_row(
            annotation.c.experiment == rejection.c.experiment,
            annotation.c.consumer == bindparam("set"),
            annotation.c.address == rejection.c.address,
        ),
    )
)
