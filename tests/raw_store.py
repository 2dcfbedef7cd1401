"""What tests read and plant in a store past its public functions: in SQL, and in events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sqlalchemy import func, select, text

from tests.handles import Experiment, Store, Transaction
from trinity_buffer.codec.objects import new_event
from trinity_buffer.events import ExperiencesRecorded, Recorded, now_us
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.coordination.waiting import this_host
from trinity_buffer.pipeline.encoding import decode_experiences, encode_experiences
from trinity_buffer.store import leases, log
from trinity_buffer.store.connection import open_for_migration
from trinity_buffer.store.leases import PresenceRow
from trinity_buffer.store.schema import guards
from trinity_buffer.store.segments import new_key
from trinity_buffer.store.sqlite import dbapi2
from trinity_buffer.store.tables import PROJECTIONS, metadata

__all__ = [
    "PROJECTIONS",
    "PresenceRow",
    "append",
    "appending",
    "contents",
    "count",
    "dbapi2",
    "decode_experiences",
    "encode_experiences",
    "guards",
    "metadata",
    "new_event",
    "note_presence",
    "now_us",
    "record_unchecked",
    "rows",
    "sql",
    "take_lease",
    "this_host",
]


def sql(statement: str, **values: object) -> Callable[[Transaction], list[Any]]:
    """Return what executes ``statement`` in a transaction and returns its rows, if it has any."""

    def execute(tx: Transaction) -> list[Any]:
        result = tx.execute(text(statement), values)
        return list(result.all()) if result.returns_rows else []

    return execute


async def rows(of: Experiment | Store, table: str) -> list[dict[str, Any]]:
    """Return all rows of a table, in the order of its key."""
    columns = metadata.tables[table]
    query = select(columns).order_by(*columns.primary_key.columns)
    return await of.database.read(lambda tx: [dict(row) for row in tx.execute(query).mappings()])


async def count(of: Experiment | Store, table: str) -> int:
    """Return how many rows a table has."""
    query = select(func.count()).select_from(metadata.tables[table])
    return await of.database.read(lambda tx: int(tx.execute(query).scalar_one()))


async def contents(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of every table of a database: what "the store is as it was" means."""
    async with open_for_migration(url) as database:
        return await database.read(_contents)


def _contents(tx: Transaction) -> dict[str, list[tuple[Any, ...]]]:
    if tx.dialect.name == "sqlite":
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    else:
        query = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    names = [row[0] for row in sql(query)(tx)]
    every = {name: sql(f'SELECT * FROM "{name}"')(tx) for name in sorted(names)}
    return {name: sorted(map(tuple, some), key=repr) for name, some in every.items()}


def appending(
    key: int, *facts: Recorded, actor: str = "test"
) -> Callable[[Transaction], list[log.Place]]:
    """Return what appends events of ``facts`` to the log of the experiment of this key."""
    events = [(actor, new_event(fact)) for fact in facts]
    return lambda tx: log.append(tx, key, events)


async def append(experiment: Experiment, *facts: Recorded, actor: str = "test") -> list[int]:
    """Append events in one transaction, and return their positions."""
    places = await experiment.database.write(appending(experiment.key, *facts, actor=actor))
    return [place.position for place in places]


async def note_presence(
    experiment: Experiment,
    role: str,
    name: str,
    pid: int,
    host: str | None = None,
    *,
    silent_s: float = 0.0,
    started_at: int | None = None,
    waiting_for: str | None = None,
) -> None:
    """Let a process be there in a role, seen ``silent_s`` ago for the last time."""
    seen = now_us() - int(silent_s * 1e6)
    times = (seen if started_at is None else started_at, seen)
    row = PresenceRow(role, name, host or this_host(), pid, *times, waiting_for)
    await experiment.database.write(leases.record_presence, experiment.key, row)


async def take_lease(
    experiment: Experiment, name: str, owner: str, *, ttl_s: float, ago_s: float = 0.0
) -> None:
    """Let ``owner`` hold a lease, taken ``ago_s`` ago, whoever held it."""
    at_us, ttl_us = now_us() - int(ago_s * 1e6), int(ttl_s * 1e6)
    take = partial(leases.acquire, owner=owner, now_us=at_us, ttl_us=ttl_us)
    await experiment.database.write(take, experiment.key, name)


async def record_unchecked(experiment: Experiment, experiences: Sequence[Experience]) -> None:
    """Record experiences past the checks of a writer, as older versions did."""
    encoded, key = encode_experiences(experiences), new_key()
    store = experiment.database.segments
    families = {name: sum(map(len, blob)) for name, blob in encoded.families.items()}
    columns = encoded.meta
    fact = ExperiencesRecorded(segment=key, families=families, columns=columns, refused={})
    record = appending(experiment.key, fact)

    def attach_and_record(tx: Transaction) -> None:
        store.attach(tx, store.put(key, encoded.families))
        record(tx)

    await experiment.database.write(attach_and_record)
