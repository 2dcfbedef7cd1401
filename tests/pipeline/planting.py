"""Faults, planted past everything that would prevent them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import Table, func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from trinity_buffer.pipeline.events import Event, new_event, now_us
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.store.database import open_for_migration
from trinity_buffer.store.tables import PROJECTIONS, event


@asynccontextmanager
async def unguarded(url: str) -> AsyncIterator[AsyncConnection]:
    """Open a transaction in which the truth may be changed."""
    async with open_for_migration(url) as database, database.writing() as tx:
        for table in ("event", "segment"):
            for operation in ("update", "delete"):
                trigger = f"{table}_forbids_{operation}"
                if tx.dialect.name == "sqlite":
                    await tx.execute(text(f"DROP TRIGGER {trigger}"))
                else:
                    await tx.execute(text(f"ALTER TABLE {table} DISABLE TRIGGER {trigger}"))
        yield tx


async def events_of(url: str, kind: str) -> list[Event]:
    """Return the events of one kind."""
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment((await store.experiments())[0])
        return [found async for found in experiment.events(kinds=[kind])]


async def delete_event(url: str, position: int) -> None:
    """Take one event out of the log."""
    async with unguarded(url) as tx:
        await tx.execute(event.delete().where(event.c.position == position))


async def append_unfolded(url: str, kind: str, body: dict[str, Any]) -> int:
    """Put an event at the end of the log that no projection hears of; return its position."""
    async with unguarded(url) as tx:
        head = int((await tx.execute(select(func.max(event.c.position)))).scalar_one())
        row = {
            "experiment": 1,
            "position": head + 1,
            "kind": kind,
            "actor": "saboteur",
            "recorded_at": now_us(),
            "body": new_event(kind, body).encoded,
        }
        await tx.execute(insert(event), row)
    return head + 1


async def everything(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of all projections."""
    found = {}
    async with open_for_migration(url) as database, database.reading() as tx:
        for table in PROJECTIONS:
            rows = (await tx.execute(select(table))).all()
            found[table.name] = sorted((tuple(row) for row in rows), key=repr)
    return found


async def first_row(tx: AsyncConnection, table: Table) -> dict[str, Any]:
    """Return one row of a table, the first by key."""
    query = select(table).order_by(*table.primary_key.columns).limit(1)
    return dict((await tx.execute(query)).mappings().one())
