"""SQLite's write-ahead log: the queue of its writers, its length, checkpoints beside the writers.

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
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from fcntl import F_GETLK, F_UNLCK, F_WRLCK, LOCK_EX, LOCK_NB, LOCK_UN, fcntl, lockf
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any

from trinity_buffer.limits import sizes
from trinity_buffer.store.sqlite import FLOCK, FLOCK_FIELDS, PAGE_SIZE_BYTES, dbapi2, flock, uri_of

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
    limit = sizes.wal_pages_limit * PAGE_SIZE_BYTES
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
        self._committed = Event()
        self._closing = Event()
        self._thread: Thread | None = None
        self.checkpoints = 0
        self._told_at = 0  # pages

    def notify(self) -> None:
        """Note a commit. This is cheap."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="trinity-buffer-checkpoint", daemon=True)
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
        if pages <= sizes.wal_pages_limit:
            self._told_at = 0
        elif pages > 2 * max(self._told_at, sizes.wal_pages_limit):
            self._told_at = pages
            _logger.warning("%s: %s", self._path, log_state(self._path).message())

    def _checkpoint(self, connection: Any) -> None:
        try:
            # Says how long the log is and how much of it was copied, and does nothing.
            _, pages, copied = connection.execute("PRAGMA wal_checkpoint(NOOP)").fetchone()
            if pages - copied >= sizes.wal_pages_per_checkpoint:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                self.checkpoints += 1
            self._tell_of_growth(pages)
        except dbapi2.OperationalError as error:
            # Such as a full disk: writers will meet it too, and raise it to their callers.
            _logger.warning("checkpoint of %s: %s", self._path, error)


PATIENCE_S = 2.0
"""A turn takes milliseconds: when none comes for so long, its holder was stopped."""

_JOINING = 1 << 60
"""The byte of the process that joins, far behind the end of any log; the queue is behind it."""


class WriterQueue:
    """The place of one `Database` in a fair queue of the processes that write to a SQLite file.

    SQLite lets waiting writers retry after longer and longer pauses: the process that has just
    written retries first, and another may wait for seconds. So writers queue up by locks on bytes
    of the write-ahead log, in which SQLite itself locks nothing: a new one locks the byte behind
    the last, and waits for the byte before it. While it joins it holds one more byte, so that no
    two see the same end. Each release wakes one process.

    This is for fairness alone. A process that gets no turn in time goes ahead without one, and
    SQLite's own lock decides. The kernel frees the locks of a killed process; a forked child does
    not inherit them. They belong to the process: two `Database` of one process do not wait for each
    other here, and lose the turn when one of them is closed.

    Args:
        path: of the database.
    """

    def __init__(self, path: Path) -> None:
        whole = path.resolve()
        self._log = whole.with_name(f"{whole.name}-wal")
        self._file: int | None = None
        self._state = Condition()
        self._place = 0  # the byte in the line; 0: not joined yet
        self._waits = False  # a thread does, for the turn
        self._wanted = self._mine = self._closed = False

    def acquire(self) -> None:
        """Return when it is the turn of this process, or after `PATIENCE_S`.

        Where an earlier call ran out of patience and its turn has not come yet, return at once. So
        it is where an earlier call has the turn: it writes on although its caller was cancelled.
        """
        with self._state:
            if self._waits or self._mine or self._closed:
                return
            if self._file is None:
                try:
                    self._file = os.open(self._log, os.O_RDWR | os.O_CLOEXEC)
                except OSError:  # there is no log yet, or no right to it: SQLite will say so
                    return
            self._join(self._file, LOCK_NB)
            self._mine = self._place == _JOINING + 1
            if self._mine:
                return
            try:
                Thread(target=self._wait, args=(self._file,), daemon=True).start()
            except RuntimeError:  # there are too many threads, or the interpreter ends
                if self._place:
                    _unlock(self._file, self._place)
                return
            self._waits = self._wanted = True
            self._state.wait_for(lambda: not self._waits, PATIENCE_S)
            self._wanted = False

    def release(self) -> None:
        """Let the next process write."""
        with self._state:
            if self._mine and self._file is not None:
                self._mine = False
                _unlock(self._file, self._place)

    def close(self) -> None:
        """Leave the queue."""
        with self._state:
            self._closed = True
            if self._file is not None and not self._waits:
                os.close(self._file)
                self._file = None

    def _join(self, file: int, or_not: int = 0) -> None:
        """Join the queue at its end; with ``LOCK_NB`` not if another process is joining."""
        self._place = 0
        with suppress(OSError):
            lockf(file, LOCK_EX | or_not, 1, _JOINING)
            try:
                place = _last(file) + 1
                lockf(file, LOCK_EX | LOCK_NB, 1, place)
                self._place = place
            finally:
                _unlock(file, _JOINING)

    def _wait(self, file: int) -> None:
        """Wait for the turn without a limit; release it if no writer wants it any more.

        In a thread of its own, as the kernel has no timeout for such a wait.
        """
        if not self._place:
            self._join(file)
        got = False
        with suppress(OSError):  # such as EDEADLK, which the kernel guesses where threads wait
            while self._place and not got:  # again, if the one before was killed
                before = _last(file, self._place)
                got = before == _JOINING
                if not got:
                    lockf(file, LOCK_EX, 1, before)
                    _unlock(file, before)
        with self._state:  # to the end: a concurrent `close` waits for it
            self._waits = False
            self._mine = got and self._wanted
            self._state.notify()
            if self._place and not self._mine:
                _unlock(file, self._place)
            if self._closed:
                os.close(file)
                self._file = None


def _last(file: int, end: int = 0) -> int:
    """Return the last byte of the queue before ``end`` that another process has locked.

    `_JOINING` if the queue is empty; without ``end``, of the whole queue.
    """
    last = _JOINING
    while last + 1 != end:
        size = end and end - last - 1  # 0: however far
        answer = fcntl(file, F_GETLK, flock(F_WRLCK, last + 1, size))
        lock = dict(zip(FLOCK_FIELDS, FLOCK.unpack(answer), strict=True))
        if lock["type"] == F_UNLCK:
            break
        last = lock["start"] + lock["len"] - 1
    return last


def _unlock(file: int, byte: int) -> None:
    with suppress(OSError):  # what was written is written
        lockf(file, LOCK_UN, 1, byte)
