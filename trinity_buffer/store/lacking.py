"""What is not there yet: undecided experiences, runs that groups lack, rows that nobody trained."""

from __future__ import annotations

from sqlalchemy import and_, func, select

from trinity_buffer.sizes import sizes
from trinity_buffer.store.address import first_address, position_of
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.tables import annotation, batch, experience, step, waiting
from trinity_buffer.store.transaction import Transaction

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


def open_groups(
    tx: Transaction, experiment: int, strategy: ConsumerRow
) -> dict[str, dict[str, int]]:
    """Return batch -> task -> runs that are stored, of groups that a strategy has not decided.

    Both of what waits and of what it has not seen, up to some thousand rows of each: a strategy
    that has decided nothing since has committed nothing, however much it has read.
    """
    most = sizes().waiting_rows_per_page
    seen = select(waiting.c.address).where(
        waiting.c.experiment == experiment, waiting.c.consumer == strategy.name
    )
    behind = select(experience.c.address).where(
        experience.c.experiment == experiment,
        experience.c.address >= first_address(strategy.cursor + 1),
        experience.c.refused.is_(None),
    )
    found: dict[str, dict[str, set[int]]] = {}
    for addresses, column in ((seen, waiting.c.address), (behind, experience.c.address)):
        rows = addresses.order_by(column).limit(most).subquery()
        of_row = and_(experience.c.experiment == experiment, experience.c.address == rows.c.address)
        query = select(experience.c.batch, experience.c.task, experience.c.run)
        for key, task, run in tx.execute(query.select_from(rows.join(experience, of_row))).all():
            found.setdefault(key, {}).setdefault(task, set()).add(int(run))
    return {key: {task: len(runs) for task, runs in some.items()} for key, some in found.items()}


def unsealed_batches(tx: Transaction, experiment: int) -> list[str]:
    """Return the oldest batches that are planned and not sealed."""
    query = select(batch.c.batch).where(
        batch.c.experiment == experiment,
        batch.c.planned_at.is_not(None),
        batch.c.sealed_at.is_(None),
    )
    return list(tx.execute(query.order_by(batch.c.planned_at).limit(BATCHES_LOOKED_AT)).scalars())


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
