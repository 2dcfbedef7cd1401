"""PostgreSQL: whole functions over asyncpg; what they call waits for the server in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar
from uuid import uuid4

import anyio
from sqlalchemy import Connection, Table, insert, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from typing_extensions import override

from trinity_buffer.errors import UnsafeStoreError
from trinity_buffer.extras import extra
from trinity_buffer.sizes import sizes
from trinity_buffer.store.changes import APPLICATION, CHANNEL
from trinity_buffer.store.foreign_errors import POOLED
from trinity_buffer.store.transaction import Transaction

T = TypeVar("T")

LOOKS_FOR_A_POOLER = 3
"""One that takes turns among few connections shows itself at the second."""

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
        # The lock of an experiment needs it: a transaction that waited for the lock must see what
        # its holder committed, whatever the database's default is.
        self._engine = create_async_engine(
            url.set(query=query),
            pool_size=KEPT_CONNECTIONS,
            max_overflow=MORE_CONNECTIONS,
            isolation_level="READ COMMITTED",
            connect_args={"server_settings": {"application_name": APPLICATION}},
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

    async def require_suitable(self, name: str) -> str:
        """Return the server's version.

        Raises:
            UnsafeStoreError: the database does not store UTF-8, or a pooler hands out a server
                connection for a transaction only.
        """
        async with self._engine.connect() as one, self._engine.connect() as other:
            about: Any = (await one.exec_driver_sql(_ABOUT)).one()
            version, encoding = str(about[0]), str(about[1])
            if encoding != "UTF8":
                raise UnsafeStoreError(
                    f"{name} stores texts as {encoding}, which has no room for most of them: make "
                    "a database with CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
                )
            mark = uuid4().hex
            await one.exec_driver_sql(_SET_MARK, (mark,))
            await one.commit()
            # A pooler of transactions gives the other connection, sooner or later, the server's
            # session of the first one; or the first gets another while the other keeps that.
            pooled = False
            for _ in range(LOOKS_FOR_A_POOLER):
                await other.rollback()
                pooled = pooled or (await other.exec_driver_sql(_GET_MARK)).scalar() == mark
            # Not asked where it is known: of one server connection, the other has it.
            if pooled or (await one.exec_driver_sql(_GET_MARK)).scalar() != mark:
                raise UnsafeStoreError(f"{name} {POOLED}")
        return version

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()


_READING = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_ABOUT = "SELECT current_setting('server_version'), current_setting('server_encoding')"
_SET_MARK = "SELECT set_config('trinity_buffer.session', $1, false)"
_GET_MARK = "SELECT current_setting('trinity_buffer.session', true)"


def others(tx: Transaction) -> list[str]:
    """Return who else has this database open: processes of ours, and of versions without a name."""
    rows = tx.rows(_OTHERS, ())
    return sorted({str(row[0]) or "a process of an older version" for row in rows} - {APPLICATION})


_OTHERS = (
    "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() "
    "AND backend_type = 'client backend' AND pid <> pg_backend_pid() "
    "AND (application_name = '' OR application_name LIKE 'trinity-buffer%')"
)
