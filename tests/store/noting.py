"""What a transaction on a server asks, through SQLAlchemy and past it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import psycopg
from typing_extensions import override

from tests.handles import Transaction


@contextmanager
def noted(tx: Transaction) -> Iterator[list[tuple[str, Any]]]:
    """Yield the list of the statements, with their values, that ``tx`` executes meanwhile."""
    asked: list[tuple[str, Any]] = []

    class Noting(psycopg.RawCursor[Any]):
        @override
        def execute(self, query: Any, params: Any = None, **how: Any) -> Self:
            asked.append((query, params or ()))
            return super().execute(query, params, **how)

    driver: Any = tx.connection.connection.driver_connection
    usual, driver.cursor_factory = driver.cursor_factory, Noting
    try:
        yield asked
        assert tx.connection is not None  # what was kept to be sent together is sent
    finally:
        driver.cursor_factory = usual
