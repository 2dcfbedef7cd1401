"""Which segments no trainer needs any more."""

from __future__ import annotations

from sqlalchemy import and_, select

from trinity_buffer.store.tables import (
    annotation,
    archived,
    consumer,
    delivery,
    experience,
    rejection,
)
from trinity_buffer.store.transaction import Transaction


def finished_segments(
    tx: Transaction, experiment: int, *, keep_steps: int, after: int, limit: int
) -> tuple[int, list[bytes]] | None:
    """Return (where to go on, keys) of segments all of whose experiences are done with.

    Looks at up to ``limit`` rows behind address ``after``, at more where one segment has more.
    None: there are no more. Without any trainer nothing is done with.
    """
    gone = select(archived.c.segment).where(archived.c.experiment == experiment)
    query = (
        select(experience.c.segment, experience.c.address, experience.c.refused)
        .where(experience.c.experiment == experiment, experience.c.address > after)
        .where(experience.c.segment.not_in(gone))
        .order_by(experience.c.address)
        .limit(limit)
    )
    rows = tx.execute(query).all()
    if not rows:
        return None
    members: dict[bytes, set[int]] = {}
    for row in rows:
        members.setdefault(bytes(row.segment), set())
        if row.refused is None:
            members[bytes(row.segment)].add(int(row.address))
    whole = list(members)
    if len(rows) == limit:
        if len(whole) == 1:
            return finished_segments(
                tx, experiment, keep_steps=keep_steps, after=after, limit=2 * limit
            )
        whole.pop()  # its other rows are on the next page
    last = max(int(row.address) for row in rows if bytes(row.segment) in set(whole))
    done = _done(tx, experiment, keep_steps, after, last)
    return last, [key for key in whole if done is not None and members[key] <= done]


def _done(
    tx: Transaction, experiment: int, keep_steps: int, after: int, last: int
) -> set[int] | None:
    """Return those in (after, last] that every trainer has done with; None: no trainer."""
    query = select(consumer.c.name, consumer.c.config, consumer.c.committed_step).where(
        consumer.c.experiment == experiment, consumer.c.kind == "trainer"
    )
    done: set[int] | None = None
    for name, config, committed in tx.execute(query).all():
        mine = _done_by(
            tx, experiment, name, config["strategy"], committed - keep_steps, (after, last)
        )
        done = mine if done is None else done & mine
    return done


def _done_by(
    tx: Transaction, experiment: int, trainer: str, name: str, horizon: int, span: tuple[int, int]
) -> set[int]:
    after, last = span
    of_set = (
        annotation.c.experiment == experiment,
        annotation.c.consumer == name,
        annotation.c.experience > after,
        annotation.c.experience <= last,
    )
    held = and_(
        delivery.c.experiment == annotation.c.experiment,
        delivery.c.consumer == trainer,
        delivery.c.address == annotation.c.address,
        delivery.c.step <= horizon,
    )
    left_out = and_(
        rejection.c.experiment == annotation.c.experiment,
        rejection.c.consumer == trainer,
        rejection.c.address == annotation.c.address,
    )
    pending = (
        select(annotation.c.experience)
        .outerjoin(delivery, held)
        .outerjoin(rejection, left_out)
        .where(*of_set, delivery.c.address.is_(None), rejection.c.address.is_(None))
    )
    annotated = set(tx.execute(select(annotation.c.experience).where(*of_set)).scalars())
    waiting = set(tx.execute(pending).scalars())
    decided = select(rejection.c.address).where(
        rejection.c.experiment == experiment,
        rejection.c.consumer == name,
        rejection.c.address > after,
        rejection.c.address <= last,
    )
    rejected = set(tx.execute(decided).scalars())
    return {int(address) for address in (annotated - waiting) | rejected}
