"""The numbers of `conservation` for people who ask often: at a fraction of its cost.

What follows from other numbers is not counted again, so these always add up: `verify` counts each
by itself. Each function needs one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Integer, and_, bindparam, case, exists, func, literal, select

from trinity_buffer.store import conservation
from trinity_buffer.store.conservation import StrategyCounts, TrainerCounts
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.tables import annotation, delivery, experience, rejection, step, waiting
from trinity_buffer.store.trainer_queries import Reader, first_undelivered
from trinity_buffer.store.transaction import Prepared, Transaction


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


def recorded(tx: Transaction, experiment: int) -> Recorded:
    """Return how many experiences are stored, in one look at them."""
    ((number, low, high, refused),) = _RECORDED.rows(tx, of=experiment)
    return Recorded(number, low, high, conservation.refused(tx, experiment) if refused else {})


_VERSION = experience.c.policy_version
_RECORDED = Prepared(
    select(
        func.count(), func.min(_VERSION), func.max(_VERSION), func.count(experience.c.refused)
    ).where(experience.c.experiment == bindparam("of"))
)


def of_strategies(
    tx: Transaction, experiment: int, rows: Sequence[ConsumerRow], stored: Recorded
) -> tuple[StrategyCounts, ...]:
    """Return the numbers of annotation sets; what was annotated is what nothing else became of."""
    return tuple(_of_strategy(tx, experiment, row, stored) for row in rows)


def _of_strategy(
    tx: Transaction, experiment: int, row: ConsumerRow, stored: Recorded
) -> StrategyCounts:
    unseen, _ = conservation.unseen(tx, experiment, row)
    still = select(func.count()).where(
        waiting.c.experiment == experiment, waiting.c.consumer == row.name
    )
    left = int(tx.execute(still).scalar_one())
    rejected = conservation.reasons(tx, experiment, row.name)
    for reason, count in stored.refused.items():
        rejected[reason] = rejected.get(reason, 0) + count
    return StrategyCounts(
        row.name,
        stored.number,
        unseen,
        left,
        stored.number - unseen - left - sum(rejected.values()),
        dict(sorted(rejected.items())),
        _rows(tx, experiment, row.name),
    )


def of_trainer(tx: Transaction, experiment: int, row: ConsumerRow) -> TrainerCounts:
    """Return the numbers of one trainer; ready is what lies above all that it was handed."""
    of = str(row.config.get("strategy", ""))
    delivered, committed = _delivered(tx, experiment, row)
    start = first_undelivered(tx, Reader(experiment, row.name, "", row.name))
    above = _rows(tx, experiment, of, start)
    rejected = conservation.reasons(tx, experiment, row.name)
    all_rejected = sum(rejected.values())
    ready = above - (_left_out(tx, experiment, row, of, start) if all_rejected else 0)
    return TrainerCounts(
        row.name,
        of,
        delivered + ready + all_rejected,
        ready,
        delivered - committed,
        committed,
        rejected,
    )


def _rows(tx: Transaction, experiment: int, annotation_set: str, start: int = 0) -> int:
    query = select(func.count()).where(
        annotation.c.experiment == experiment,
        annotation.c.consumer == annotation_set,
        annotation.c.address >= start,
    )
    return int(tx.execute(query).scalar_one())


def _left_out(
    tx: Transaction, experiment: int, row: ConsumerRow, annotation_set: str, start: int
) -> int:
    """Return how many rows of the set from ``start`` on a trainer rejected before their turn."""
    query = select(func.count()).where(
        rejection.c.experiment == experiment,
        rejection.c.consumer == row.name,
        rejection.c.address >= start,
        exists().where(
            annotation.c.experiment == experiment,
            annotation.c.consumer == annotation_set,
            annotation.c.address == rejection.c.address,
        ),
    )
    return int(tx.execute(query).scalar_one())


def _delivered(tx: Transaction, experiment: int, row: ConsumerRow) -> tuple[int, int]:
    """Return how many rows of its own experiment a trainer was handed, and how many it committed.

    Steps say how many rows they have; of which experiment, a mixing trainer's deliveries alone.
    """
    own = and_(delivery.c.experiment == experiment, delivery.c.consumer == row.name)
    of_others = select(exists().where(own, delivery.c.source > ""))
    rows: ColumnElement[int]
    if tx.execute(of_others).scalar():
        rows, number = literal(1), delivery.c.step
        of = and_(own, delivery.c.source == "")
    else:
        rows, number = step.c.rows, step.c.step
        of = and_(step.c.experiment == experiment, step.c.consumer == row.name)
    committed = case((number <= row.committed_step, rows), else_=0)
    query = select(func.sum(rows, type_=Integer), func.sum(committed, type_=Integer)).where(of)
    delivered, done = tx.execute(query).one()
    return int(delivered or 0), int(done or 0)
