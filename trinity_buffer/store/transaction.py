"""Transactions, sessions and prepared statements, as functions of the store use them.

A function of the store is written once, for both databases: ``def f(tx, ...)``. Only `Database`
awaits it. SQL that differs between SQLite and PostgreSQL is built here.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, TypeVarTuple

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Connection,
    CursorResult,
    Executable,
    Table,
    Text,
    bindparam,
    cast,
    column,
    create_engine,
    func,
    literal,
    literal_column,
    select,
    text,
)
from sqlalchemy.engine import Dialect, Engine
from sqlalchemy.pool import NullPool
from sqlalchemy.types import TypeEngine

from trinity_buffer.codec.blob import Buffer
from trinity_buffer.errors import SchemaTooNewError, StoreError
from trinity_buffer.store.tables import SCHEMA_REVISION

P = ParamSpec("P")
T = TypeVar("T")
Given = TypeVarTuple("Given")

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
    def fetch_all(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Execute SQL of the driver's own style, and return all rows."""

    @abstractmethod
    def execute_later(self, sql: str, values: Sequence[Any]) -> None:
        """Execute a statement whose rows nobody asks for, at the latest before the next one.

        Its errors are raised then.
        """

    @abstractmethod
    def lock(self, experiment: int) -> bool:
        """Be the only transaction that holds the lock of ``experiment``, until it ends.

        Returns whether the store still has the schema that it was opened with.
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


class Prepared:
    """A statement that is compiled once: it runs with plain values and gives plain tuples.

    SQLAlchemy takes some 100 µs to build, look up and execute a statement of which SQLite itself
    needs five. What runs in every transaction of a writer or a trainer is therefore compiled once
    for each dialect, and on SQLite goes past SQLAlchemy to the driver. Values are bound by name.

    Its columns must be of types that need no processing: numbers, texts, bytes. Booleans come back
    from SQLite as 0 and 1.
    """

    def __init__(self, statement: Executable) -> None:
        self._statement: Any = statement
        self._compiled: dict[str, tuple[str, list[str], dict[str, Any]]] = {}

    def fetch_all(self, tx: Transaction, **values: object) -> list[tuple[Any, ...]]:
        """Execute it, and return all rows."""
        sql, names, known = self._of(tx.dialect)
        return tx.fetch_all(sql, tuple(self._bound(names, known, values)))

    def execute_later(self, tx: Transaction, **values: object) -> None:
        """Execute it, as `Transaction.execute_later` does."""
        sql, names, known = self._of(tx.dialect)
        tx.execute_later(sql, tuple(self._bound(names, known, values)))

    def value(self, tx: Transaction, **values: object) -> Any:
        """Execute it, and return the first column of its first row; None without rows."""
        rows = self.fetch_all(tx, **values)
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


def by_dialect(make: Callable[[str, *Given], Prepared]) -> Callable[[str, *Given], Prepared]:
    """Cache the statement that ``make(dialect, ...)`` returns for each database.

    The arguments are hashable.
    """
    statements: dict[tuple[Any, ...], Prepared] = {}

    def made(dialect: str, *args: *Given) -> Prepared:
        statement = statements.get((dialect, *args))
        if statement is None:
            statement = statements[dialect, *args] = make(dialect, *args)
        return statement

    return made


def in_list(
    tx: Transaction, column: ColumnElement[Any], values: Iterable[int | str]
) -> ColumnElement[bool]:
    """Return ``column IN (values)`` with one bound parameter, however many values there are."""
    listed = bind_list(tx, values)
    if tx.dialect.name == "sqlite":
        return column.in_(select(func.json_each(listed).table_valued("value").c.value))
    return column == func.any(_array(literal(listed, _TEXTS), column.type))


def in_bound_list(dialect: str, column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """Return `in_list` for a prepared statement; bind ``name`` to what `bind_list` returns."""
    if dialect == "sqlite":
        each = func.json_each(bindparam(name, type_=Text())).table_valued("value")
        return column.in_(select(each.c.value))
    return column == func.any(_array(bindparam(name, type_=_TEXTS), column.type))


def bind_list(tx: Transaction, values: Iterable[int | str]) -> Any:
    """Return ``values`` as a statement with `in_bound_list` takes them."""
    return json.dumps(list(values)) if tx.dialect.name == "sqlite" else list(map(str, values))


def values_table(dialect: str, kinds: Sequence[TypeEngine[Any]]) -> tuple[ColumnElement[Any], ...]:
    """Return the columns of a table of rows that a statement gets from `bind_rows`.

    Args:
        dialect: of the statement.
        kinds: type of each column.
    """
    if dialect == "sqlite":
        each = func.json_each(bindparam("rows", type_=Text())).table_valued("value").c.value
        return tuple(func.json_extract(each, f"$[{n}]", type_=kind) for n, kind in enumerate(kinds))
    arrays = [_array(bindparam(f"column{n}", type_=_TEXTS), kind) for n, kind in enumerate(kinds)]
    names = (column(f"column{n}", kind) for n, kind in enumerate(kinds))
    rows = func.unnest(*arrays).table_valued(*names).render_derived()
    return tuple(rows.c)


def bind_rows(tx: Transaction, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return ``rows``, at least one, as a statement with `values_table` takes them."""
    if tx.dialect.name == "sqlite":
        return {"rows": json.dumps(rows)}
    columns = zip(*rows, strict=True)
    return {f"column{number}": bind_list(tx, values) for number, values in enumerate(columns)}


# Numbers go as texts too: of a list of numbers the driver would look at each to choose its type.
_TEXTS = ARRAY(Text())


def _array(texts: ColumnElement[Any], kind: TypeEngine[Any]) -> ColumnElement[Any]:
    """Return ``texts``, an array of texts for PostgreSQL, as one of texts or of numbers."""
    return cast(texts, _TEXTS if isinstance(kind, Text) else ARRAY(BigInteger()))


def has_row(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a row exists, which is looked up by its key for each row that asks.

    Of a plain EXISTS PostgreSQL makes a join: of tables without statistics, until their first
    ANALYZE, one that compares every row with every other. Of one with an OFFSET it makes none.
    """
    return select(literal_column("1")).where(*conditions).offset(literal_column("0")).exists()


def upsert(tx: Transaction, table: Table) -> Any:
    """Return an ``INSERT`` that has ``on_conflict_do_update`` and ``on_conflict_do_nothing``."""
    return dialect_module(tx.dialect.name).insert(table)


def dialect_module(dialect: str) -> Any:
    """Return SQLAlchemy's module of a dialect; to load the other one too would take 40 ms."""
    return import_module(f"sqlalchemy.dialects.{dialect}")


def lock_experiment(tx: Transaction, experiment: int) -> None:
    """Let this transaction be the only one that appends to ``experiment`` until it ends.

    A position given out under the lock is committed before the next one is given out, so a reader
    that has seen a position has seen every lower one. On SQLite, ``BEGIN IMMEDIATE`` has done it
    already.

    Raises:
        SchemaTooNewError: the store was migrated since it was opened here. On SQLite every
            transaction looks for itself.
    """
    if not tx.lock(experiment):
        revision = tx.execute(_REVISION).scalar()
        raise SchemaTooNewError(
            f"the store was migrated to schema {revision} while it was open here (this is "
            f"{SCHEMA_REVISION}): upgrade with `pip install --upgrade trinity-buffer`"
        )


_REVISION = text("SELECT max(version_num) FROM alembic_version")
