"""Connections: SQLite's threads and transactions, who may use a database, and errors as ours.

On SQLite a whole function runs in the thread of one of aiosqlite's connections. A statement takes
some microseconds, and going to the thread and back for each would cost ten times that.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite
import anyio
from sqlalchemy import Table
from sqlalchemy.engine import Engine
from typing_extensions import override

from trinity_buffer.codec.blob import Buffer, mapped
from trinity_buffer.errors import (
    StoreReplacedError,
    StoreUseError,
)
from trinity_buffer.limits import sizes
from trinity_buffer.store.sqlite import WriterQueue, dbapi2, open_blob
from trinity_buffer.store.transaction import (
    Transaction,
    Values,
    engine_without_connections,
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
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise StoreUseError(f"{name} {_NO_LOOP}") from error
        self._closed = False

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the database."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Refuse all further use of the database."""
        self._closed = True

    def require_open(self) -> None:
        """Raise unless the database is open, and this is the process that opened it.

        Raises:
            StoreUseError: it is closed, or this is a forked child.
        """
        self.require_same_process()
        if self._closed:
            raise StoreUseError(f"{self._name} is closed: use it inside its `with` block")

    def require_same_process(self) -> None:
        """Raise unless this is the process that opened the database.

        Raises:
            StoreUseError: this is a forked child.
        """
        if self.forked:
            raise StoreUseError(
                f"{self._name} was opened by process {self._pid} and forked into {os.getpid()}: "
                "start the child with spawn or forkserver, or fork it before the store is opened"
            )

    def require(self) -> None:
        """Raise unless the caller may use the database.

        Raises:
            StoreUseError: it is closed, or was opened by another process or event loop.
        """
        if self._closed or os.getpid() != self._pid:
            self.require_open()
        try:
            here = asyncio.get_running_loop()
        except RuntimeError as error:
            raise StoreUseError(f"{self._name} {_NO_LOOP}") from error
        if here is not self._loop:
            raise StoreUseError(
                f"{self._name} was opened in another event loop: open it in each loop that uses it"
            )


_NO_LOOP = (
    "needs an event loop of asyncio, and none runs here (trio is not supported): use asyncio.run, "
    "or anyio.run with the backend asyncio"
)


_Identity = tuple[int, int] | None


class StoreFiles:
    """The database and its log, by device and inode, as they were when they were opened.

    A connection keeps the file that it opened. If that is removed or replaced, or its folder is
    moved, commits go on into a file that no path leads to any more.

    Args:
        path: of the database.
        with_log: check the write-ahead log and its index too, which stay as long as a writer has
            the database open.
    """

    def __init__(self, path: Path, *, with_log: bool) -> None:
        # The log lies beside what a link to the database leads to; the link itself may be changed.
        beside = str(path.resolve())
        self._paths = [str(path.absolute())]
        if with_log:
            self._paths += [f"{beside}-wal", f"{beside}-shm"]
        self._known: list[_Identity] = []

    def check(self, *, note: bool = False) -> None:
        """Raise unless the paths still name the same files; before they are noted any will do.

        Args:
            note: take the files that are there for the ones that were opened.

        Raises:
            StoreReplacedError: one was removed or replaced.
        """
        there: list[_Identity] = []
        for path in self._paths:
            try:
                status = os.stat(path)  # noqa: PTH116 - after every commit: a third of the time
            except OSError:
                there.append(None)
            else:
                there.append((status.st_dev, status.st_ino))
        if note:
            self._known = there
        if there == self._known or not self._known:
            return
        for path, known, identity in zip(self._paths, self._known, there, strict=True):
            if known is None and identity is not None:
                raise StoreReplacedError(
                    f"another process writes to the store ({path} appeared), which was opened as a "
                    "file that does not change: open it again"
                )
            if identity != known:
                what = "removed" if identity is None else "replaced by another file"
                raise StoreReplacedError(
                    f"{path} was {what} while this process had it open: what it writes now is lost "
                    "when it ends. Nothing of this call is acknowledged; end every process that "
                    "uses the store, put the file back, and write again"
                )


T = TypeVar("T")

FILLED_BYTES = 1 << 15
"""From this size a blob is written piece by piece; binding a few pages is as quick."""

TRANSACTIONS = 4
"""Transactions at the same time. One of them may write: SQLite allows no second one."""


class SQLiteTransaction(Transaction):
    """A connection in autocommit, whose transactions `run` begins and ends, one after another.

    Args:
        driver: the connection. No transaction may be open.
        files: what the connection has open.
        check: what each transaction begins with.
        queue: which a writing transaction waits in.
    """

    def __init__(
        self,
        driver: Any,
        files: StoreFiles,
        check: Callable[[Transaction], None] | None = None,
        queue: WriterQueue | None = None,
    ) -> None:
        super().__init__(_engine(), driver)
        self._files = files
        self._check = check
        self._queue = queue

    @override
    def fetch_all(self, sql: str, values: Values) -> list[tuple[Any, ...]]:
        """Execute SQL of the driver's own style, and return all rows."""
        rows: list[tuple[Any, ...]] = self.driver.execute(sql, values).fetchall()
        return rows

    @override
    def execute_later(self, sql: str, values: Values) -> None:
        """Execute a statement that returns nothing."""
        self.driver.execute(sql, values)

    @override
    def lock(self, experiment: int) -> None:
        """Pass: BEGIN IMMEDIATE has locked the database, and `run` checked the schema."""

    @override
    def insert_many(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert ``rows``, each with all columns of ``table`` in their order."""
        size = sizes.rows_per_statement
        whole = len(rows) - len(rows) % size
        for start in range(0, whole, size):
            values = chain.from_iterable(rows[start : start + size])
            self.driver.execute(_insert(table, size), tuple(values))
        if whole < len(rows):
            self.driver.executemany(_insert(table, 1), rows[whole:])

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
            sql, name = _insert_room(table)
            row = self.driver.execute(sql, (*others, size)).lastrowid
            with closing(open_blob(self.driver, table.name, name, row)) as room:
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
        place = (table.name, list(table.columns)[-1].name, row)
        with closing(open_blob(self.driver, *place, read_only=True)) as stored:
            for start in range(0, size, step):
                memory[start : start + step] = stored.read(min(step, size - start))
        return memory

    @override
    def announce(self) -> None:
        """Pass: other processes see a commit of SQLite by themselves."""

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
        queue = self._queue if writes else None
        if queue is not None:
            queue.acquire()
        # A deferred transaction that is upgraded later fails without waiting for the busy timeout:
        # writers take the lock at once.
        try:
            self.driver.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            if self._check is not None:
                self._check(self)
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
        return done

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self.driver.close()


@cache
def _engine() -> Engine:
    """Return the engine that all connections share."""
    return engine_without_connections("sqlite://", module=dbapi2)


@cache
def _insert(table: Table, rows: int) -> str:
    """Return the statement for so many rows, whose places are all positional."""
    row = f"({', '.join('?' * len(table.columns))})"
    return f"INSERT INTO {table.name} VALUES {', '.join([row] * rows)}"


@cache
def _insert_room(table: Table) -> tuple[str, str]:
    """Return the statement for one row whose last column is but a size, and that column's name."""
    head, _, end = _insert(table, 1).rpartition("?")
    return f"{head}zeroblob(?){end}", list(table.columns)[-1].name


class _Runner:
    """Runs functions in place of a connection of ``sqlite3``, in aiosqlite's thread.

    aiosqlite does not check what its ``connector`` returns: it only calls its methods there.
    """

    def __init__(self, connect: Callable[[], SQLiteTransaction]) -> None:
        self._connect = connect
        self._tx: SQLiteTransaction | None = None  # connected on the first trip
        self._answer: tuple[bool, Any] = (True, None)

    def execute(self, work: Callable[[SQLiteTransaction], Any], _: Any) -> _Runner:
        try:
            if self._tx is None:
                self._tx = self._connect()
            self._answer = (True, work(self._tx))
        except BaseException as error:  # noqa: BLE001 - raised again by `ConnectionPool.run_in_thread`; set on a future, a StopIteration would never arrive
            self._answer = (False, error)
        return self

    def fetchall(self) -> tuple[bool, Any]:
        answer, self._answer = self._answer, (True, None)
        return answer

    def close(self) -> None:
        if self._tx is not None:
            self._tx.close()


class ConnectionPool:
    """Connections to one file. Each call has one for itself.

    Args:
        connector: returns a new connection, in autocommit.
        files: what the connections have open; looked at after each transaction.
        check: what each transaction begins with.
        queue: which writing transactions wait in; closed with the connections.
        number: of connections, and so of transactions at the same time.
    """

    def __init__(
        self,
        connector: Callable[[], Any],
        files: StoreFiles,
        check: Callable[[Transaction], None],
        queue: WriterQueue | None = None,
        number: int = TRANSACTIONS,
    ) -> None:
        self._connector = connector
        self._files = files
        self._check = check
        self._queue = queue
        self._free = anyio.Semaphore(number, fast_acquire=True)
        self._write_lock = anyio.Lock(fast_acquire=True)
        self._idle: list[aiosqlite.Connection] = []

    async def run_in_thread(self, work: Callable[[SQLiteTransaction], T], *, writes: bool) -> T:
        """Return the result of ``work`` in the thread of a connection; one at a time ``writes``.

        Once it has begun, a cancellation waits for its end.
        """
        async with self._write_lock if writes else nullcontext():
            with anyio.CancelScope(shield=True):
                async with self._free:
                    connection = self._idle.pop() if self._idle else await self._opened()
                    # The one public method that goes to the thread once: it executes, fetches and
                    # returns.
                    execute: Any = connection.execute_fetchall
                    try:
                        succeeded, answer = await execute(work, ())
                    finally:
                        self._idle.append(connection)
        if not succeeded:
            raise answer
        done: T = answer
        return done

    def one_more(self) -> ConnectionPool:
        """Return one more connection; its temporary tables are its own."""
        return ConnectionPool(self._connector, self._files, self._check, number=1)

    async def _opened(self) -> aiosqlite.Connection:
        """Return a new connection, whose thread does not keep the interpreter from ending."""
        made: list[aiosqlite.Connection] = []

        def make() -> None:
            runner: Any = _Runner(self._connected)
            made.append(aiosqlite.Connection(lambda: runner, iter_chunk_size=64))

        # A thread inherits being a daemon from the one that makes it.
        maker = threading.Thread(target=make, daemon=True)
        maker.start()
        maker.join()
        return await made[0]

    def _connected(self) -> SQLiteTransaction:
        self._files.check()  # what is there now may be another database
        return SQLiteTransaction(self._connector(), self._files, self._check, self._queue)

    async def close(self) -> None:
        """Close every connection."""
        while self._idle:
            await self._idle.pop().close()
        if self._queue is not None:
            self._queue.close()
