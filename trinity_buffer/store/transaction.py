"""Transactions, sessions and prepared statements, as functions of the store use them.

A function of the store is written once, for both databases: ``def f(tx, ...)``. Only `Database`
awaits it. SQL that differs between SQLite and PostgreSQL is built here.
"""

from __future__ import annotations

import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Connection,
    CursorResult,
    Executable,
    Table,
    Text,
    cast,
    create_engine,
    func,
    literal,
    literal_column,
    select,
)
from sqlalchemy.engine import Engine
from sqlalchemy.pool import NullPool
from sqlalchemy.types import TypeEngine

from trinity_buffer.codec.blob import Buffer
from trinity_buffer.errors import StoreError

P = ParamSpec("P")
T = TypeVar("T")

Values: TypeAlias = Sequence[Any] | Mapping[str, Any]
"""Of the places of a statement: in their order, or, on SQLite, by name."""

SegmentParts: TypeAlias = dict[tuple[bytes, str], list[tuple[int, int, Buffer]]]
"""(key, family) -> its parts as (part, checksum, data), unchecked: `segments.blob_of` checks."""


_wrapping = threading.local()
"""The driver's connection that SQLAlchemy wraps next, in this thread."""


def engine_without_connections(url: str, **options: Any) -> Engine:
    """Return an engine, with its cache of compiled statements: each `Transaction` brings a driver.

    Args:
        url: names a dialect and a driver, and no place.
        options: of SQLAlchemy's `create_engine`.
    """
    return create_engine(
        url,
        creator=lambda: _wrapping.driver,
        poolclass=NullPool,
        pool_reset_on_return=None,
        **options,
    )


class TakenKeyError(StoreError):
    """A unique key is taken already, or a check of the database fails."""


class Transaction(ABC):
    """An open transaction. Made by `Database.read`, `Database.write` and sessions.

    Args:
        engine: of SQLAlchemy, made by `engine_without_connections`.
        driver: the driver's connection, in autocommit, while no transaction is open.

    Attributes:
        dialect: of SQLAlchemy; its ``name`` is ``"sqlite"`` or ``"postgresql"``.
        seen: experiment -> (position, head) of the last event that was read of its log.
        appended: the same of the last event that was appended.
    """

    def __init__(self, engine: Engine, driver: Any) -> None:
        _wrapping.driver = driver
        self._connection = engine.connect()
        self.dialect = engine.dialect
        self.seen: dict[int, tuple[int, bytes]] = {}
        self.appended: dict[int, tuple[int, bytes]] = {}

    def saw(self, experiment: int, position: int, head: bytes | None) -> None:
        """Note that an event was read. Those of an old log have no head."""
        before = self.seen.get(experiment, (0, b""))
        if head is not None and before[0] < position:
            self.seen[experiment] = (position, bytes(head))

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
    def fetch_all(self, sql: str, values: Values) -> list[tuple[Any, ...]]:
        """Execute SQL of the driver's own style, and return all rows."""

    @abstractmethod
    def execute_later(self, sql: str, values: Values) -> None:
        """Execute a statement whose rows nobody asks for, at the latest before the next one.

        Its errors are raised then.
        """

    @abstractmethod
    def lock(self, experiment: int) -> None:
        """Let this transaction be the only one that appends to ``experiment`` until it ends.

        A position given out under the lock is committed before the next one is given out, so a
        reader that has seen a position has seen every lower one.

        Raises:
            SchemaTooNewError: the store was migrated since it was opened here; on a server it is
                raised by the next statement.
        """

    @abstractmethod
    def insert_many(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert ``rows``, each with all columns of ``table`` in their order.

        They go past SQLAlchemy's work on each, so the columns must be of types that need no
        processing (numbers, texts, bytes, booleans).
        """

    def insert_blobs(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert ``rows`` as `insert_many` does, the last column of each a `Blob`."""
        self.insert_many(table, [(*row[:-1], bytes(row[-1])) for row in rows])

    def with_blobs(
        self,
        table: Table,  # noqa: ARG002 - SQLite asks it for the place of a blob
        rows: list[tuple[Any, ...]],
    ) -> list[tuple[Any, ...]]:
        """Return rows of ``table`` with their last column, a blob.

        SQLite selects a long one as NULL with its place, and reads it here piece by piece.
        """
        return rows

    @abstractmethod
    def announce(self) -> None:
        """Notify the other processes at the commit."""


_OF_ONE_STATEMENT: set[Callable[..., Any]] = set()


def one_statement(f: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that executes at most one statement, which reads: it sees one state anyway.

    To begin and end a transaction around it would take two more round trips to a server.
    """
    _OF_ONE_STATEMENT.add(f)
    return f


def is_of_one_statement(f: Callable[..., Any]) -> bool:
    """Return whether a function was marked with `one_statement`."""
    return f in _OF_ONE_STATEMENT


class ReadSession(Protocol):
    """Several short transactions and the computing between them, on one trip."""

    def read(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``f(tx, ...)`` of a transaction that sees one state and changes nothing."""

    def compute(self, f: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``f(...)``, computed while no transaction is open."""

    def segments(self, keys: Sequence[bytes], families: Sequence[str]) -> SegmentParts:
        """Return the parts of some segments, as `SegmentStore.get` does."""


class Session(ReadSession, Protocol):
    """A `ReadSession` that writes too."""

    def write(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``f(tx, ...)`` of a writing transaction, which has committed."""


class Statement:
    """SQL of both databases: it runs with plain values, each named ``:so``, and gives plain tuples.

    SQLAlchemy takes some 100 µs to build, look up and execute a statement of which SQLite itself
    needs five. So what runs in every transaction of a writer or a trainer is text.

    What the databases write differently:

    - ``IN INTS(:x)`` and ``IN TEXTS(:x)``: in a list, bound to what `bind_list` returns;
    - ``ROWS(text, bigint)``: a table of rows with the columns c0, c1 and so on, from `bind_rows`;
    - ``OFFSET 0`` at the end of an EXISTS, which is then asked for each row. Of a plain one
      PostgreSQL makes a join: without statistics, one that compares every row with every other.

    Booleans come back from SQLite as 0 and 1.

    Args:
        sql: the statement.
        postgresql: the same for PostgreSQL, where it needs other words.
    """

    def __init__(self, sql: str, postgresql: str = "") -> None:
        self._sqlite = _LIST.sub(r"IN (SELECT value FROM json_each(:\2))", sql)
        self._sqlite = _ROWS.sub(_rows_of_json, self._sqlite).replace(" OFFSET 0", "")
        numbered = _LIST.sub(_in_array, postgresql or sql)
        numbered = _ROWS.sub(_rows_of_arrays, numbered)
        # Numbered once for each name, which has one type then.
        self._names = list(dict.fromkeys(_PLACE.findall(numbered)))
        self._postgresql = _PLACE.sub(lambda m: f"${self._names.index(m[1]) + 1}", numbered)

    def fetch_all(self, tx: Transaction, **values: object) -> list[tuple[Any, ...]]:
        """Execute it, and return all rows."""
        if tx.dialect.name == "sqlite":  # which binds by name, and passes over the others
            return tx.fetch_all(self._sqlite, values)
        return tx.fetch_all(self._postgresql, [values[name] for name in self._names])

    def execute_later(self, tx: Transaction, **values: object) -> None:
        """Execute it, as `Transaction.execute_later` does."""
        if tx.dialect.name == "sqlite":
            tx.execute_later(self._sqlite, values)
        else:
            tx.execute_later(self._postgresql, [values[name] for name in self._names])

    def value(self, tx: Transaction, **values: object) -> Any:
        """Execute it, and return the first column of its first row; None without rows."""
        rows = self.fetch_all(tx, **values)
        return rows[0][0] if rows else None


_PLACE = re.compile(r"(?<!:):(\w+)")
_LIST = re.compile(r"IN (INTS|TEXTS)\(:(\w+)\)")
_ROWS = re.compile(r"ROWS\(([\w, ]+)\)")


def _in_array(match: re.Match[str]) -> str:
    # Numbers go as texts too: of a list of numbers the driver would look at each for its type.
    return f"= ANY(:{match[2]}::text[]{'::bigint[]' if match[1] == 'INTS' else ''})"


def _rows_of_json(match: re.Match[str]) -> str:
    columns = range(len(match[1].split(",")))
    each = ", ".join(f"json_extract(value, '$[{n}]') AS c{n}" for n in columns)
    return f"(SELECT {each} FROM json_each(:rows))"


def _rows_of_arrays(match: re.Match[str]) -> str:
    kinds = match[1].split(", ")
    arrays = ", ".join(f":column{n}::text[]::{kind}[]" for n, kind in enumerate(kinds))
    return f"unnest({arrays}) AS given({', '.join(f'c{n}' for n in range(len(kinds)))})"


def in_list(
    tx: Transaction, column: ColumnElement[Any], values: Iterable[int | str]
) -> ColumnElement[bool]:
    """Return ``column IN (values)`` with one bound parameter, however many values there are."""
    listed = bind_list(tx, values)
    if tx.dialect.name == "sqlite":
        return column.in_(select(func.json_each(listed).table_valued("value").c.value))
    kind: TypeEngine[Any] = _TEXTS if isinstance(column.type, Text) else ARRAY(BigInteger())
    return column == func.any(cast(literal(listed, _TEXTS), kind))


def bind_list(tx: Transaction, values: Iterable[int | str]) -> Any:
    """Return ``values`` as a statement with ``IN INTS`` or ``IN TEXTS`` takes them."""
    return json.dumps(list(values)) if tx.dialect.name == "sqlite" else list(map(str, values))


def bind_rows(tx: Transaction, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return ``rows``, at least one, as a statement with ``ROWS`` takes them."""
    if tx.dialect.name == "sqlite":
        return {"rows": json.dumps(rows)}
    columns = zip(*rows, strict=True)
    return {f"column{number}": bind_list(tx, values) for number, values in enumerate(columns)}


_TEXTS = ARRAY(Text())


def has_row(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a row exists, which is looked up by its key for each row that asks.

    For that is its OFFSET; see `Statement`.
    """
    return select(literal_column("1")).where(*conditions).offset(literal_column("0")).exists()
