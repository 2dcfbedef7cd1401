"""A plain connection in the form of an `AsyncConnection`: whole transactions run in one thread.

What `store` does in a transaction is written once, with ``await``. On PostgreSQL each statement is
a message to a server, and waits. On SQLite each is a call of some microseconds, and going to the
connection's thread and back for each would cost ten times that; so there the whole coroutine runs
in that thread, to its end, and finds nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import Connection

T = TypeVar("T")


class InlineConnection:
    """The part of an `AsyncConnection` that `store` uses; nothing is ever awaited."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect = connection.dialect
        self._driver: Any = connection.connection.dbapi_connection

    async def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Execute a statement of SQLAlchemy Core."""
        return self._connection.execute(statement, parameters)

    async def exec_driver_sql(self, statement: str, parameters: Any = None) -> Any:
        """Execute a statement as the driver takes it."""
        return self._connection.exec_driver_sql(statement, parameters)

    def rows(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Execute a statement as the driver takes it, past SQLAlchemy; return all of its rows."""
        found: list[tuple[Any, ...]] = self._driver.execute(statement, values).fetchall()
        return found

    def many(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Execute a statement for each of ``rows``, past SQLAlchemy."""
        self._driver.executemany(statement, rows)


def to_its_end(work: Awaitable[T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        cast("Coroutine[Any, Any, T]", work).send(None)
    except StopIteration as end:
        return cast("T", end.value)
    raise AssertionError("a function of the store waited for something else than its connection")
