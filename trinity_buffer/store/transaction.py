"""An open transaction, and several in a row, as the functions of the store get them: plain calls.

A function of the store is written once, for both databases: ``def f(tx, ...)``. Only `Database`
waits for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection, CursorResult, Executable, Table

from trinity_buffer.errors import StoreError

P = ParamSpec("P")
T = TypeVar("T")


class TakenKeyError(StoreError):
    """A unique key is taken already, or a check of the database fails."""


class Transaction(ABC):
    """An open transaction. Made by `Database.read`, `Database.write` and sessions.

    Attributes:
        dialect: of SQLAlchemy; its ``name`` is ``"sqlite"`` or ``"postgresql"``.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect = connection.dialect

    @property
    def connection(self) -> Connection:
        """SQLAlchemy's connection inside the transaction, for DDL, inspection and migrations."""
        if not self._connection.in_transaction():
            self._connection.begin()
        return self._connection

    def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[*Any]:
        """Execute a statement of SQLAlchemy Core."""
        return self.connection.execute(statement, parameters)

    @abstractmethod
    def rows(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Execute a statement as the driver takes it; return all rows that it gives."""

    @abstractmethod
    def change(self, table: str, sql: str, values: Sequence[Any]) -> None:
        """Execute a statement that changes rows of ``table`` and returns none, now or soon.

        At the latest before the next one that is no such statement; what is wrong with it may be
        raised only then, or at the commit. It must not read what one before it has changed.
        """

    @abstractmethod
    def lock(self, experiment: int) -> bool:
        """Be the only transaction that holds the lock of ``experiment``, until it ends.

        Returns whether the store still has the schema that it was opened with.
        """

    @abstractmethod
    def add(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert ``rows``, each with all columns of ``table`` in their order.

        They go past SQLAlchemy's work on each, so the columns must be of types that need no
        processing (numbers, texts, bytes, booleans).
        """

    @abstractmethod
    def announce(self) -> None:
        """Tell the other processes, at the commit, that there is news."""


class ReadSession(Protocol):
    """Several short transactions and the computing between them, on one trip."""

    def read(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``f(tx, ...)`` of a transaction that sees one state and changes nothing."""

    def compute(self, f: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``f(...)``, computed off the event loop while no transaction is open."""


class Session(ReadSession, Protocol):
    """A `ReadSession` that writes too."""

    def write(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``f(tx, ...)`` of a writing transaction, which has committed."""
