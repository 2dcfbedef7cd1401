"""News of commits, in this process and in others."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString

import anyio
import anyio.from_thread
import anyio.to_thread
from sqlalchemy.engine import URL

from trinity_buffer.lazy import extra
from trinity_buffer.store import postgres
from trinity_buffer.store.postgres import CHANNEL, Outage, connect, cut, cut_after, driver_errors
from trinity_buffer.store.sqlite import StoreFiles, dbapi2, uri_of
from trinity_buffer.store.transaction import Changes, Owner, foreign_errors

if TYPE_CHECKING:
    import psycopg

FIRST_POLL_S = 0.001
SLOWEST_POLL_S = 0.008
ASKED_EVERY_S = 20.0
ANSWERS_WITHIN_S = 10.0
"""A server that is silent for so long is checked, and taken for gone if it does not answer."""

SLOWEST_WATCHED_POLL_S = 0.05
"""A safety net where the kernel tells of writes."""


class SQLiteChanges(Changes):
    """Polls ``PRAGMA data_version`` on a plain connection of its own while a task waits.

    The pragma reads one word of shared memory (some 5 µs), so it may run on the event loop. A
    pooled connection would not do: its own commits do not move it. The kernel tells when to look,
    by inotify at each write to the write-ahead log; where it does not, the clock does. A log cannot
    be replaced by another file while this connection is open.
    """

    def __init__(self, path: Path, owner: Owner, files: StoreFiles, *, still: bool = False) -> None:
        super().__init__(owner)
        self._files = files
        self._connection: Any = dbapi2.connect(
            uri_of(path, still=still), uri=True, isolation_level=None, check_same_thread=False
        )
        self._log = path.with_name(f"{path.name}-wal")
        self._watch: int | None = None
        self._num_waiting = 0

    async def state(self) -> tuple[int, int]:
        """Return a mark of the database as it is now: (own commits, the others' commits)."""
        self._owner.require()
        self._files.check()  # of a file that is gone no news would ever come
        try:
            ((version,),) = self._connection.execute("PRAGMA data_version")
        except dbapi2.Error:
            with foreign_errors(self._log.name):
                raise
        return self._own, version

    async def changed(self, state: tuple[int, int], timeout_s: float | None = None) -> None:
        """Return once there was a commit after ``state`` was taken, or after ``timeout_s``.

        Looks after each write, and every 1 to 8 (with a watch: 50) ms, until the version moves.

        A write is heard before its commit is visible: then the looks follow each other quickly.
        """
        with anyio.move_on_after(timeout_s), self._listening() as slowest_s:
            pause_s = FIRST_POLL_S
            while await self.state() == state:
                event = self._event
                with anyio.move_on_after(pause_s):
                    await event.wait()
                pause_s = FIRST_POLL_S if event.is_set() else min(pause_s * 1.1, slowest_s)

    @contextmanager
    def _listening(self) -> Iterator[float]:
        """Listen for writes; yield the longest pause between two looks, in seconds."""
        if self._watch is None:
            self._watch = watch_file(self._log)
        watch = self._watch
        if watch is None:
            yield SLOWEST_POLL_S
            return
        loop = asyncio.get_running_loop()
        if self._num_waiting == 0:  # writes wake the event loop only while a task waits
            loop.add_reader(watch, self._heard, watch)
        self._num_waiting += 1
        try:
            yield SLOWEST_WATCHED_POLL_S
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                loop.remove_reader(watch)

    def _heard(self, watch: int) -> None:
        drain(watch)
        self.notify(0)

    async def close(self) -> None:
        """Close the polling connection."""
        if self._owner.forked:
            return
        self.notify()  # tasks that wait then see that it is closed
        if self._watch is not None:
            os.close(self._watch)
        self._connection.close()


class PostgresChanges(Changes):
    """Listens on one channel, over a connection of its own, opened at the first wait."""

    def __init__(self, url: URL, name: str, owner: Owner, outage: Outage) -> None:
        super().__init__(owner)
        self._url = url
        self._name = name
        self._outage = outage
        self._others = 0
        self._answered = 0.0
        self._driver: psycopg.Connection[Any] | None = None
        self._descriptor = -1
        self._lock = anyio.Lock()

    async def _listen(self) -> None:
        async with self._lock:
            if self._driver is not None:
                return
            made: list[psycopg.Connection[Any]] = []
            try:
                self._driver = await anyio.to_thread.run_sync(
                    self._outage.outlived, partial(self._listening, made), abandon_on_cancel=True
                )
            except BaseException:
                for driver in made:  # its thread closes it
                    cut(driver)
                raise
            # What came before the connection stood was not heard: read once more.
            self._others += 1
            self._descriptor = self._driver.fileno()
            asyncio.get_running_loop().add_reader(self._descriptor, self._hear)

    def _listening(self, made: list[psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
        """Return a new connection that listens: one that does not, whatever the reason, is closed.

        No news would ever come over it.
        """
        with foreign_errors(self._name):
            driver = connect(self._url)
            made.append(driver)
            _execute(driver, f"LISTEN {CHANNEL}", postgres.COMMAND_TIMEOUT_S)
            return driver

    def _hear(self) -> None:
        """Take in what the server says; its end too must end a wait, as no news comes any more."""
        if self._driver is None:
            return
        try:
            self._driver.pgconn.consume_input()
            while self._driver.pgconn.notifies() is not None:
                pass
        except extra("psycopg", "postgresql").Error:
            self._leave()
        self._others += 1
        self.notify(0)

    def _leave(self) -> None:
        """Close the connection, if there is one."""
        if self._driver is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._driver.close()
            self._driver = None

    async def state(self) -> tuple[int, int]:
        """Return a mark of the database as it is now: (own commits, notifications heard)."""
        self._owner.require()
        await self._listen()
        return self._own, self._others

    async def changed(self, state: tuple[int, int], timeout_s: float | None = None) -> None:
        """Return once there was a commit after ``state`` was taken, or after ``timeout_s``.

        Waits for a notification, and looks now and then whether one could still come.
        """
        with anyio.move_on_after(timeout_s):
            while (self._own, self._others) == state:
                event = self._event
                with anyio.move_on_after(ASKED_EVERY_S) as silence:
                    await event.wait()
                if silence.cancelled_caught:
                    await self._ask()

    async def _ask(self) -> None:
        """Check that the server answers, once for all waiting tasks; if not, connect anew."""
        async with self._lock:
            if self._driver is None or time.monotonic() - self._answered < ASKED_EVERY_S / 2:
                return
            loop, driver = asyncio.get_running_loop(), self._driver
            loop.remove_reader(self._descriptor)  # its thread hears what comes meanwhile
            try:
                ask = partial(_execute, driver, "SELECT 1", ANSWERS_WITHIN_S)
                await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
            except ConnectionError:
                self._driver = None
            except BaseException:
                cut(driver)
                self._driver = None
                raise
            else:
                loop.add_reader(self._descriptor, self._hear)
            self._answered = time.monotonic()
            self._others += 1
            self.notify(0)

    async def close(self) -> None:
        """Close the listening connection; that the server is gone is no error any more."""
        self.notify()
        if not self._owner.forked:
            self._leave()


def _execute(driver: psycopg.Connection[Any], statement: LiteralString, within_s: float) -> None:
    """Execute a statement; close a connection over which no answer comes in time."""
    try:
        with driver_errors(driver), cut_after(driver, within_s):
            driver.execute(statement)
        anyio.from_thread.check_cancelled()
    except BaseException:
        driver.close()
        raise


_IN_MODIFY = 0x2
_NUM_BYTES = 4_096
"""Of one read: over a hundred events, and those that repeat the last one are not queued."""


def watch_file(path: Path) -> int | None:
    """Return a descriptor that is readable after each write to ``path``; the caller closes it.

    None where there is no such news: another system, no such file, or too many watches already. A
    write through a memory map does not count.
    """
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    descriptor: int = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if library.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(descriptor)
        return None
    return descriptor


def drain(descriptor: int) -> None:
    """Forget the news so far: the descriptor is readable again after the next write."""
    with suppress(BlockingIOError):
        while len(os.read(descriptor, _NUM_BYTES)) > _NUM_BYTES // 2:
            pass
