"""A plain connection in the form of an `AsyncConnection`: whole transactions run in one thread.

What `store` does in a transaction is written once, with ``await``. On PostgreSQL each statement is
a message to a server, and waits. On SQLite each is a call of some microseconds, and going to the
connection's thread and back for each would cost ten times that; so there the whole coroutine runs
in that thread, to its end, and finds nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from pysqlite3 import dbapi2
from sqlalchemy import Connection, create_engine
from sqlalchemy.dialects import sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.pool import StaticPool

T = TypeVar("T")

_DIALECT = sqlite.dialect()


class InlineConnection:
    """The part of an `AsyncConnection` that `store` uses; nothing is ever awaited.

    Statements of SQLAlchemy Core run over a connection of SQLAlchemy's, which is made for the first
    of them: that takes as long as a thousand plain statements.

    Args:
        driver: the connection, in autocommit.
    """

    dialect = _DIALECT

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._core: Connection | None = None

    async def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Execute a statement of SQLAlchemy Core."""
        return self._sqlalchemy().execute(statement, parameters)

    async def exec_driver_sql(self, statement: str, parameters: Any = None) -> Any:
        """Execute a statement as the driver takes it."""
        return self._sqlalchemy().exec_driver_sql(statement, parameters)

    def rows(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Execute a statement as the driver takes it, past SQLAlchemy; return all of its rows."""
        found: list[tuple[Any, ...]] = self._driver.execute(statement, values).fetchall()
        return found

    def many(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Execute a statement for each of ``rows``, past SQLAlchemy."""
        self._driver.executemany(statement, rows)

    def transact(self, begin: str, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Return what ``work`` returns, in a transaction that begins with ``begin``."""
        try:
            self._driver.execute(begin)
            done = to_its_end(work(cast("AsyncConnection", self)))
            self._commit()
        except BaseException:
            self._rollback()
            raise
        return done

    def _commit(self) -> None:
        if self._core is not None:
            self._core.commit()
        self._driver.commit()

    def _rollback(self) -> None:
        """Roll the transaction back, if there still is one."""
        if self._core is not None:
            self._core.rollback()
        self._driver.rollback()

    def close(self) -> None:
        """Close what looks at the connection, which stays open."""
        if self._core is not None:
            self._core.close()

    def _sqlalchemy(self) -> Connection:
        if self._core is None:
            engine = create_engine(
                "sqlite://",
                module=dbapi2,
                creator=lambda: self._driver,
                poolclass=StaticPool,
                pool_reset_on_return=None,
                _initialize=False,  # which would end the transaction that is open
            )
            self._core = engine.connect()
        return self._core


def to_its_end(work: Awaitable[T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        cast("Coroutine[Any, Any, T]", work).send(None)
    except StopIteration as end:
        return cast("T", end.value)
    raise AssertionError("a function of the store waited for something else than its connection")
