"""One database, SQLite or PostgreSQL: connections, transactions, and news of changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import anyio
import anyio.to_thread
from sqlalchemy.engine import URL

from trinity_buffer.errors import InvalidArgumentError, ReadOnlyStoreError, StoreError
from trinity_buffer.store import schema, sqlite
from trinity_buffer.store.connection import (
    ConnectionPool,
    Owner,
    SQLiteTransaction,
    StoreFiles,
)
from trinity_buffer.store.notify import Changes, PostgresChanges, SQLiteChanges
from trinity_buffer.store.postgres import Outage, PostgresConnection, Server
from trinity_buffer.store.segments import SegmentStore, TableSegments
from trinity_buffer.store.sqlite import Checkpointer, WriterQueue, dbapi2
from trinity_buffer.store.transaction import (
    ReadSession,
    Session,
    Transaction,
    foreign_errors,
)
from trinity_buffer.store.url import (
    StoreURL,
    nothing_at,
    nothing_in,
    parse_url,
    reconnect_s_of,
    with_primary,
)

P = ParamSpec("P")
T = TypeVar("T")

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
    """

    def __init__(self, url: URL, *, read_only: bool, durability: Durability) -> None:
        self.url = url
        self.name = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)
        self.dialect = url.get_backend_name()
        self.path = Path(url.database or "").absolute()
        self.read_only = read_only
        self.durability = durability
        self.version = ""
        self.segments: SegmentStore = TableSegments()
        self._outage = Outage(self.name)
        self._computing = anyio.CapacityLimiter(COMPUTED_AT_ONCE)
        writes_file = self.dialect == "sqlite" and not read_only
        self._checkpointer = Checkpointer(self.path) if writes_file else None
        self.connections: ConnectionPool | Server
        self._changes: Changes
        self.owner: Owner
        self._any_revision = False
        self._still = False
        self._schema = -1

    @property
    def folder(self) -> Path | None:
        """The folder that a SQLite store lies in; None for a server."""
        return self.path.parent if self.dialect == "sqlite" else None

    @property
    def changes(self) -> Changes:
        """News of commits.

        Raises:
            StoreUseError: it is closed, or this is another process or event loop.
        """
        self.owner.require()
        return self._changes

    def require_writable(self) -> None:
        """Raise if the store is open read-only.

        Raises:
            ReadOnlyStoreError: it is.
        """
        if self.read_only:
            raise ReadOnlyStoreError(
                f"{self.name} is open read-only; open it without read_only to write"
            )

    async def read(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``f(tx, ...)`` of a transaction that sees one state and changes nothing.

        It is shielded: a cancellation takes effect after it. So ``f`` must be short, well below a
        second, and wait for nothing but ``tx``.
        """
        return await self.session(lambda s: s.read(f, *args, **kwargs), writes=False)

    async def write(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``f(tx, ...)`` of the one writing transaction, which has committed.

        It is shielded, as in `read`; ``f`` must compute nothing. It rolls back on an error.

        Raises:
            TakenKeyError: a unique key is taken.
        """
        return await self.session(lambda s: s.write(f, *args, **kwargs))

    async def try_to_write(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Write as `write` does, once; where the store cannot be reached, do without.

        For the last write of a process that ends: it does not wait for a server that is away.
        """
        self.owner.require()
        with suppress(StoreError):
            await self.session(lambda s: s.write(f, *args, **kwargs), once=True)

    async def read_session(self, work: Callable[[ReadSession], T]) -> T:
        """Return ``work(session)`` of a `session` that does not write, and blocks no writer."""
        return await self.session(work, writes=False)

    async def session(
        self, work: Callable[[Session], T], *, writes: bool = True, once: bool = False
    ) -> T:
        """Return ``work(session)``: short transactions, and what is computed between them.

        It runs as a whole in the thread of a connection: going there and back once costs less than
        doing so for each transaction. On SQLite no other task of this process writes as long as it
        runs.

        Args:
            work: is run once.
            writes: whether it may write.
            once: where a server is away, do not try again.
        """
        self.owner.require()
        if writes and self.read_only:
            self.require_writable()
        session = Session(self.name, self.segments.get)

        def trip(connection: SQLiteTransaction | PostgresConnection) -> T:
            session.run = partial(connection.run, once=once)
            return work(session)

        try:
            return await self.connections.run_in_thread(trip, writes=writes)
        finally:
            if session.wrote:  # tasks of this process that wait for a commit
                self._changes.notify()
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

    def _require_schema(self, tx: Transaction) -> None:
        """Raise unless the schema is the one of this version: another process may migrate it."""
        if self._any_revision:
            return
        ((version,),) = tx.fetch_all("PRAGMA schema_version", ())  # counts changes
        if version != self._schema:
            schema.inspect(tx, self.name)
            self._schema = version

    async def open(
        self, stack: AsyncExitStack, *, any_revision: bool = False, create: bool = True
    ) -> Self:
        """Check, connect, create what is missing; whatever is opened is closed by ``stack``.

        Args:
            create: False where a store that is not there is an error.
            any_revision: take the schema as it is and create nothing; for migrations.
        """
        self.owner = Owner(self.name)
        self._any_revision = any_revision
        if self.dialect == "sqlite":
            prepare = not self.read_only and not any_revision
            await self._open_file(stack, prepare=prepare, create=create)
        else:
            await self._open_server(stack)
        stack.callback(self.owner.close)
        if not any_revision and not await self.read(schema.inspect, self.name):
            if self.read_only or not create:
                raise nothing_in(self.name, read_only=self.read_only)
            await self.write(schema.create, self.name)
        if not any_revision:  # to open or migrate fails at once where the server is away
            self._outage.reconnect_s = reconnect_s_of(self.url)
        return self

    async def _open_file(self, stack: AsyncExitStack, *, prepare: bool, create: bool) -> None:
        self.version = sqlite.require_safe_library()
        if not sqlite.check_path(self.path, read_only=self.read_only) and not create:
            raise nothing_at(self.path, read_only=False)
        self._still = self.read_only and sqlite.is_still(self.path)
        with foreign_errors(self.name):
            if prepare:
                await anyio.to_thread.run_sync(sqlite.prepare_file, self.path)
            here = stack.enter_context(sqlite.open_here(self.path))
        files = StoreFiles(self.path, with_log=not self.read_only or self._still)
        self.connections = ConnectionPool(
            self._connect, files, self._require_schema, WriterQueue(self.path)
        )
        stack.push_async_callback(self._close)
        with foreign_errors(self.name):
            self._changes = SQLiteChanges(self.path, self.owner, files, still=self._still)
        stack.push_async_callback(self._changes.close)
        # Only when a row is read does SQLite open the log.
        await self.read(lambda tx: tx.fetch_all("SELECT count(*) FROM sqlite_master", ()))
        stack.enter_context(here.keep_log())
        files.check(note=True)

    async def _open_server(self, stack: AsyncExitStack) -> None:
        url = self.url if self.read_only else with_primary(self.url)
        is_timed = not self._any_revision  # a migration takes as long as it takes
        self.connections = server = Server(url, self.name, self._outage, is_timed=is_timed)
        stack.push_async_callback(self._close)
        self._changes = PostgresChanges(url, self.name, self.owner, self._outage)
        stack.push_async_callback(self._changes.close)
        with foreign_errors(self.name):
            self.version = await server.require_suitable()

    async def _close(self) -> None:
        if self.owner.forked:  # the threads are the parent's, and the files are its to close
            return
        self._outage.closed.set()
        with anyio.CancelScope(shield=True):
            if self._checkpointer is not None:
                await anyio.to_thread.run_sync(self._checkpointer.close)
            await self.connections.close()

    def _connect(self) -> Any:
        """Open one connection to a SQLite file."""
        name = sqlite.uri_of(self.path, writes=not self.read_only, still=self._still)
        with foreign_errors(self.name):
            driver = dbapi2.connect(name, uri=True, isolation_level=None, cached_statements=256)
            for statement in sqlite.pragmas(durability=self.durability, read_only=self.read_only):
                driver.execute(statement)
        return driver


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
        raise InvalidArgumentError(f"durability={durability!r}: accepted are 'normal' and 'full'")
    async with AsyncExitStack() as stack:
        database = Database(parse_url(url), read_only=read_only, durability=durability)
        yield await database.open(stack, create=create)
