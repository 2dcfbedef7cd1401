"""The statements that keep what is known of steps, and of the trainer that takes them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Text, bindparam, case, func, insert, select, update

from trinity_buffer.store.tables import consumer, step
from trinity_buffer.store.transaction import Prepared

OF_CONSUMER = (consumer.c.experiment == bindparam("of"), consumer.c.name == bindparam("by"))
_OF_STEP = (step.c.experiment == bindparam("of"), step.c.consumer == bindparam("by"))
_BEFORE = (*_OF_STEP, step.c.step == bindparam("before"))


def _so_far(column: ColumnElement[int], more: str) -> ColumnElement[int]:
    return func.coalesce(select(column).where(*_BEFORE).scalar_subquery(), 0) + bindparam(more)


STEP = Prepared(
    insert(step).values(
        experiment=bindparam("of"),
        consumer=bindparam("by"),
        step=bindparam("number"),
        leased_at=bindparam("position"),
        rows=bindparam("rows"),
        groups=bindparam("groups"),
        planned_groups_so_far=_so_far(step.c.planned_groups_so_far, "planned"),
        manifest_digest=bindparam("digest"),
        own_rows_so_far=_so_far(step.c.own_rows_so_far, "own"),
    )
)
HANDED_OUT = Prepared(
    update(consumer)
    .where(*OF_CONSUMER)
    .values(leased_step=bindparam("number"), token=bindparam("fence"))
)


def _done() -> Prepared:
    """Return what commits all steps that are not, up to the last; it names the checkpoint."""
    live = select(consumer.c.committed_step).where(*OF_CONSUMER).scalar_subquery()
    said: dict[str, Any] = {
        name: case((step.c.step == bindparam("last"), bindparam(name, type_=column.type)))
        for name, column in (
            ("checkpoint", step.c.checkpoint),
            ("checkpoint_digest", step.c.checkpoint_digest),
            ("chain", step.c.chain),
        )
    }
    text_of_rows = bindparam("rows_by_rank", type_=Text())
    said["rows_by_rank"] = case((step.c.step == bindparam("last"), text_of_rows))
    some = (*_OF_STEP, step.c.step > live, step.c.step <= bindparam("last"))
    return Prepared(update(step).where(*some).values(committed_at=bindparam("position"), **said))


DONE = _done()
COMMITTED = Prepared(
    update(consumer)
    .where(*OF_CONSUMER)
    .values(committed_step=bindparam("last"), token=bindparam("fence"))
)
