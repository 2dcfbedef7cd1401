"""The raw limit on PostgreSQL: the same transactions over bare asyncpg, the bytes read back by key.

Blobs are few and go by one `executemany`, rows by COPY; between them are the lock of the experiment
and the end of its log, after them two counters. The notice goes with the commit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import asyncpg

from benchmarks.bare import Transaction
from trinity_buffer.store.database import open_database


def written(url: str, kind: str, projection: str) -> list[Transaction]:
    """Return what each event of ``kind`` wrote: segments, itself, rows of ``projection``."""
    return asyncio.run(_written(url, kind, projection))


async def _written(url: str, kind: str, projection: str) -> list[Transaction]:
    connection = await asyncpg.connect(url)
    try:
        events = await connection.fetch(
            "SELECT * FROM event WHERE kind = $1 ORDER BY position", kind
        )
        segments = await connection.fetch("SELECT * FROM segment ORDER BY key, family, part")
        rows = await connection.fetch(f"SELECT * FROM {projection} ORDER BY address")
    finally:
        await connection.close()
    of_event: dict[int, Transaction] = {
        event["position"]: {"segment": [], "event": [tuple(event)], projection: []}
        for event in events
    }
    for row in rows:
        of_event[row["address"] >> 20][projection].append(tuple(row))
    bodies = {event["position"]: event["body"] for event in events}
    for position, transaction in of_event.items():
        named = [tuple(row) for row in segments if row["key"] in bodies[position]]
        transaction["segment"] = named
    return list(of_event.values())


def time_writes(url: str, transactions: Sequence[Transaction]) -> float:
    """Return the seconds in which ``transactions`` are committed to the empty database ``url``."""
    return asyncio.run(_time_writes(url, transactions))


async def _time_writes(url: str, transactions: Sequence[Transaction]) -> float:
    async with open_database(url):
        pass  # it creates the schema
    connection = await asyncpg.connect(url)
    try:
        began = time.perf_counter()
        for transaction in transactions:
            await _commit(connection, transaction)
        return time.perf_counter() - began
    finally:
        await connection.close()


async def _commit(connection: Any, transaction: Transaction) -> None:
    segments, events, (projection, rows) = (
        transaction["segment"],
        transaction["event"],
        list(transaction.items())[-1],
    )
    await connection.execute("BEGIN")
    await connection.executemany(_SEGMENT, segments)
    await connection.execute(f"SELECT pg_advisory_xact_lock({events[0][0]})")
    await connection.fetchrow(_END, events[0][0])
    await connection.executemany(_EVENT, events)
    await connection.copy_records_to_table(projection, records=rows)
    await connection.execute(_COUNT, events[0][0], ["", ""], ["events", "rows"], [1, len(rows)])
    await connection.execute("NOTIFY trinity_buffer; COMMIT")


_SEGMENT = "INSERT INTO segment VALUES ($1, $2, $3, $4, $5)"
_EVENT = "INSERT INTO event VALUES ($1, $2, $3, $4, $5, $6, $7)"
_END = "SELECT position, head FROM event WHERE experiment = $1 ORDER BY position DESC LIMIT 1"
_COUNT = (
    "INSERT INTO counter SELECT $1, consumer, state, state, number "
    "FROM unnest($2::text[], $3::text[], $4::bigint[]) AS given(consumer, state, number) "
    "ON CONFLICT (experiment, consumer, key) "
    "DO UPDATE SET number = counter.number + excluded.number"
)


def time_reads(url: str, batches: Sequence[Sequence[bytes]], families: Sequence[str]) -> float:
    """Return the seconds in which the bytes of the segments are read, one statement a batch."""
    return asyncio.run(_time_reads(url, batches, families))


async def _time_reads(
    url: str, batches: Sequence[Sequence[bytes]], families: Sequence[str]
) -> float:
    connection = await asyncpg.connect(url)
    try:
        query = "SELECT data FROM segment WHERE key = ANY($1) AND family = ANY($2)"
        statement = await connection.prepare(query)
        began = time.perf_counter()
        total = 0
        for keys in batches:
            total += sum(len(row[0]) for row in await statement.fetch(list(keys), list(families)))
        seconds = time.perf_counter() - began
    finally:
        await connection.close()
    assert total > 0
    return seconds
