"""Many rows into one table, past SQLAlchemy's work on each: tuples, in the order of its columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

from sqlalchemy import Table, insert
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from trinity_buffer.sizes import sizes
from trinity_buffer.store.inline import InlineConnection


async def add(tx: AsyncConnection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert ``rows``, each with all columns of ``table`` in their order, as the driver takes them.

    The columns must be of types that need no processing (numbers, texts, bytes, booleans).

    Raises:
        IntegrityError: SQLAlchemy's or the driver's: a key that is taken, a check that fails.
    """
    if not rows:
        return
    if tx.dialect.name == "postgresql" and len(rows) >= sizes().rows_to_copy:
        await _copy(tx, table, rows)
    elif isinstance(tx, InlineConnection):
        together = sizes().rows_per_statement
        whole = len(rows) - len(rows) % together
        for start in range(0, whole, together):
            some = chain.from_iterable(rows[start : start + together])
            tx.rows(_statement_of_many(table, tx.dialect, together), tuple(some))
        tx.many(_statement(table, tx.dialect), rows[whole:])
    else:
        await tx.exec_driver_sql(_statement(table, tx.dialect), list(rows))


@cache
def _statement(table: Table, dialect: Dialect) -> str:
    return str(insert(table).compile(dialect=dialect))


@cache
def _statement_of_many(table: Table, dialect: Dialect, rows: int) -> str:
    """Return the statement for so many rows, whose places are all positional."""
    head, values, row = _statement(table, dialect).partition("VALUES ")
    return head + values + ", ".join([row] * rows)


async def _copy(tx: AsyncConnection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    import asyncpg.exceptions  # noqa: PLC0415 - an optional extra; SQLite users do not have it

    driver: Any = (await tx.get_raw_connection()).driver_connection
    if not driver.is_in_transaction():
        # SQLAlchemy begins at its own first statement, which this is not: it would be on its own.
        await tx.exec_driver_sql("SELECT 1")
    try:
        await driver.copy_records_to_table(table.name, records=rows)
    except asyncpg.exceptions.IntegrityConstraintViolationError as error:
        raise IntegrityError(f"COPY {table.name}", None, error) from error
    except asyncpg.exceptions.PostgresError as error:
        raise DBAPIError(f"COPY {table.name}", None, error) from error
