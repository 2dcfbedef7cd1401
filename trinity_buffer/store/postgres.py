"""PostgreSQL: whole functions over asyncpg; what they call waits for the server in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import anyio
from sqlalchemy import Connection, Table, insert, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from typing_extensions import override

from trinity_buffer.extras import extra
from trinity_buffer.sizes import sizes
from trinity_buffer.store.changes import CHANNEL
from trinity_buffer.store.transaction import Transaction

T = TypeVar("T")

KEPT_CONNECTIONS = 4
MORE_CONNECTIONS = 8


class PostgresTransaction(Transaction):
    """A transaction whose statements go to a server."""

    @override
    def rows(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Execute a statement as the driver takes it; return all rows that it gives."""
        result = self._connection.exec_driver_sql(sql, tuple(values))
        return [tuple(row) for row in result.all()] if result.returns_rows else []

    @override
    def add(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert ``rows``, each with all columns of ``table`` in their order."""
        if len(rows) >= sizes().rows_to_copy:
            self._copy(table, rows)
        elif rows:
            self._connection.exec_driver_sql(_insert(table), list(rows))

    @override
    def announce(self) -> None:
        """Tell the other processes, at the commit, that there is news."""
        self._connection.execute(text(f"NOTIFY {CHANNEL}"))

    def _copy(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        import asyncpg.exceptions  # noqa: PLC0415 - an optional extra; SQLite users do not have it

        adapted: Any = self._connection.connection.dbapi_connection
        if not adapted.driver_connection.is_in_transaction():
            # SQLAlchemy begins at its own first statement, which this is not.
            self._connection.exec_driver_sql("SELECT 1")
        try:
            adapted.run_async(lambda pg: pg.copy_records_to_table(table.name, records=rows))
        except asyncpg.exceptions.IntegrityConstraintViolationError as error:
            raise IntegrityError(f"COPY {table.name}", None, error) from error
        except asyncpg.exceptions.PostgresError as error:
            raise DBAPIError(f"COPY {table.name}", None, error) from error


@cache
def _insert(table: Table) -> str:
    return str(insert(table).compile(dialect=postgresql.asyncpg.dialect()))


class Server:
    """Connections to one server.

    Args:
        url: of the database, for asyncpg.
    """

    def __init__(self, url: URL) -> None:
        extra("asyncpg", "postgresql")
        # What libpq and asyncpg's own URLs call sslmode is an argument ssl of its connections.
        query = {"ssl" if k == "sslmode" else k: v for k, v in url.query.items()}
        self._engine = create_async_engine(
            url.set(query=query), pool_size=KEPT_CONNECTIONS, max_overflow=MORE_CONNECTIONS
        )

    async def run(self, f: Callable[[Transaction], T], *, writes: bool) -> T:
        """Return ``f(tx)``, in a transaction of its own. A cancellation waits for its end."""

        def transact(connection: Connection) -> T:
            with connection.begin():
                if not writes:
                    connection.exec_driver_sql(_READING)
                return f(PostgresTransaction(connection))

        with anyio.CancelScope(shield=True):
            async with self._engine.connect() as connection:
                done = await connection.run_sync(transact)
        return done

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()


_READING = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
