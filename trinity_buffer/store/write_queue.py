"""A fair queue of the processes that write to a SQLite file.

SQLite lets waiting writers retry after longer and longer pauses: the process that has just written
retries first, and another may wait for seconds. So writers queue up by locks on bytes of the
write-ahead log, in which SQLite itself locks nothing: a new one locks the byte behind the last, and
waits for the byte before it. While it joins it holds one more byte, so that no two see the same
end. Each release wakes one process.

This is for fairness alone. A process that gets no turn in time goes ahead without one, and SQLite's
own lock decides. The kernel frees the locks of a killed process; a forked child does not inherit
them. They belong to the process: two `Database` of one process do not wait for each other here, and
lose the turn when one of them is closed.
"""

from __future__ import annotations

import os
import struct
import sys
from contextlib import suppress
from fcntl import F_GETLK, F_UNLCK, F_WRLCK, LOCK_EX, LOCK_NB, LOCK_UN, fcntl, lockf
from pathlib import Path
from threading import Condition, Thread

PATIENCE_S = 2.0
"""A turn takes milliseconds: when none comes for so long, its holder was stopped."""

_JOINING = 1 << 60
"""The byte of the process that joins, far behind the end of any log; the queue is behind it."""

# ``struct flock``: Python leaves its layout to callers of ``F_GETLK``.
if sys.platform == "darwin":
    _FLOCK, _FIELDS = struct.Struct("qqihh"), ("start", "len", "pid", "type", "whence")
else:
    _FLOCK, _FIELDS = struct.Struct("hhqqi0q"), ("type", "whence", "start", "len", "pid")


class WriterQueue:
    """The place in the queue of one `Database`, of whose connections one writes at a time.

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
        lock = dict(zip(_FIELDS, _FLOCK.unpack(answer), strict=True))
        if lock["type"] == F_UNLCK:
            break
        last = lock["start"] + lock["len"] - 1
    return last


def flock(kind: int, start: int, size: int) -> bytes:
    """Return the ``struct flock`` of ``size`` bytes from ``start`` on."""
    asked = {"type": kind, "whence": os.SEEK_SET, "start": start, "len": size, "pid": 0}
    return _FLOCK.pack(*map(asked.__getitem__, _FIELDS))


def _unlock(file: int, byte: int) -> None:
    with suppress(OSError):  # what was written is written
        lockf(file, LOCK_UN, 1, byte)
