"""The raw limit on SQLite: the same rows and bytes, schema and pragmas, through bare `pysqlite3`.

The rows are copied from a store that we wrote, so nothing is left out and nothing is made up.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pysqlite3 import dbapi2

from trinity_buffer.store import sqlite
from trinity_buffer.store.sqlite import Checkpointer

Row = tuple[Any, ...]
Transaction = dict[str, list[Row]]
"""Table -> rows, in the order in which they are inserted."""


def connect(path: Path) -> Any:
    """Return a connection as the store configures its own."""
    connection = dbapi2.connect(str(path), isolation_level=None, check_same_thread=False)
    for statement in sqlite.pragmas(durability="normal", read_only=False):
        connection.execute(statement)
    return connection


def empty_copy(path: Path) -> None:
    """Give the empty file ``path`` its page size and journal mode."""
    sqlite.prepare_file(path)


def schema_of(path: Path) -> list[str]:
    """Return the statements that make all tables, indexes and triggers of the store at ``path``."""
    with closing(connect(path)) as connection:
        found = connection.execute(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' "
            "ORDER BY rowid"
        )
        return [statement for (statement,) in found]


def written(path: Path, kind: str, projection: str) -> list[Transaction]:
    """Return what each event of ``kind`` wrote: segments, itself, rows of ``projection``."""
    with closing(connect(path)) as connection:
        ask = connection.execute
        events = ask("SELECT * FROM event WHERE kind = ? ORDER BY position", (kind,)).fetchall()
        segments = ask("SELECT * FROM segment ORDER BY rowid").fetchall()
        rows = ask(f"SELECT * FROM {projection} ORDER BY address").fetchall()
        place = _column(connection, projection, "address")
        of_body = _column(connection, "event", "body")
    of_event: dict[int, Transaction] = {
        event[1]: {"segment": [], "event": [event], projection: []} for event in events
    }
    for row in rows:
        of_event[row[place] >> 20][projection].append(row)
    by_key: dict[bytes, list[Row]] = {}
    for row in segments:
        by_key.setdefault(row[0], []).append(row)
    for transaction in of_event.values():
        body = transaction["event"][0][of_body]
        transaction["segment"] = [r for key, some in by_key.items() if key in body for r in some]
    return list(of_event.values())


def _column(connection: Any, table: str, name: str) -> int:
    """Return which column of a table has this name."""
    found = connection.execute(f"SELECT * FROM {table} LIMIT 0").description
    return [column[0] for column in found].index(name)


def merged(transactions: Sequence[Transaction], number: int) -> list[Transaction]:
    """Return the same rows in transactions of ``number`` events."""
    found = []
    for start in range(0, len(transactions), number):
        some = transactions[start : start + number]
        found.append({table: [r for one in some for r in one[table]] for table in some[0]})
    return found


def inserts(transaction: Transaction) -> dict[str, str]:
    """Return table -> the statement that inserts one of its rows."""
    return {
        table: f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})"
        for table, rows in transaction.items()
    }


def time_writes(
    folder: Path,
    schema: Sequence[str],
    transactions: Sequence[Transaction],
    before: Callable[[int], None] = lambda _: None,
) -> float:
    """Return the seconds in which ``transactions`` are committed in turn to a new file.

    Args:
        before: is called before each one, with its number; its time counts.
    """
    folder.mkdir()
    path = folder / "bare.db"
    empty_copy(path)
    with closing(connect(path)) as connection, closing(Checkpointer(path)) as checkpointer:
        for statement in schema:
            connection.execute(statement)
        statements = inserts(transactions[0])
        began = time.perf_counter()
        for number, transaction in enumerate(transactions):
            before(number)
            connection.execute("BEGIN IMMEDIATE")
            for table, rows in transaction.items():
                connection.executemany(statements[table], rows)
            connection.execute("COMMIT")
            checkpointer.notify()
        seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def time_reads(path: Path, batches: Sequence[Sequence[bytes]], families: Sequence[str]) -> float:
    """Return the seconds in which the bytes of the segments are read, one statement a batch."""
    with closing(connect(path)) as connection:
        began = time.perf_counter()
        total = 0
        for keys in batches:
            total += sum(map(len, read(connection, keys, families)))
        seconds = time.perf_counter() - began
    assert total > 0
    return seconds


def read(connection: Any, keys: Sequence[bytes], families: Sequence[str]) -> list[bytes]:
    """Return the bytes of some segments."""
    places = f"({','.join('?' * len(keys))}) AND family IN ({','.join('?' * len(families))})"
    found = connection.execute(
        f"SELECT data FROM segment WHERE key IN {places}", (*keys, *families)
    )
    return [data for (data,) in found]
