"""The raw limit on PostgreSQL: the same transactions over bare psycopg, the bytes read back by key.

Blobs are few and go by prepared inserts, rows by COPY; between them are the lock of the experiment
and the end of its log, after them two counters. The notice goes with the commit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import psycopg

from benchmarks.bare import Transaction
from trinity_buffer.store.connection import open_database
from trinity_buffer.store.postgres import column_types
from trinity_buffer.store.tables import metadata


def _connected(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(
        url, autocommit=True, prepare_threshold=0, cursor_factory=psycopg.RawCursor
    )


def written(url: str, kind: str, projection: str) -> list[Transaction]:
    """Return what each event of ``kind`` wrote: segments, itself, rows of ``projection``."""
    with _connected(url) as connection:
        ask = connection.cursor(binary=True).execute
        events = ask("SELECT * FROM event WHERE kind = $1 ORDER BY position", (kind,)).fetchall()
        segments = ask("SELECT * FROM segment ORDER BY key, family, part").fetchall()
        rows = ask(f"SELECT * FROM {projection} ORDER BY address").fetchall()
    event_columns = [column.name for column in metadata.tables["event"].c]
    address = [column.name for column in metadata.tables[projection].c].index("address")
    place, body = event_columns.index("position"), event_columns.index("body")
    of_event: dict[int, Transaction] = {
        event[place]: {"segment": [], "event": [event], projection: []} for event in events
    }
    for row in rows:
        of_event[row[address] >> 20][projection].append(row)
    for transaction in of_event.values():
        named = transaction["event"][0][body]
        transaction["segment"] = [row for row in segments if row[0] in named]
    return list(of_event.values())


def time_writes(url: str, transactions: Sequence[Transaction]) -> float:
    """Return the seconds in which ``transactions`` are committed to the empty database ``url``."""
    asyncio.run(_make(url))
    with _connected(url) as connection:
        began = time.perf_counter()
        for transaction in transactions:
            _commit(connection, transaction)
        return time.perf_counter() - began


async def _make(url: str) -> None:
    async with open_database(url):
        pass  # it creates the schema


def _commit(connection: psycopg.Connection[Any], transaction: Transaction) -> None:
    cursor = connection.cursor(binary=True)
    (experiment, *_), *_ = transaction["event"]
    projection, rows = list(transaction.items())[-1]
    connection.execute("BEGIN")
    for row in transaction["segment"]:
        cursor.execute(_SEGMENT, row)
    connection.execute(f"SELECT pg_advisory_xact_lock({experiment})")
    cursor.execute(_END, (experiment,)).fetchall()
    for row in transaction["event"]:
        cursor.execute(_EVENT, row)
    with cursor.copy(f"COPY {projection} FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(column_types(metadata.tables[projection]))
        for row in rows:
            copy.write_row(row)
    cursor.execute(_COUNT, (experiment, ["", ""], ["events", "rows"], [1, len(rows)]))
    connection.execute("NOTIFY trinity_buffer; COMMIT", prepare=False)  # two are never prepared


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
    query = "SELECT data FROM segment WHERE key = ANY($1) AND family = ANY($2)"
    with _connected(url) as connection:
        ask = connection.cursor(binary=True).execute
        began = time.perf_counter()
        total = 0
        for keys in batches:
            rows = ask(query, (list(keys), list(families))).fetchall()
            total += sum(len(data) for (data,) in rows)
        seconds = time.perf_counter() - began
    assert total > 0
    return seconds
