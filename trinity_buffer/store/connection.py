"""Connections to a database and transactions on them: SQLite's own, and `Database` for both.

On SQLite a whole function runs in the thread of one of aiosqlite's connections. A statement takes
some microseconds, and going to the thread and back for each would cost ten times that.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, nullcontext, suppress
from copy import copy
from fcntl import F_UNLCK
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, ParamSpec, Self, TypeVar

import aiosqlite
import anyio
import anyio.to_thread
from sqlalchemy import Table
from sqlalchemy.engine import URL, Engine
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.codec.blob import Buffer, mapped
from trinity_buffer.limits import sizes
from trinity_buffer.store import log, schema, sqlite, transaction
from trinity_buffer.store.notify import PostgresChanges, SQLiteChanges
from trinity_buffer.store.postgres import Outage, Server
from trinity_buffer.store.segments import SegmentStore
from trinity_buffer.store.sqlite import Checkpointer, StoreFiles, WriterQueue, dbapi2
from trinity_buffer.store.transaction import InTransaction, ReadSession, Session
from trinity_buffer.store.url import WRITE_FIRST, StoreURL, nothing_at, parse_url, reconnect_s_of

P = ParamSpec("P")
T = TypeVar("T")

FILLED_BYTES = 1 << 15
"""From this size a blob is written piece by piece; binding a few pages is as quick."""

TRANSACTIONS = 4
"""Transactions at the same time. One of them may write: SQLite allows no second one."""


class SQLiteTransaction(transaction.Transaction):
    """A connection in autocommit, whose transactions `run` begins and ends, one after another.

    Args:
        driver: the connection. No transaction may be open.
        files: what the connection has open.
        check: raises unless the schema is the one of this version, and the logs have their ends.
        queue: which a writing transaction waits in.
        ends: what was seen of each log, over all connections.
    """

    def __init__(
        self,
        driver: Any,
        files: StoreFiles,
        check: Callable[[transaction.Transaction, transaction.Ends], None] | None = None,
        queue: WriterQueue | None = None,
        ends: transaction.Ends | None = None,
    ) -> None:
        super().__init__(_engine(), driver)
        self._files = files
        self._check = check
        self._queue = queue
        self._ends = {} if ends is None else ends
        self._schema = -1

    @override
    def fetch_all(self, sql: transaction.Statement | str, values: Any) -> list[tuple[Any, ...]]:
        """Execute a statement, or SQL of the driver's own style, and return all rows."""
        if isinstance(sql, transaction.Statement):
            for name, kind in sql.lists.items():
                texts = map(bytes.hex, values[name]) if kind == "BYTES" else values[name]
                values[name] = json.dumps(list(texts))
            if sql.has_rows:
                values["rows"] = json.dumps(values["rows"])
            sql = sql.sqlite  # it binds by name, and passes over the others
        rows: list[tuple[Any, ...]] = self.driver.execute(sql, values).fetchall()
        return rows

    execute_later = fetch_all  # to wait for company would save nothing

    @override
    def insert_many(self, table: Table, rows: Sequence[tuple[Any, ...]], more: str = "") -> None:
        """Insert ``rows``, each with all columns of ``table`` in their order."""
        size = sizes.rows_per_statement
        whole = len(rows) - len(rows) % size
        for start in range(0, whole, size):
            values = chain.from_iterable(rows[start : start + size])
            self.driver.execute(_insert(table, size) + more, tuple(values))
        if whole < len(rows):
            self.driver.executemany(_insert(table, 1) + more, rows[whole:])

    @override
    def insert_blobs(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert ``rows``, the last column of each a blob in pieces.

        Bytes that are bound to a statement are copied for it, and again into the row that it makes.
        So room is made for what is long, and filled piece by piece: that takes less than half as
        long, and no memory beside SQLite's own pages.
        """
        short: list[tuple[Any, ...]] = []
        for *others, pieces in rows:
            size = sum(map(len, pieces))
            if size < FILLED_BYTES:
                short.append((*others, b"".join(pieces)))
                continue
            room_for = _insert(table, 1, "zeroblob(?)")
            row = self.driver.execute(room_for, (*others, size)).lastrowid
            place = (table.name, table.columns.keys()[-1], row)
            with closing(sqlite.open_blob(self.driver, *place)) as room:
                for piece in pieces:
                    room.write(piece)
        self.insert_many(table, short)

    @override
    def with_blobs(self, table: Table, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return ``rows`` without (rowid, size) at their end; a long blob in place of its NULL."""
        return [
            (*first, self._long_blob(table, row, size) if data is None else data)
            for *first, data, row, size in rows
        ]

    def _long_blob(self, table: Table, row: int, size: int) -> Buffer:
        """Return the last column of a row, read piece by piece into memory of its own."""
        memory, step = mapped(size), sizes.bytes_read_at_once
        place = (table.name, table.columns.keys()[-1], row)
        with closing(sqlite.open_blob(self.driver, *place, read_only=True)) as stored:
            for start in range(0, size, step):
                memory[start : start + step] = stored.read(min(step, size - start))
        return memory

    def run(
        self,
        f: Callable[..., T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        writes: bool,
        once: bool = False,  # noqa: ARG002 - a server may be away
    ) -> T:
        """Return ``f(tx, ...)``, in a transaction of its own."""
        self.seen, self.appended = [], {}
        known = dict(self._ends)  # before the transaction, which sees no later event
        queue = self._queue if writes else None
        if queue is not None:
            queue.acquire()
        # A deferred transaction that is upgraded later fails without waiting for the busy timeout:
        # writers take the lock at once.
        try:
            self.driver.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            if self._check is not None:
                ((version,),) = self.driver.execute("PRAGMA schema_version")  # counts changes
                if version != self._schema:  # another process may migrate it, or restore a backup
                    self._check(self, known)
                    self._schema = version
            done = f(self, *args, **kwargs)
            self.driver.execute("COMMIT")
        except BaseException:
            if self.driver.in_transaction:  # a full disk may have rolled back already
                self.driver.execute("ROLLBACK")
            raise
        finally:
            if queue is not None:
                queue.release()
            if self._connection.in_transaction():  # in SQLAlchemy's idea; nothing is left to undo
                self._connection.rollback()
        self._files.check()  # after reads too: a caller may take what it read for safe
        transaction.note_ends(self._ends, self)
        return done

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self.driver.close()


@cache
def _insert(table: Table, rows: int, last: str = "?") -> str:
    """Return the statement for so many rows, whose places are all positional.

    Args:
        table: gets them.
        rows: how many.
        last: what stands in the place of the last column.
    """
    row = f"({'?, ' * (len(table.columns) - 1)}{last})"
    return f"INSERT INTO {table.name} VALUES {', '.join([row] * rows)}"


@cache
def _engine() -> Engine:
    """Return the engine that all connections share."""
    return transaction.engine_without_connections("sqlite://", module=dbapi2)


Connect = Callable[[], SQLiteTransaction]
"""Returns a new connection."""


class _Runner:
    """Runs functions in place of a connection of ``sqlite3``, in aiosqlite's thread.

    aiosqlite does not check what its ``connector`` returns: it only calls its methods there.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._tx: SQLiteTransaction | None = None  # connected on the first trip

    def execute(self, work: Callable[[Session], Any], session: Session) -> SimpleNamespace:
        answers: list[tuple[bool, Any]] = []
        try:
            self._tx = self._tx or self._connect()
            session.run = self._tx.run
            answers.append((True, work(session)))
        except BaseException as error:  # noqa: BLE001 - raised again by `ConnectionPool.run_in_thread`; set on a future, a StopIteration would never arrive
            answers.append((False, error))
        return SimpleNamespace(fetchall=answers.pop)  # else the error would refer to itself

    def close(self) -> None:
        if self._tx is not None:
            self._tx.close()


class ConnectionPool:
    """Connections to one file. Each call has one for itself.

    Args:
        connect: returns a new connection.
        number: of connections, and so of transactions at the same time.
    """

    def __init__(self, connect: Connect, number: int = TRANSACTIONS) -> None:
        self._connect = connect
        self._free = anyio.Semaphore(number, fast_acquire=True)
        self._write_lock = anyio.Lock(fast_acquire=True)
        self._idle: list[aiosqlite.Connection] = []

    async def run_in_thread(
        self, work: Callable[[Session], T], session: Session, *, writes: bool
    ) -> T:
        """Return ``work(session)``, in the thread of a connection; one at a time ``writes``.

        Once begun, it goes on to its end (`Database.session`).
        """
        async with self._write_lock if writes else nullcontext():
            with anyio.CancelScope(shield=True):
                async with self._free:
                    connection = self._idle.pop() if self._idle else await self._opened()
                    # The one public method that goes to the thread once: it executes, fetches and
                    # returns.
                    execute: Any = connection.execute_fetchall
                    try:
                        succeeded, answer = await execute(work, session)
                    finally:
                        self._idle.append(connection)
        if not succeeded:
            raise answer
        done: T = answer
        return done

    def one_more(self) -> ConnectionPool:
        """Return one more connection; its temporary tables are its own."""
        return ConnectionPool(self._connect, number=1)

    async def _opened(self) -> aiosqlite.Connection:
        """Return a new connection, whose thread does not keep the interpreter from ending."""
        made: list[aiosqlite.Connection] = []

        def make() -> None:
            runner: Any = _Runner(self._connect)
            made.append(aiosqlite.Connection(lambda: runner, iter_chunk_size=64))

        # A thread inherits being a daemon from the one that makes it.
        maker = threading.Thread(target=make, daemon=True)
        maker.start()
        maker.join()
        return await made[0]

    async def close(self) -> None:
        """Close every connection."""
        while self._idle:
            await self._idle.pop().close()


Durability = Literal["normal", "full"]
COMPUTED_AT_ONCE = 2
"""Most computations hold the interpreter's lock: more would only wait."""


class Database:
    """Connections to one database. Opened with `open_database`, closed by leaving its context.

    Attributes:
        dialect: ``"sqlite"`` or ``"postgresql"``.
        name: the URL without its password, for messages.
        path: the file of a SQLite store, whatever folder the process goes to later.
        version: of the database library or server.
        segments: where the blobs of its segments are kept.
        owner: says who may use it.
        connections: run functions in their threads.
        changes: news of commits.
    """

    def __init__(self, url: URL, *, read_only: bool, durability: Durability) -> None:
        self.url = url
        self.name = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)
        self.dialect = url.get_backend_name()
        self.path = Path(url.database or "").absolute()
        self.read_only = read_only
        self.durability = durability
        self.version = ""
        self.segments: SegmentStore = SegmentStore()
        self._outage = Outage(self.name)
        self._computing = anyio.CapacityLimiter(COMPUTED_AT_ONCE)
        writes_file = self.dialect == "sqlite" and not read_only
        self._checkpointer = Checkpointer(self.path) if writes_file else None
        self._queue = WriterQueue(self.path) if writes_file else None
        self.connections: ConnectionPool | Server
        self.changes: SQLiteChanges | PostgresChanges
        self.owner: transaction.Owner
        self._ends: transaction.Ends = {}
        self._any_revision = False
        self._still = False

    @property
    def folder(self) -> Path | None:
        """The folder that a SQLite store lies in; None for a server."""
        return self.path.parent if self.dialect == "sqlite" else None

    def require_writable(self) -> None:
        """Raise if the store is open read-only.

        Raises:
            ReadOnlyStoreError: it is.
        """
        if self.read_only:
            raise errors.ReadOnlyStoreError(
                f"{self.name} is open read-only; open it without read_only to write"
            )

    async def read(self, f: InTransaction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``f(tx, ...)`` of a transaction that sees one state and changes nothing.

        Once begun, it goes on to its end (`session`). So ``f`` must be short, well below a second,
        and wait for nothing but ``tx``.
        """
        return await self.session(lambda s: s.read(f, *args, **kwargs), writes=False)

    async def write(self, f: InTransaction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``f(tx, ...)`` of the one writing transaction, which has committed.

        It goes on to its end, as in `read`; ``f`` must compute nothing. It rolls back on an error.

        Raises:
            TakenKeyError: a unique key is taken.
        """
        return await self.session(lambda s: s.write(f, *args, **kwargs))

    async def try_to_write(
        self, f: InTransaction[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Write as `write` does, once; where the store cannot be reached, do without.

        For the last write of a process that ends: it does not wait for a server that is away.
        """
        self.owner.require()
        with suppress(errors.StoreError):
            await self.session(lambda s: s.write(f, *args, **kwargs), once=True)

    async def read_session(self, work: Callable[[ReadSession], T]) -> T:
        """Return ``work(session)`` of a `session` that does not write, and blocks no writer."""
        return await self.session(work, writes=False)

    async def session(
        self, work: Callable[[Session], T], *, writes: bool = True, once: bool = False
    ) -> T:
        """Return ``work(session)``: short transactions, and what is computed between them.

        It runs as a whole in the thread of a connection: going there and back once costs less than
        doing so for each transaction. Where its caller is cancelled it goes on to its end: a
        cancellation of a scope waits for that, one by `asyncio.Task.cancel` does not. On SQLite no
        other task of this process writes as long as it runs.

        Args:
            work: is run once.
            writes: whether it may write.
            once: where a server is away, do not try again.
        """
        self.owner.require()
        if writes and self.read_only:
            self.require_writable()
        session = Session(self.name, self.segments.get, once)
        try:
            return await self.connections.run_in_thread(work, session, writes=writes)
        finally:
            if session.wrote:  # tasks of this process that wait for a commit
                self.changes.notify()
                if self._checkpointer is not None:
                    self._checkpointer.notify()

    @asynccontextmanager
    async def dedicated_connection(self) -> AsyncIterator[Database]:
        """Open one more connection; the tables and views that `read` makes there are temporary.

        They hide those of the same names.
        """
        self.owner.require()
        apart = copy(self)
        apart.connections = self.connections.one_more()
        try:
            yield apart
        finally:
            with anyio.CancelScope(shield=True):
                await apart.connections.close()

    async def compute(self, f: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``f(...)``, computed in a thread."""
        self.owner.require()
        return await anyio.to_thread.run_sync(partial(f, *args, **kwargs), limiter=self._computing)

    async def open(
        self, stack: AsyncExitStack, *, any_revision: bool = False, create: bool = True
    ) -> Self:
        """Check, connect, create what is missing; whatever is opened is closed by ``stack``.

        Args:
            create: False where a store that is not there is an error.
            any_revision: take the schema as it is and create nothing; for migrations.
        """
        self.owner = transaction.Owner(self.name)
        self._any_revision = any_revision
        if self.dialect == "sqlite":
            await self._open_file(stack, create=create)
        else:
            await self._open_server(stack)
        stack.callback(self.owner.close)
        if not any_revision and not await self.read(schema.inspect, self.name):
            if self.read_only or not create:
                remedy = "" if self.read_only else WRITE_FIRST
                raise errors.UnknownStoreError(
                    f"{self.name} is empty: there is no store to read{remedy}"
                )
            await self.write(schema.create, self.name)
        if not any_revision:  # to open or migrate fails at once where the server is away
            self._outage.reconnect_s = reconnect_s_of(self.url)
        return self

    async def _open_file(self, stack: AsyncExitStack, *, create: bool) -> None:
        self.version = sqlite.require_safe_library()
        if not sqlite.check_path(self.path, read_only=self.read_only) and not create:
            raise nothing_at(self.path, read_only=False)
        self._still = self.read_only and sqlite.is_still(self.path)
        with transaction.foreign_errors(self.name):
            if not (self.read_only or self._any_revision):
                await anyio.to_thread.run_sync(sqlite.prepare_file, self.path)
            here = stack.enter_context(sqlite.open_here(self.path))
        files = StoreFiles(self.path, with_log=not self.read_only or self._still)
        self.connections = ConnectionPool(partial(self._connect, files))
        stack.push_async_callback(self._close)
        with transaction.foreign_errors(self.name):
            self.changes = SQLiteChanges(self.path, self.owner, files, still=self._still)
        stack.push_async_callback(self.changes.close)
        # Only when a row is read does SQLite open the log.
        await self.read(lambda tx: tx.fetch_all("SELECT count(*) FROM sqlite_master", ()))
        here.lock_log()
        stack.callback(here.lock_log, F_UNLCK)
        files.check(note=True)

    async def _open_server(self, stack: AsyncExitStack) -> None:
        address = self.url
        # One of several hosts, or one whose place a standby takes that is not promoted yet.
        if not self.read_only and "target_session_attrs" not in address.query:
            address = address.update_query_dict({"target_session_attrs": "primary"})
        is_timed = not self._any_revision  # a migration takes as long as it takes
        self.connections = server = Server(address, self.name, self._outage, is_timed=is_timed)
        stack.push_async_callback(self._close)
        self.changes = PostgresChanges(address, self.name, self.owner, self._outage)
        stack.push_async_callback(self.changes.close)
        with transaction.foreign_errors(self.name):
            self.version = await server.require_suitable()

    async def _close(self) -> None:
        if self.owner.forked:  # the threads are the parent's, and the files are its to close
            return
        self._outage.closed.set()
        with anyio.CancelScope(shield=True):
            if self._checkpointer is not None:
                await anyio.to_thread.run_sync(self._checkpointer.close)
            await self.connections.close()
        if self._queue is not None:
            self._queue.close()

    def _connect(self, files: StoreFiles) -> SQLiteTransaction:
        """Open one connection to a SQLite file."""
        files.check()  # what is there now may be another database
        name = sqlite.uri_of(self.path, writes=not self.read_only, still=self._still)
        with transaction.foreign_errors(self.name):
            driver = dbapi2.connect(name, uri=True, isolation_level=None, cached_statements=256)
            for statement in sqlite.pragmas(durability=self.durability, read_only=self.read_only):
                driver.execute(statement)
        check = None if self._any_revision else self._inspect
        return SQLiteTransaction(driver, files, check, self._queue, self._ends)

    def _inspect(self, tx: transaction.Transaction, known: transaction.Ends) -> None:
        """Raise unless the schema is ours, and the logs have the events that are ``known``."""
        if schema.inspect(tx, self.name):
            log.require_ends(tx, self.name, known)


@asynccontextmanager
async def open_for_migration(url: StoreURL) -> AsyncIterator[Database]:
    """Open the database at ``url`` at any revision, changing nothing.

    Raises:
        UnknownStoreError: nothing there.
        UnsafeStoreError: a network file system, or a SQLite library that may lose commits.
    """
    async with AsyncExitStack() as stack:
        database = Database(parse_url(url), read_only=False, durability="normal")
        if database.dialect == "sqlite":
            sqlite.check_path(database.path, read_only=True)  # there must be something already
        yield await database.open(stack, any_revision=True)


@asynccontextmanager
async def open_database(
    url: StoreURL,
    *,
    read_only: bool = False,
    durability: Durability = "normal",
    create: bool = True,
) -> AsyncIterator[Database]:
    """Open the database at ``url``, creating the schema in an empty one if ``create``.

    Raises:
        UnknownStoreError: nothing there to read, a missing folder, or a database that is not ours.
        SchemaOutdatedError: written by an older version.
        SchemaTooNewError: written by a newer version.
        UnsafeStoreError: a network file system, or a SQLite library that may lose commits.
    """
    if durability not in ("normal", "full"):
        raise errors.InvalidArgumentError(
            f"durability={durability!r}: accepted are 'normal' and 'full'"
        )
    async with AsyncExitStack() as stack:
        database = Database(parse_url(url), read_only=read_only, durability=durability)
        yield await database.open(stack, create=create)
