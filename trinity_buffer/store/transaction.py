"""What a database gives its callers: transactions, sessions, statements, and news of commits.

A function of the store is written once, for both databases: ``def f(tx, ...)``. Only `Database`
awaits it. SQL that differs between SQLite and PostgreSQL is built here.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from sqlalchemy import Connection, CursorResult, Executable, Table, create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool

from trinity_buffer import errors
from trinity_buffer.codec.blob import Buffer
from trinity_buffer.store import sqlite
from trinity_buffer.store.sqlite import dbapi2

P = ParamSpec("P")
T = TypeVar("T")

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
    options |= {"poolclass": NullPool, "pool_reset_on_return": None}
    return create_engine(url, creator=lambda: _wrapping.driver, **options)


class TakenKeyError(errors.StoreError):
    """A unique key is taken already, or a check of the database fails."""


POOLED = (
    "is behind a pooler (PgBouncer) that lends a server connection for one transaction: prepared "
    "statements and notifications do not survive that. Connect to PostgreSQL itself, or set "
    "pool_mode = session"
)


@contextmanager
def foreign_errors(name: str) -> Iterator[None]:
    """Turn the database's errors into ours, the most specific first."""
    try:
        yield
    except errors.StoreError:
        raise
    except (DBAPIError, dbapi2.Error) as error:
        raise _translate(error, name) from error
    except OSError as error:
        raise errors.StoreUnavailableError(
            f"{name}: cannot reach the database: {str(error) or 'it does not answer'}"
        ) from error
    except OverflowError as error:
        raise errors.InvalidArgumentError(f"{name}: {_TOO_LARGE} ({error})") from error
    except UnicodeEncodeError as error:  # bytes of a command line that are not UTF-8
        raise errors.InvalidArgumentError(
            f"{name}: {error.object!r:.80} is not valid UTF-8, and nothing in the store has that "
            f"name ({error.reason})"
        ) from error
    except UnicodeDecodeError as error:  # SQLite's message quotes a damaged schema
        raise errors.StoreError(
            f"{name} is damaged, its schema is not valid text ({error}): put a copy back"
        ) from error


FOREIGN = (DBAPIError, dbapi2.Error, OSError, OverflowError, UnicodeError)
"""What `foreign_errors` translates. Who comes by often enters it only to raise one."""


def _translate(error: Exception, name: str) -> Exception:
    cause = " ".join(str(getattr(error, "orig", error)).split())
    if isinstance(error, (IntegrityError, dbapi2.IntegrityError)):
        return TakenKeyError(f"{name}: {cause}")
    # A server's words are those of its language, its SQLSTATE is not.
    lowered = f"{cause} ({getattr(getattr(error, 'orig', None), 'sqlstate', '')})".lower()
    if lowered.endswith("(22003)"):
        return errors.InvalidArgumentError(f"{name}: {_TOO_LARGE} ({cause})")
    for words, kind, what in _MEANINGS:
        if any(word in lowered for word in words):
            return kind(what.format(name=name, cause=cause, busy_s=sqlite.BUSY_TIMEOUT_MS // 1000))
    return errors.StoreError(f"{name}: {cause}")


_TOO_LARGE = "a number is larger than a store can hold"
_MEANINGS: tuple[tuple[tuple[str, ...], type[errors.StoreError], str], ...] = (
    (
        ("database is locked", "database is busy", "(55p03)"),
        errors.StoreBusyError,
        "{name}: another process held the database for over {busy_s} s; "
        "`trinity-buffer stats` shows what is at work",
    ),
    (
        ("readonly database", "(25006)"),
        errors.ReadOnlyStoreError,
        "{name} cannot be written: {cause}",
    ),
    (
        ("not a database", "file is encrypted"),
        errors.UnknownStoreError,
        "{name} is not a Trinity Buffer store, nor a SQLite database",
    ),
    (
        ("prepared statement", "statement pooling mode"),
        errors.UnsafeStoreError,
        "{name} " + POOLED + " ({cause})",
    ),
    (
        ("no space left", "disk is full", "(53100)"),
        errors.StoreError,
        "{name}: the disk is full; nothing of this transaction was written",
    ),
)


class Owner:
    """The process and the event loop that opened a database.

    Connections, their threads and waiting tasks belong to both: elsewhere a call would hang, or
    corrupt the file.

    Args:
        name: of the database, for messages.

    Raises:
        StoreUseError: no event loop of asyncio runs here.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None  # the first that `require` sees
        self.require()

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the database."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Refuse all further use of the database."""
        self._closed = True

    def require_process(self, *, closed_too: bool = False) -> None:
        """Raise unless this is the process that opened the database, which is open still.

        Args:
            closed_too: the database may be closed.

        Raises:
            StoreUseError: it is closed, or this is a forked child.
        """
        if os.getpid() != self._pid:
            raise errors.StoreUseError(
                f"{self._name} was opened by process {self._pid} and forked into {os.getpid()}: "
                "start the child with spawn or forkserver, or fork it before the store is opened"
            )
        if self._closed and not closed_too:
            raise errors.StoreUseError(f"{self._name} is closed: use it inside its `with` block")

    def require(self) -> None:
        """Raise unless the caller may use the database.

        Raises:
            StoreUseError: it is closed, or was opened by another process or event loop.
        """
        if self._closed or os.getpid() != self._pid:
            self.require_process()
        try:
            running = asyncio.get_running_loop()
        except RuntimeError as error:
            raise errors.StoreUseError(
                f"{self._name} needs an event loop of asyncio, and none runs here (trio is not "
                "supported): use asyncio.run, or anyio.run with the backend asyncio"
            ) from error
        self._loop = self._loop or running
        if running is not self._loop:
            raise errors.StoreUseError(
                f"{self._name} was opened in another event loop: open it in each loop that uses it"
            )


class Changes:
    """Wakes tasks that wait for the next commit.

    The pattern: take ``state()``, read, and if there was nothing, ``await changed(state)``: a
    commit between the two returns at once. The wait may return early; callers read again.

    Args:
        owner: may ask; once it is closed, every call fails, those that wait included.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._own = 0
        self._event = asyncio.Event()

    def notify(self, commits: int = 1) -> None:
        """Wake tasks of this process: its own commits do not reach it through the database.

        Args:
            commits: 0 where they are to look whether there was one.
        """
        self._own += commits
        self._event.set()
        self._event = asyncio.Event()


class Transaction:
    """An open transaction. Made by `Database.read`, `Database.write` and sessions.

    Args:
        engine: of SQLAlchemy, made by `engine_without_connections`.
        driver: the driver's connection, in autocommit, while no transaction is open.

    Attributes:
        driver: the driver's connection.
        dialect: of SQLAlchemy; its ``name`` is ``"sqlite"`` or ``"postgresql"``.
        seen: (experiment, position, head) of events that were read of its log: the last of each
            page. Those of an old log have no head.
        appended: experiment -> (position, head) of the last event that was appended.
    """

    def __init__(self, engine: Engine, driver: Any) -> None:
        _wrapping.driver = driver
        self.driver = driver
        self._connection = engine.connect()
        self.dialect = engine.dialect
        self.seen: list[tuple[int, int, bytes | None]] = []
        self.appended: dict[int, tuple[int, bytes]] = {}

    @property
    def connection(self) -> Connection:
        """SQLAlchemy's connection inside the transaction, for DDL, inspection and migrations."""
        if not self._connection.in_transaction():
            self._connection.begin()
        return self._connection

    def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[*Any]:
        """Execute a statement of SQLAlchemy Core."""
        return self.connection.execute(statement, parameters)

    def fetch_all(self, sql: Statement | str, values: Any) -> list[tuple[Any, ...]]:
        """Execute a statement, or SQL of the driver's own style, and return all rows.

        Args:
            sql: what is executed.
            values: of its places: of a statement by name, else as the driver takes them.
        """
        raise NotImplementedError

    def execute_later(self, sql: Statement | str, values: Any) -> object:
        """Execute a statement without rows, at the latest before the next `fetch_all`.

        Its errors are raised then.
        """
        raise NotImplementedError

    def lock(self, experiment: int) -> None:
        """Let this transaction be the only one that appends to ``experiment`` until it ends.

        A position given out under the lock is committed before the next one is given out, so a
        reader that has seen a position has seen every lower one. On SQLite there is nothing to do:
        BEGIN IMMEDIATE has locked the database, and the schema was checked.

        Raises:
            SchemaTooNewError: the store was migrated since it was opened here; on a server it is
                raised by the next statement.
        """

    def insert_many(self, table: Table, rows: Sequence[tuple[Any, ...]], more: str = "") -> None:
        """Insert ``rows``, each with all columns of ``table`` in their order.

        They go past SQLAlchemy's work on each, so the columns must be of types that need no
        processing (numbers, texts, bytes, booleans).

        Args:
            table: gets them.
            rows: few, if there is ``more``.
            more: the end of the statement: what becomes of a row that is there already.
        """
        raise NotImplementedError

    def insert_blobs(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert ``rows`` as `insert_many` does, the last column of each a blob in pieces."""
        self.insert_many(table, [(*row[:-1], b"".join(row[-1])) for row in rows])

    def with_blobs(
        self,
        table: Table,  # noqa: ARG002 - SQLite asks it for the place of a blob
        rows: list[tuple[Any, ...]],
    ) -> list[tuple[Any, ...]]:
        """Return rows of ``table`` with their last column, a blob.

        SQLite selects a long one as NULL with its place, and reads it here piece by piece.
        """
        return rows

    def announce(self) -> None:
        """Notify the other processes at the commit; one of SQLite they see by themselves."""


Ends: TypeAlias = dict[int, tuple[int, bytes]]
"""Experiment -> (position, head) of the last event that a process saw of its log."""


def note_ends(ends: Ends, tx: Transaction) -> None:
    """Note the last events that a transaction saw, or appended."""
    appended = [(experiment, *place) for experiment, place in tx.appended.items()]
    for experiment, position, head in tx.seen + appended:
        if head is not None and ends.get(experiment, (0, b""))[0] < position:
            ends[experiment] = (position, bytes(head))


InTransaction: TypeAlias = Callable[Concatenate[Transaction, P], T]
"""A function ``f(tx, ...)`` of the store."""

OF_ONE_STATEMENT: set[Callable[..., Any]] = set()
"""The functions that `one_statement` marked."""


def one_statement(f: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that executes at most one statement, which reads: it sees one state anyway.

    To begin and end a transaction around it would take two more round trips to a server.
    """
    OF_ONE_STATEMENT.add(f)
    return f


@dataclass(slots=True)
class ReadSession:
    """Several short transactions and the computing between them, on one trip.

    It runs in the thread of a connection, where everything is a plain call.

    Args:
        name: of the database, for messages.
        get: returns the parts of some segments, as `SegmentStore.get` does.
        once: where a server is away, it is not tried again.

    Attributes:
        run: runs a function in a transaction of the connection.
        wrote: whether a transaction that writes has committed.
    """

    name: str
    get: Callable[[ReadSession, Sequence[bytes], Sequence[str]], SegmentParts]
    once: bool = False
    run: Callable[..., Any] = field(init=False)
    wrote: bool = False

    def read(self, f: InTransaction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``f(tx, ...)`` of a transaction that sees one state and changes nothing."""
        return self._run(f, args, kwargs, writes=False)

    def _run(self, f: Callable[..., T], args: Any, kwargs: Any, *, writes: bool) -> T:
        try:
            done: T = self.run(f, args, kwargs, writes=writes, once=self.once)
        except FOREIGN:
            with foreign_errors(self.name):
                raise
        return done

    def segments(self, keys: Sequence[bytes], families: Sequence[str]) -> SegmentParts:
        """Return the parts of some segments."""
        return self.get(self, keys, families)


class Session(ReadSession):
    """A `ReadSession` that writes too."""

    def write(self, f: InTransaction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``f(tx, ...)`` of a writing transaction, which has committed."""
        done = self._run(f, args, kwargs, writes=True)
        self.wrote = True
        return done


class Statement:
    """SQL of both databases: it runs with plain values, each named ``:so``, and gives plain tuples.

    SQLAlchemy takes some 100 µs to build, look up and execute a statement of which SQLite itself
    needs five. So what runs in every transaction of a writer or a trainer is text.

    What the databases write differently:

    - ``IN INTS(:x)``, ``IN TEXTS(:x)``, ``IN BYTES(:x)``: in a list of any length, as one value;
    - ``ROWS(text, bigint)``: a table with the columns c0, c1 and so on, of the one or more rows in
      the value ``rows``;
    - ``OFFSET 0`` at the end of an EXISTS, which is then asked for each row. Of a plain one
      PostgreSQL makes a join: without statistics, one that compares every row with every other.

    Booleans come back from SQLite as 0 and 1.

    Args:
        sql: the statement.
        postgresql: the same for PostgreSQL, where it needs other words.

    Attributes:
        sqlite, postgresql: the text for each database.
        lists: name of each value that is a list -> its kind.
        has_rows: whether one is ``rows``.
        names: of the numbered places on PostgreSQL.
    """

    def __init__(self, sql: str, postgresql: str = "") -> None:
        self.sqlite = _LIST.sub(_in_json, sql)
        self.sqlite = _ROWS.sub(_rows_of_json, self.sqlite).replace(" OFFSET 0", "")
        self.lists = {name: kind for kind, name in _LIST.findall(sql)}
        self.has_rows = _ROWS.search(sql) is not None
        numbered = _LIST.sub(_in_array, postgresql or sql)
        numbered = _ROWS.sub(_rows_of_arrays, numbered)
        # Numbered once for each name, which has one type then.
        self.names = list(dict.fromkeys(_PLACE.findall(numbered)))
        self.postgresql = _PLACE.sub(lambda m: f"${self.names.index(m[1]) + 1}", numbered)

    def fetch_all(self, tx: Transaction, **values: object) -> list[tuple[Any, ...]]:
        """Execute it, and return all rows."""
        return tx.fetch_all(self, values)

    def execute_later(self, tx: Transaction, **values: object) -> None:
        """Execute it, as `Transaction.execute_later` does."""
        tx.execute_later(self, values)

    def value(self, tx: Transaction, **values: object) -> Any:
        """Execute it, and return the first column of its first row; None without rows."""
        rows = tx.fetch_all(self, values)
        return rows[0][0] if rows else None


_PLACE = re.compile(r"(?<!:):(\w+)")
_LIST = re.compile(r"IN (INTS|TEXTS|BYTES)\(:(\w+)\)")
_ROWS = re.compile(r"ROWS\(([\w, ]+)\)")


def _in_json(match: re.Match[str]) -> str:
    value = "unhex(value)" if match[1] == "BYTES" else "value"
    return f"IN (SELECT {value} FROM json_each(:{match[2]}))"


def _in_array(match: re.Match[str]) -> str:
    # Numbers go as texts too: of a list of numbers the driver would look at each for its type.
    types = {"INTS": "text[]::bigint[]", "TEXTS": "text[]", "BYTES": "bytea[]"}
    return f"= ANY(:{match[2]}::{types[match[1]]})"


def _rows_of_json(match: re.Match[str]) -> str:
    columns = range(len(match[1].split(",")))
    each = ", ".join(f"json_extract(value, '$[{n}]') AS c{n}" for n in columns)
    return f"(SELECT {each} FROM json_each(:rows))"


def _rows_of_arrays(match: re.Match[str]) -> str:
    kinds = match[1].split(", ")
    arrays = ", ".join(f":column{n}::text[]::{kind}[]" for n, kind in enumerate(kinds))
    return f"unnest({arrays}) AS given({', '.join(f'c{n}' for n in range(len(kinds)))})"
