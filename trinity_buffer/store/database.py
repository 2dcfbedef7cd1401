"""One database, SQLite or PostgreSQL: connections, transactions, and news of changes."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import anyio
import anyio.to_thread
from sqlalchemy import event as listen_to
from sqlalchemy import make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import greenlet_spawn

from trinity_buffer.errors import (
    InvalidArgumentError,
    ReadOnlyStoreError,
    UnknownStoreError,
)
from trinity_buffer.store import schema, sqlite, sqlite_driver
from trinity_buffer.store.changes import Changes, PostgresChanges, SQLiteChanges
from trinity_buffer.store.checkpoint import Checkpointer
from trinity_buffer.store.foreign_errors import foreign_errors
from trinity_buffer.store.inline import InlineConnection, to_its_end

T = TypeVar("T")

Durability = Literal["normal", "full"]
READERS = 2
"""Connections that only read. One more writes; on SQLite there can be no second writer anyway."""


def parse_url(url: str) -> URL:
    """Return the parsed URL of a store; a bare path is a SQLite file.

    Raises:
        InvalidArgumentError: neither sqlite nor postgresql.
    """
    try:
        parsed = make_url(url) if "://" in url else URL.create("sqlite", database=url)
    except (ArgumentError, ValueError) as error:  # the latter for a port that is no number
        raise InvalidArgumentError(f"the store's URL cannot be read; {_ACCEPTED}") from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise InvalidArgumentError(
                "a store in memory would not survive anything; name a file: sqlite:///runs/a.db"
            )
        return parsed.set(drivername=f"sqlite+{sqlite_driver.NAME}")
    if backend == "postgresql":
        if "@" in (parsed.host or ""):  # else the rest of the password would be shown as the host
            raise InvalidArgumentError("the store's URL cannot be read; in a password @ is %40")
        query = {"sslmode" if key == "ssl" else key: value for key, value in parsed.query.items()}
        for key in query.keys() - _POSTGRESQL_QUERY:
            raise InvalidArgumentError(
                f"the store's URL has {key}=: accepted behind the ? are "
                f"{', '.join(sorted(_POSTGRESQL_QUERY))}"
            )
        return parsed.set(drivername="postgresql+asyncpg", query=query)
    raise InvalidArgumentError(f"a store cannot live in {backend!r}; {_ACCEPTED}")


_POSTGRESQL_QUERY = frozenset({"host", "port", "sslmode"})
_ACCEPTED = "accepted are sqlite:///path/to/file.db and postgresql://user@host/database"


class _Trip(threading.local):
    """What a thread works with while it runs something `Database.together`.

    Attributes:
        connection: None: this thread is not on a trip.
        wrote: whether there was a writing transaction.
    """

    connection: InlineConnection | None = None
    wrote: bool = False


class Database:
    """Connections to one database. Opened with `open_database`, closed by leaving its context.

    Attributes:
        dialect: ``"sqlite"`` or ``"postgresql"``.
        name: the URL without its password, for messages.
        version: of the database library or server.
    """

    def __init__(self, url: URL, *, read_only: bool, durability: Durability) -> None:
        self.url = url
        self.name = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)
        self.dialect = url.get_backend_name()
        self.read_only = read_only
        self.durability = durability
        self.version = ""
        self._write_lock = anyio.Lock(fast_acquire=True)
        # Of SQLite's connections, those for whole transactions are kept out of the pool, whose
        # ways in and out take longer than many a transaction.
        self._seats = anyio.Semaphore(READERS + 1, fast_acquire=True)
        self._idle: list[PoolProxiedConnection] = []
        self._trip = _Trip()
        self._checkpointer = None if read_only else self._new_checkpointer()
        self._engine: AsyncEngine
        self._writer: AsyncEngine  # the same connections, for transactions that write
        self.changes: Changes

    def _new_checkpointer(self) -> Checkpointer | None:
        return Checkpointer(self.path) if self.dialect == "sqlite" else None

    @property
    def path(self) -> Path:
        """The file of a SQLite store."""
        return Path(self.url.database or "")

    def require_writable(self) -> None:
        """Do nothing, unless the store is open read-only.

        Raises:
            ReadOnlyStoreError: it is.
        """
        if self.read_only:
            raise ReadOnlyStoreError(
                f"{self.name} is open read-only; open it without read_only to write"
            )

    @asynccontextmanager
    async def writing(self, *, integrity_errors: bool = False) -> AsyncIterator[AsyncConnection]:
        """Open the one writing transaction; it commits on leaving, or rolls back on an error.

        The body is shielded: a cancellation takes effect after it. So it must be short, and compute
        nothing.

        Args:
            integrity_errors: raise `TakenKeyError` for a unique key that is taken.
        """
        self.require_writable()
        async with AsyncExitStack() as stack:
            if self.dialect == "sqlite":
                await stack.enter_async_context(self._write_lock)
            with (
                anyio.CancelScope(shield=True),
                foreign_errors(self.name, integrity=integrity_errors),
            ):
                async with self._writer.connect() as connection, connection.begin():
                    yield connection
        self._noticed()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that sees one state and changes nothing. Keep it below a second."""
        with anyio.CancelScope(shield=True), self._errors():
            async with self._engine.connect() as connection, connection.begin():
                yield connection

    async def write(
        self,
        work: Callable[[AsyncConnection], Awaitable[T]],
        *,
        before: Callable[[], None] | None = None,
        integrity_errors: bool = False,
    ) -> T:
        """Return what ``work(tx)`` returns, in a writing transaction; it waits for ``tx`` alone.

        The same as `writing`, in one trip to SQLite's thread instead of one for each statement.

        Args:
            before: computes something for ``work``, in a thread, before the transaction begins; on
                SQLite that is the same trip.
        """
        if self.dialect != "sqlite" or self.read_only:
            self.require_writable()
            if before is not None:
                await anyio.to_thread.run_sync(before)
            async with self.writing(integrity_errors=integrity_errors) as tx:
                return await work(tx)

        def run(connection: InlineConnection) -> T:
            if before is not None:
                before()
            return connection.transact("BEGIN IMMEDIATE", work)

        if self._trip.connection is not None:
            self._trip.wrote = True
            with foreign_errors(self.name, integrity=integrity_errors):
                return run(self._trip.connection)
        async with self._write_lock:
            done = await self._inline(run, integrity=integrity_errors)
        self._noticed()
        return done

    async def read(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Return what ``work(tx)`` returns, in a transaction as `reading` opens it."""
        if self.dialect != "sqlite":
            async with self.reading() as tx:
                return await work(tx)
        if self._trip.connection is not None:
            with self._errors():
                return self._trip.connection.transact("BEGIN", work)
        return await self._inline(lambda connection: connection.transact("BEGIN", work))

    async def together(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what ``work()`` returns: transactions, and what is computed between them.

        On SQLite it runs as a whole in the thread of a connection: in it, `read` and `write` are
        plain calls, and nothing else may be waited for. Going there and back once costs less than
        doing so for each transaction. As long as it runs, no other task of this process writes.
        """
        if self.dialect != "sqlite" or self.read_only:
            return await work()

        def run(connection: InlineConnection) -> tuple[T, bool]:
            self._trip.connection, self._trip.wrote = connection, False
            try:
                return to_its_end(work()), self._trip.wrote
            finally:
                self._trip.connection = None

        async with self._write_lock:
            done, wrote = await self._inline(run)
        if wrote:
            self._noticed()
        return done

    async def _inline(self, run: Callable[[InlineConnection], T], *, integrity: bool = False) -> T:
        """Return what ``run`` returns, on one trip to the thread of a connection."""
        errors = foreign_errors(self.name, integrity=integrity)
        with anyio.CancelScope(shield=True), errors:
            async with self._seats:
                connection = self._idle.pop() if self._idle else await self._engine.raw_connection()
                try:
                    adapted: Any = connection.dbapi_connection
                    done: T = await adapted.trip_inline(run)
                finally:
                    self._idle.append(connection)
        return done

    def _noticed(self) -> None:
        """Tell whoever waits in this process that something was committed."""
        self.changes.notify()
        if self._checkpointer is not None:
            self._checkpointer.notify()

    def _errors(self) -> Any:
        return foreign_errors(self.name)

    async def open(self, stack: AsyncExitStack, *, any_revision: bool = False) -> Self:
        """Check, connect, create what is missing; whatever is opened is closed by ``stack``.

        Args:
            any_revision: take the schema as it is and create nothing; for migrations.
        """
        if self.dialect == "sqlite":
            self.version = sqlite.require_safe_library()
            sqlite.check_path(self.path, read_only=self.read_only)
        self._engine = self._create_engine()
        self._writer = self._engine.execution_options(trinity_buffer_writes=True)
        stack.push_async_callback(self._close)
        with self._errors():
            if self.dialect == "sqlite" and not self.read_only and not any_revision:
                await anyio.to_thread.run_sync(sqlite.prepare_file, self.path)
            self.changes = (
                PostgresChanges(self.url)
                if self.dialect == "postgresql"
                else SQLiteChanges(self.path)
            )
            stack.push_async_callback(self.changes.close)
            async with self._engine.connect() as connection:
                if self.dialect == "postgresql":
                    self.version = str(
                        (await connection.execute(text("SHOW server_version"))).scalar_one()
                    )
                found = any_revision or await schema.inspect(connection, self.name)
        if not found:
            if self.read_only:
                raise UnknownStoreError(f"{self.name} is empty: there is no store to read")
            async with self.writing() as tx:
                await schema.create(tx, self.name)
        return self

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            if self._checkpointer is not None:
                await anyio.to_thread.run_sync(self._checkpointer.close)
            while self._idle:
                await greenlet_spawn(self._idle.pop().close)
            await self._engine.dispose()

    def _create_engine(self) -> AsyncEngine:
        if self.dialect == "postgresql":
            # What libpq and asyncpg's own URLs call sslmode is an argument ssl of its connections.
            query = {"ssl" if k == "sslmode" else k: v for k, v in self.url.query.items()}
            engine = create_async_engine(
                self.url.set(query=query), pool_size=READERS + 2, max_overflow=8
            )
            listen_to.listen(engine.sync_engine, "begin", _begin_postgresql)
            return engine
        url = self.url
        if self.read_only:
            url = url.set(database=sqlite.uri_of(self.path), query={"mode": "ro", "uri": "true"})
        engine = create_async_engine(
            url,
            pool_size=READERS + 1,
            max_overflow=READERS + 3,
            connect_args={"isolation_level": None, "cached_statements": 256},
        )
        statements = sqlite.pragmas(durability=self.durability, read_only=self.read_only)

        def connect(connection: Any, _record: Any) -> None:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
            cursor.close()

        listen_to.listen(engine.sync_engine, "connect", connect)
        listen_to.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine


def _begin_sqlite(connection: Any) -> None:
    # The driver is in autocommit: it must not begin a transaction on its own. Writers take the
    # write lock at once, as a deferred transaction that is upgraded later fails without waiting for
    # the busy timeout.
    writes = connection.get_execution_options().get("trinity_buffer_writes", False)
    adapted = connection.connection.dbapi_connection
    adapted.begin_with("BEGIN IMMEDIATE" if writes else "BEGIN")


def _begin_postgresql(connection: Any) -> None:
    if not connection.get_execution_options().get("trinity_buffer_writes", False):
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")


@asynccontextmanager
async def open_for_migration(url: str) -> AsyncIterator[Database]:
    """Open the database at ``url`` whatever its revision is, changing nothing.

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
    url: str, *, read_only: bool = False, durability: Durability = "normal"
) -> AsyncIterator[Database]:
    """Open the database at ``url``, creating the schema in an empty one.

    Raises:
        UnknownStoreError: nothing there to read, a missing folder, or a database that is not ours.
        SchemaOutdatedError: written by an older version.
        SchemaTooNewError: written by a newer version.
        UnsafeStoreError: a network file system, or a SQLite library that may lose commits.
    """
    if durability not in ("normal", "full"):
        raise InvalidArgumentError(f"durability={durability!r}: accepted are 'normal' and 'full'")
    async with AsyncExitStack() as stack:
        database = Database(parse_url(url), read_only=read_only, durability=durability)
        yield await database.open(stack)
