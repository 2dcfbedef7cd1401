"""What keeps an open database from misuse: its owner, its files, and its errors as ours."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from trinity_buffer.errors import (
    InvalidArgumentError,
    ReadOnlyStoreError,
    StoreBusyError,
    StoreError,
    StoreReplacedError,
    StoreUnavailableError,
    StoreUseError,
    UnknownStoreError,
    UnsafeStoreError,
)
from trinity_buffer.store import sqlite
from trinity_buffer.store.connecting import passes_by
from trinity_buffer.store.sqlite import dbapi2
from trinity_buffer.store.transaction import TakenKeyError


class Owner:
    """The process and the event loop that opened a database.

    Connections, their threads and whoever waits belong to both: elsewhere a call would hang, or
    corrupt the file.

    Args:
        name: of the database, for messages.

    Raises:
        StoreUseError: no event loop of asyncio runs here.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._loop = _running_loop(name)
        self._closed = False

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the database."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Let nobody use the database any more."""
        self._closed = True

    def require_open(self) -> None:
        """Do nothing in the process that opened the database, while it is open.

        Raises:
            StoreUseError: it is closed, or this is a forked child.
        """
        self.require_same_process()
        if self._closed:
            raise StoreUseError(f"{self._name} is closed: use it inside its `with` block")

    def require_same_process(self) -> None:
        """Do nothing in the process that opened the database.

        Raises:
            StoreUseError: this is a forked child.
        """
        if self.forked:
            raise StoreUseError(
                f"{self._name} was opened by process {self._pid} and forked into {os.getpid()}: "
                "start the child with spawn or forkserver, or fork it before the store is opened"
            )

    def require(self) -> None:
        """Do nothing if the caller may use the database.

        Raises:
            StoreUseError: it is closed, or was opened by another process or event loop.
        """
        self.require_open()
        if _running_loop(self._name) is not self._loop:
            raise StoreUseError(
                f"{self._name} was opened in another event loop: open it in each loop that uses it"
            )


def _running_loop(name: str) -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        raise StoreUseError(
            f"{name} needs an event loop of asyncio, and none runs here (trio is not supported): "
            "use asyncio.run, or anyio.run with the backend asyncio"
        ) from error


_Identity = tuple[int, int] | None


class StoreFiles:
    """The database and its log, by device and inode, as they were when they were opened.

    A connection keeps the file that it opened. If somebody removes or replaces it, or moves its
    folder, commits go on into a file that nobody will find again.

    Args:
        path: of the database.
        with_log: look at the write-ahead log and its index too, which stay as long as somebody who
            writes has the database open.
    """

    def __init__(self, path: Path, *, with_log: bool) -> None:
        # The log lies beside what a link to the database leads to; the link itself may be changed.
        beside = str(path.resolve())
        self._paths = [str(path.absolute())]
        if with_log:
            self._paths += [f"{beside}-wal", f"{beside}-shm"]
        self._known: list[tuple[str, _Identity]] = []

    def note(self) -> None:
        """Take the files that are there as the ones that were opened."""
        self._known = [(path, _identity(path)) for path in self._paths]

    def check(self) -> None:
        """Do nothing while the paths name the same files.

        Raises:
            StoreReplacedError: one was removed or replaced.
        """
        for path, known in self._known:
            identity = _identity(path)
            if known is None and identity is not None:
                raise StoreReplacedError(
                    f"somebody writes to the store ({path} has come), which was opened to be read "
                    "as it lay: open it again"
                )
            if identity != known:
                what = "removed" if identity is None else "replaced by another file"
                raise StoreReplacedError(
                    f"{path} was {what} while this process had it open: what it writes now is lost "
                    "when it ends. Nothing of this call is acknowledged; end every process that "
                    "uses the store, put the file back, and write again"
                )


def _identity(path: str) -> _Identity:
    try:
        status = os.stat(path)  # noqa: PTH116 - after every commit: a third of the time
    except OSError:
        return None
    return status.st_dev, status.st_ino


POOLED = (
    "is behind a pooler (PgBouncer) that lends a server connection for one transaction: prepared "
    "statements and news of changes do not survive that. Connect to PostgreSQL itself, or set "
    "pool_mode = session"
)


class foreign_errors:  # noqa: N801 - read as a statement: `with foreign_errors(name)`
    """Turn the database's errors into ours, the most specific first."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, (DBAPIError, dbapi2.Error)):
            raise _translate(error, self.name) from error
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise StoreUnavailableError(
                f"{self.name}: cannot reach the database: {str(error) or 'it does not answer'}"
            ) from error
        if isinstance(error, PoolTimeoutError):
            raise StoreBusyError(
                f"{self.name}: every connection of this process waits, for another process that "
                "holds a lock or for a server that does not answer"
            ) from error
        if isinstance(error, OverflowError):
            raise InvalidArgumentError(f"{self.name}: {_TOO_LARGE} ({error})") from error
        if isinstance(error, UnicodeEncodeError):  # bytes of a command line that are not UTF-8
            raise InvalidArgumentError(
                f"{self.name}: {error.object!r:.80} is no text, and the store holds nothing of "
                f"that name ({error.reason})"
            ) from error
        if isinstance(error, UnicodeDecodeError):  # SQLite's message quotes a damaged schema
            raise StoreError(
                f"{self.name} is damaged, its schema is no text ({error}): put a copy back"
            ) from error


def _translate(error: Exception, name: str) -> Exception:
    cause = " ".join(str(getattr(error, "orig", error)).split())
    if isinstance(error, (IntegrityError, dbapi2.IntegrityError)):
        return TakenKeyError(f"{name}: {cause}")
    if getattr(error, "connection_invalidated", False) or passes_by(getattr(error, "orig", None)):
        return StoreUnavailableError(f"{name}: cannot reach the database: {cause}")
    lowered = cause.lower()
    if "(value out of int" in lowered:
        return InvalidArgumentError(f"{name}: {_TOO_LARGE} ({cause})")
    for words, kind, what in _MEANINGS:
        if any(word in lowered for word in words):
            return kind(what.format(name=name, cause=cause, busy_s=sqlite.BUSY_TIMEOUT_MS // 1000))
    return StoreError(f"{name}: {cause}")


_TOO_LARGE = "a number is larger than any that a store holds"
_MEANINGS: tuple[tuple[tuple[str, ...], type[StoreError], str], ...] = (
    (
        ("database is locked", "database is busy", "due to lock timeout"),
        StoreBusyError,
        "{name}: another process held the database for over {busy_s} s; "
        "`trinity-buffer stats` shows what is at work",
    ),
    (
        ("readonly database", "read-only transaction"),
        ReadOnlyStoreError,
        "{name} cannot be written: {cause}",
    ),
    (
        ("not a database", "file is encrypted"),
        UnknownStoreError,
        "{name} is not a Trinity Buffer store, nor a SQLite database",
    ),
    (
        ("prepared statement", "statement pooling mode"),
        UnsafeStoreError,
        "{name} " + POOLED + " ({cause})",
    ),
    (
        ("no space left", "disk is full", "disk full"),
        StoreError,
        "{name}: the disk is full; nothing of this transaction was written",
    ),
)
