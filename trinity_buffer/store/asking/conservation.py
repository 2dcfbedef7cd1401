"""What became of everything, counted in the projections, and what is not there yet.

Each function needs one transaction. What an equation adds up to and what it adds are counted by
themselves, so that a row that is lost or there twice breaks it. Two numbers are differences: rows
that are ``leased`` are those handed out less the committed ones, and planned rollouts that are
``missing`` those planned less the stored ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import (
    ColumnElement,
    Executable,
    Integer,
    and_,
    bindparam,
    case,
    func,
    select,
)

from trinity_buffer.sizes import sizes
from trinity_buffer.store.queries import is_open, waiting_addresses
from trinity_buffer.store.rows import ConsumerRow, first_address, position_of
from trinity_buffer.store.tables import (
    annotation,
    batch,
    delivery,
    experience,
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


def recorded(tx: Transaction, experiment: int) -> int:
    """Return how many experiences are stored."""
    query = select(func.count()).select_from(experience)
    return _count(tx, query.where(experience.c.experiment == experiment))


def of_strategy(tx: Transaction, experiment: int, row: ConsumerRow) -> StrategyCounts:
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
        recorded(tx, experiment),
        _count(tx, unseen),
        _count(tx, still),
        _count(tx, distinct),
        dict(sorted(rejected.items())),
        _count(tx, select(func.count()).where(*annotated)),
    )


def of_trainer(tx: Transaction, experiment: int, row: ConsumerRow) -> TrainerCounts:
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


def of_plans(tx: Transaction, experiment: int) -> PlanCounts:
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
