"""The numbers of `conservation` for people who ask often: at a cost that a run's length leaves be.

They come from `counters` and from what is left over: what follows from other numbers is not counted
again, so these always add up. `verify` counts each by itself. Each function needs one transaction;
where ``of`` is None it answers for all experiments at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Integer,
    Select,
    and_,
    bindparam,
    func,
    select,
)

from trinity_buffer.events import BatchPlanned, BatchSealed, PolicyPublished
from trinity_buffer.store import counters
from trinity_buffer.store.asking.conservation import PlanCounts, StrategyCounts, TrainerCounts
from trinity_buffer.store.counters import Numbers
from trinity_buffer.store.queries import config_of, is_open, newest_policy
from trinity_buffer.store.rows import ConsumerRow, first_address
from trinity_buffer.store.tables import (
    annotation,
    batch,
    configuration,
    consumer,
    delivery,
    event,
    experience,
    experiment,
    rejection,
    step,
)
from trinity_buffer.store.transaction import Prepared, Transaction, has_row


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
