"""Faults, planted past everything that would prevent them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Table, select

from tests.handles import Event, Transaction, VerifyReport
from tests.raw_store import PROJECTIONS, guards, now_us, sql
from tests.whole_stores import open_for_migration
from trinity_buffer import open_store
from trinity_buffer.codec.objects import encode_body
from trinity_buffer.pipeline.verify.verify import Problem
from trinity_buffer.store import log
from trinity_buffer.store.tables import event

T = TypeVar("T")


async def unguarded(url: str, change: Callable[[Transaction], T], *, chained: bool = True) -> T:
    """Return ``change(tx)`` of a transaction in which the truth may be changed.

    Its triggers are there again at the end. What was changed can only be seen from what the log
    says, unless ``chained`` is False: then it is not chained anew.
    """

    def with_triggers_off(tx: Transaction) -> T:
        for table in ("event", "segment"):
            for operation in ("update", "delete"):
                _switch(tx, table, f"{table}_forbids_{operation}", on=False)
        done = change(tx)
        if chained:
            chain_anew(tx)
        for table in ("event", "segment"):
            for operation in ("update", "delete"):
                _switch(tx, table, f"{table}_forbids_{operation}", on=True)
        return done

    async with open_for_migration(url) as database:
        return await database.write(with_triggers_off)


def _switch(tx: Transaction, table: str, trigger: str, *, on: bool) -> None:
    if tx.dialect.name == "postgresql":
        sql(f"ALTER TABLE {table} {'ENABLE' if on else 'DISABLE'} TRIGGER {trigger}")(tx)
    elif on:
        (guard,) = (one for one in guards("sqlite") if one.name == trigger)
        tx.fetch_all(guard.statements("sqlite")[0], ())
    else:
        sql(f"DROP TRIGGER {trigger}")(tx)


def chain_anew(tx: Transaction) -> None:
    """Give every event of every experiment the head that it should have."""
    for name, key in log.experiment_names(tx).items():
        head = log.origin(name)
        for one in log.read_after(tx, key, 0, limit=1 << 30):
            said = (one.position, one.kind, one.actor, one.recorded_at, one.body)
            head = log.head_of(head, *said)
            mine = (event.c.experiment == key, event.c.position == one.position)
            tx.execute(event.update().where(*mine).values(head=head))


async def events_of(url: str, kind: str) -> list[Event]:
    """Return the events of one kind."""
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment((await store.experiments())[0])
        return [found async for found in experiment.events(kinds=[kind])]


async def write_body(url: str, position: int, body: bytes) -> None:
    """Let an event have another body."""
    change = sql("UPDATE event SET body = :body WHERE position = :at", body=body, at=position)
    await unguarded(url, change)


async def delete_event(url: str, position: int) -> None:
    """Take one event out of the log."""
    await unguarded(url, sql("DELETE FROM event WHERE position = :at", at=position))


async def append_unfolded(url: str, kind: str, body: dict[str, Any]) -> int:
    """Put an event at the end of the log that no projection hears of; return its position."""
    encoded = encode_body(kind, body)

    def append(tx: Transaction) -> int:
        last = log.end(tx, 1)
        said = (last.position + 1, kind, "saboteur", now_us(), encoded)
        tx.insert_many(event, [(1, *said, log.head_of(last.head, *said))])
        return last.position + 1

    return await unguarded(url, append)


async def everything(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of all projections."""

    def read(tx: Transaction) -> dict[str, list[tuple[Any, ...]]]:
        rows = {table.name: tx.execute(select(table)).all() for table in PROJECTIONS}
        return {name: sorted(map(tuple, some), key=repr) for name, some in rows.items()}

    async with open_for_migration(url) as database:
        return await database.read(read)


def first_row(tx: Transaction, table: Table) -> dict[str, Any]:
    """Return one row of a table, the first by key."""
    query = select(table).order_by(*table.primary_key.columns).limit(1)
    return dict(tx.execute(query).mappings().one())


def beside_heads(report: VerifyReport) -> list[Problem]:
    """Return what is wrong, but for heads that were kept of the log before it was edited."""
    return [problem for problem in report.problems if problem.check != "chain"]
