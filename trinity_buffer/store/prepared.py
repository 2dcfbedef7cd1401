"""Statements that are compiled once: they run with plain values and give plain tuples.

SQLAlchemy takes some 100 µs to build, look up and execute a statement of which SQLite itself needs
five. What runs in every transaction of a writer or a trainer is therefore compiled once for each
dialect, and on SQLite goes past SQLAlchemy to the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Executable
from sqlalchemy.engine import Dialect

from trinity_buffer.store.transaction import Transaction


class Prepared:
    """A statement of SQLAlchemy Core whose values are bound by name.

    Its columns must be of types that need no processing: numbers, texts, bytes. Booleans come back
    from SQLite as 0 and 1.
    """

    def __init__(self, statement: Executable) -> None:
        self._statement: Any = statement
        self._compiled: dict[str, tuple[str, list[str], dict[str, Any]]] = {}

    def rows(self, tx: Transaction, **values: object) -> list[tuple[Any, ...]]:
        """Execute it, and return all rows that it gives."""
        sql, names, known = self._of(tx.dialect)
        return tx.rows(sql, tuple(self._bound(names, known, values)))

    def change(self, tx: Transaction, **values: object) -> None:
        """Execute it, which changes rows of one table, as `Transaction.change` does."""
        sql, names, known = self._of(tx.dialect)
        tx.change(self._statement.table.name, sql, tuple(self._bound(names, known, values)))

    def value(self, tx: Transaction, **values: object) -> Any:
        """Execute it, and return the first column of its first row; None if there is none."""
        rows = self.rows(tx, **values)
        return rows[0][0] if rows else None

    @staticmethod
    def _bound(
        names: list[str], known: Mapping[str, object], values: Mapping[str, object]
    ) -> list[object]:
        return [values[name] if name in values else known[name] for name in names]

    def _of(self, dialect: Dialect) -> tuple[str, list[str], dict[str, Any]]:
        """Return the text, the names of its places in order, and the values it came with."""
        if dialect.name not in self._compiled:
            made = self._statement.compile(dialect=dialect)
            names = list(made.positiontup or ())
            self._compiled[dialect.name] = (str(made), names, dict(made.params))
        return self._compiled[dialect.name]
