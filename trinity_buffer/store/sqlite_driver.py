"""aiosqlite over pysqlite3 for SQLAlchemy: one trip to the connection's thread per statement.

The adapter that SQLAlchemy brings makes four: open a cursor, execute, fetch, close. Each costs more
than most of our statements do, so here they are one, and the ``BEGIN`` of a transaction rides with
its first statement. A transaction that is known as a whole takes a single trip (`trip_inline`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import aiosqlite
from pysqlite3 import dbapi2
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.aiosqlite import (
    AsyncAdapt_aiosqlite_connection,
    AsyncAdapt_aiosqlite_dbapi,
    SQLiteDialect_aiosqlite,
)
from sqlalchemy.util.concurrency import await_only
from typing_extensions import override

from trinity_buffer.store.inline import InlineConnection

T = TypeVar("T")

NAME = "pysqlite3async"
"""Of the dialect: ``sqlite+pysqlite3async://``."""


class _Executed(NamedTuple):
    """What a statement left when it had run: nothing of it is open any more."""

    description: Any
    rowcount: int
    lastrowid: int | None
    rows: Sequence[Any]


def _run(connection: Any, begin: str | None, sql: str, parameters: Any, *, many: bool) -> _Executed:
    """Execute one statement and fetch all of it. Runs in the connection's thread."""
    if begin is not None:
        connection.execute(begin)
    cursor = connection.cursor()
    try:
        (cursor.executemany if many else cursor.execute)(sql, parameters)
        rows = cursor.fetchall() if cursor.description else ()
        return _Executed(cursor.description, cursor.rowcount, cursor.lastrowid, rows)
    finally:
        cursor.close()


class _Cursor:
    """What SQLAlchemy takes for a cursor: its statement runs, and is fetched, in one trip."""

    server_side = False
    arraysize = 1

    def __init__(self, adapted: Connection) -> None:
        self._adapted = adapted
        self._rows: deque[Any] = deque()
        self.description: Any = None
        self.rowcount = -1
        self.lastrowid: int | None = None

    def execute(self, operation: str, parameters: Any = None) -> None:
        """Run a statement."""
        self._trip(operation, () if parameters is None else parameters, many=False)

    def executemany(self, operation: str, seq_of_parameters: Any) -> None:
        """Run a statement for each of the parameters."""
        self._trip(operation, seq_of_parameters, many=True)

    def _trip(self, operation: str, parameters: Any, *, many: bool) -> None:
        done = self._adapted.trip(partial(_run, sql=operation, parameters=parameters, many=many))
        self.description, self.rowcount, self.lastrowid, rows = done
        self._rows = deque(rows)

    def fetchall(self) -> list[Any]:
        """Return the rows that are left."""
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def fetchone(self) -> Any:
        """Return the next row, or None."""
        return self._rows.popleft() if self._rows else None

    def fetchmany(self, size: int | None = None) -> list[Any]:
        """Return up to ``size`` rows."""
        number = min(self.arraysize if size is None else size, len(self._rows))
        return [self._rows.popleft() for _ in range(number)]

    def setinputsizes(self, *sizes: Any) -> None:
        """Do nothing, as SQLite does."""

    def close(self) -> None:
        """Forget the rows; the real cursor was closed in its thread."""
        self._rows.clear()

    async def _async_soft_close(self) -> None:
        """Do nothing: SQLAlchemy asks for it before it hands a result out."""


class Connection(AsyncAdapt_aiosqlite_connection):  # type: ignore[misc, unused-ignore]
    """A connection whose transaction begins with its first statement, and ends only if it began."""

    __slots__ = ("_begin", "_inline")

    def __init__(self, dbapi: Any, connection: Any) -> None:
        super().__init__(dbapi, connection)
        self._begin: str | None = None
        self._inline: InlineConnection | None = None

    @override
    def cursor(self, server_side: bool = False) -> Any:
        """Return a cursor."""
        return _Cursor(self)

    def begin_with(self, statement: str) -> None:
        """Let ``statement`` begin a transaction when its first statement comes."""
        self._begin = statement

    def trip(self, run: Callable[[Any, str | None], _Executed]) -> _Executed:
        """Return what ``run(connection, begin)`` returns in the thread of the connection."""
        begin, self._begin = self._begin, None
        driver = self._connection
        try:
            done: _Executed = await_only(driver._execute(run, driver._conn, begin))  # noqa: SLF001 - it has no public way in
        except Exception as error:  # noqa: BLE001 - turned into one of the driver's, as for every other call
            self._handle_exception(error)
        return done

    async def trip_inline(self, run: Callable[[InlineConnection], T]) -> T:
        """Return what ``run`` returns, which works with the connection in the latter's thread."""
        driver = self._connection
        done: T = await driver._execute(self._run_inline, run)  # noqa: SLF001 - it has no public way in
        return done

    def _run_inline(self, run: Callable[[InlineConnection], T]) -> T:
        if self._inline is None:
            self._inline = InlineConnection(self._connection._conn)  # noqa: SLF001 - as above
        return run(self._inline)

    @override
    def close(self) -> None:
        """Close the connection, and what looks at it."""
        inline, self._inline = self._inline, None
        if inline is not None:
            await_only(self._connection._execute(inline.close))  # noqa: SLF001 - as above
        super().close()

    @override
    def rollback(self) -> None:
        """Roll back, without a trip where nothing has begun: the pool asks for it each time."""
        if self._has_begun():
            super().rollback()

    @override
    def commit(self) -> None:
        """Commit, without a trip where nothing has begun."""
        if self._has_begun():
            super().commit()

    def _has_begun(self) -> bool:
        self._begin = None
        connection = self._connection._connection  # noqa: SLF001 - as SQLAlchemy's own adapter looks at it
        return connection is not None and bool(connection.in_transaction)


class _Driver(AsyncAdapt_aiosqlite_dbapi):  # type: ignore[misc, unused-ignore]
    """aiosqlite over pysqlite3, whose exceptions are not those of the standard library."""

    @override
    def _init_dbapi_attributes(self) -> None:
        super()._init_dbapi_attributes()
        for name in (
            "DatabaseError", "DataError", "Error", "IntegrityError", "InterfaceError",
            "InternalError", "NotSupportedError", "OperationalError", "ProgrammingError", "Warning",
            "sqlite_version", "sqlite_version_info",
        ):  # fmt: skip
            setattr(self, name, getattr(dbapi2, name))

    @override
    def connect(self, *args: Any, **kwargs: Any) -> Any:
        """Open a connection, in a thread that does not keep the interpreter from ending."""
        opened = aiosqlite.Connection(lambda: dbapi2.connect(*args, **kwargs), iter_chunk_size=64)
        opened._thread.daemon = True  # noqa: SLF001 - what SQLAlchemy itself does for the usual driver
        return Connection(self, await_only(opened))


class PySQLite3Dialect(SQLiteDialect_aiosqlite):
    """``sqlite+pysqlite3async://``: SQLAlchemy's aiosqlite dialect, on pysqlite3."""

    driver = NAME
    supports_statement_cache = True

    @classmethod
    @override
    def import_dbapi(cls) -> Any:
        """Return the driver."""
        return _Driver(aiosqlite, dbapi2)


registry.register(f"sqlite.{NAME}", __name__, "PySQLite3Dialect")
