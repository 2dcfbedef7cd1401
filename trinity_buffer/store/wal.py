"""SQLite's write-ahead log: how long it is and why, and its checkpoints beside the writers.

A reader that holds an old state keeps all that was written since: SQLite cannot copy it over pages
that the reader still sees, and the log grows until the reader ends.

A writer that crosses the limit of its own (``wal_autocheckpoint``) copies the whole log into the
database before its commit returns. That stays as the fallback; a thread of its own, on a connection
of its own, comes first. Its ``PASSIVE`` checkpoints neither wait for a process nor block one.

The log begins anew when a writer finds all of it copied. Beside a writer that never pauses that is
at its own limit, where there is then little left to copy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trinity_buffer.limits import sizes
from trinity_buffer.store.sqlite import PAGE_SIZE_BYTES, dbapi2, uri_of

_READ_LOCKS = range(123, 128)
"""Bytes of the shared memory that readers lock (sqlite.org/walformat.html, section 2.2)."""


@dataclass(frozen=True, slots=True)
class LogState:
    """The write-ahead log of one store.

    Attributes:
        size_bytes: on disk.
        limit_bytes: at which writers copy it into the database; it stays near that.
        readers: where it has grown, numbers of the other processes of this machine that hold one
            state open all the while.
    """

    size_bytes: int
    limit_bytes: int
    readers: tuple[int, ...]

    @property
    def has_grown(self) -> bool:
        """Whether it has grown because it could not restart."""
        return self.size_bytes > 2 * self.limit_bytes

    def message(self) -> str:
        """Return a sentence on what keeps the log long."""
        size, limit = self.size_bytes >> 20, self.limit_bytes >> 20
        text = f"the write-ahead log has {size} MiB where {limit} are usual: "
        if self.readers:
            pids = ", ".join(map(str, self.readers))
            return f"{text}a reader holds an old state open (pid {pids}); end its read transaction"
        return (
            f"{text}no process that is visible here holds an old state open; a reader in "
            "another container may, or writers leave no pause in which it could restart"
        )

    @property
    def remedy(self) -> str:
        """How to let it restart."""
        if self.readers:
            return "end the process that reads"
        return "look again when the writers pause: if it stays, end the reader in another container"


def log_state(path: Path) -> LogState:
    """Return the state of the log of the database at ``path``, or at what a link there leads to."""
    path = path.resolve()
    log = path.with_name(f"{path.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    limit = sizes().wal_pages_limit * PAGE_SIZE_BYTES
    state = LogState(size, limit, ())
    return replace(state, readers=_readers(path)) if state.has_grown else state


def _readers(path: Path) -> tuple[int, ...]:
    """Return the processes that read at each of several looks; writers read only for a moment."""
    shared = path.with_name(f"{path.name}-shm")
    held = _read_locks(shared)
    for _ in range(LOOKS - 1):
        if held:
            time.sleep(LOOK_AGAIN_S)
            held &= _read_locks(shared)
    return tuple(sorted({pid for pid, _ in held}))


def _read_locks(shared: Path, locks: Path = Path("/proc/locks")) -> set[tuple[int, int]]:
    """Return the number of each other process that reads now, and which byte it has locked."""
    try:
        inode, lines = shared.stat().st_ino, locks.read_text().splitlines()
    except OSError:
        return set()
    locked = set()
    for line in lines:
        fields = line.split()  # 1: POSIX ADVISORY READ pid major:minor:inode start end
        if len(fields) == 8 and fields[5].rpartition(":")[2] == str(inode):
            pid, start = int(fields[4]), int(fields[6])
            if start in _READ_LOCKS and pid > 0 and pid != os.getpid():
                locked.add((pid, start))
    return locked


LOOKS, LOOK_AGAIN_S = 4, 0.02
"""How often, and after how many seconds, the readers are listed again."""
PAUSE_S = 0.25
"""How long commits are collected before the log is looked at."""

_logger = logging.getLogger(__name__)


class Checkpointer:
    """Copies what is committed from the log into the database, while there are commits.

    Its thread starts with the first commit. Several processes may each have one: while one works,
    the others skip their turn.

    Args:
        path: of the database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._committed = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.checkpoints = 0
        self._told_at = 0  # pages

    def notify(self) -> None:
        """Note a commit. This is cheap."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="trinity-buffer-checkpoint", daemon=True
            )
            self._thread.start()
        self._committed.set()

    def close(self) -> None:
        """End the thread; a checkpoint that is under way is finished first."""
        self._closing.set()
        self._committed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # Opened only if it is there: an empty file in its place would be another database.
        name = uri_of(self._path, writes=True)
        try:
            connection = dbapi2.connect(name, uri=True, isolation_level=None)
        except dbapi2.OperationalError as error:  # it was removed: the next commit finds out
            _logger.warning("checkpoint of %s: %s", self._path, error)
            return
        try:
            # Asked before each wait too: `close` may come just before its news is cleared.
            while not self._closing.is_set():
                self._committed.wait()
                if not self._closing.wait(PAUSE_S):
                    self._committed.clear()
                    self._checkpoint(connection)
        finally:
            connection.close()

    def _tell_of_growth(self, pages: int) -> None:
        """Warn each time the log has doubled beyond its limit."""
        if pages <= sizes().wal_pages_limit:
            self._told_at = 0
        elif pages > 2 * max(self._told_at, sizes().wal_pages_limit):
            self._told_at = pages
            _logger.warning("%s: %s", self._path, log_state(self._path).message())

    def _checkpoint(self, connection: Any) -> None:
        try:
            # Says how long the log is and how much of it was copied, and does nothing.
            _, pages, copied = connection.execute("PRAGMA wal_checkpoint(NOOP)").fetchone()
            if pages - copied >= sizes().wal_pages_per_checkpoint:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                self.checkpoints += 1
            self._tell_of_growth(pages)
        except dbapi2.OperationalError as error:
            # Such as a full disk: writers will meet it too, and raise it to their callers.
            _logger.warning("checkpoint of %s: %s", self._path, error)
