"""Processes take turns to write to a SQLite file, nearly in the order in which they came.

SQLite lets those who wait for a writer ask again after longer and longer pauses: who has just
written is the first to ask again, and somebody waits for seconds. The kernel keeps those who wait
for a lock of a file in order. So a writer locks a byte of the write-ahead log before it begins, and
a second byte while it is the next one: who lets go of the turn and wants it again stands behind
that one at least. SQLite itself locks nothing in that file.

This is for fairness alone. Who got no turn in time goes ahead without one, and SQLite's own lock
decides. The kernel frees the locks of a process that is killed; a forked child does not have them.
They are those of a process: two `Database` of one process do not wait for each other here, and lose
the turn when one of them is closed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, lockf
from pathlib import Path
from threading import Condition, Thread

PATIENCE_S = 2.0
"""A turn takes milliseconds: when none comes for so long, somebody was stopped in theirs."""

_TURN, _NEXT = 1 << 60, (1 << 60) + 1
"""The bytes that are locked, far behind what the log will ever hold."""


class Turns:
    """The turns of the connections of one `Database`, of which one writes at a time.

    Args:
        path: of the database.
    """

    def __init__(self, path: Path) -> None:
        whole = path.resolve()
        self._log = whole.with_name(f"{whole.name}-wal")
        self._file: int | None = None
        self._state = Condition()
        self._waits = False  # a thread does, for the turn
        self._wanted = self._mine = self._closed = False

    def take(self) -> None:
        """Return when it is the turn of this process, or after `PATIENCE_S`.

        Where an earlier call ran out of patience and its turn has not come yet, return at once.
        """
        with self._state:
            if self._file is None:
                try:
                    self._file = os.open(self._log, os.O_RDWR | os.O_CLOEXEC)
                except OSError:  # there is no log yet, or no right to it: SQLite will say so
                    return
            if self._waits:
                return
            self._mine = self._take_at_once(self._file)
            if self._mine:
                return
            try:
                Thread(target=self._wait, args=(self._file,), daemon=True).start()
            except RuntimeError:  # there are too many threads, or the interpreter ends
                return
            self._waits = self._wanted = True
            self._state.wait_for(lambda: not self._waits, PATIENCE_S)
            self._wanted = False

    def give_back(self) -> None:
        """Let the next one write."""
        with self._state:
            if self._mine and self._file is not None:
                self._mine = False
                _unlock(self._file, _TURN)

    def close(self) -> None:
        """Stand in the queue no more."""
        with self._state:
            self._closed = True
            if self._file is not None and not self._waits:
                os.close(self._file)
                self._file = None

    def _take_at_once(self, file: int) -> bool:
        try:
            lockf(file, LOCK_EX | LOCK_NB, 1, _NEXT)
        except OSError:
            return False
        try:
            lockf(file, LOCK_EX | LOCK_NB, 1, _TURN)
        except OSError:
            return False
        finally:
            _unlock(file, _NEXT)
        return True

    def _wait(self, file: int) -> None:
        """Wait for the turn, however long it takes; give it back if nobody wants it any more.

        A thread of its own does, for the kernel knows no limit to such a wait.
        """
        got = False
        with suppress(OSError):  # such as EDEADLK, which the kernel guesses where threads wait
            lockf(file, LOCK_EX, 1, _NEXT)
            lockf(file, LOCK_EX, 1, _TURN)
            got = True
        with self._state:  # to the end: who closes the file meanwhile waits for it
            self._waits = False
            self._mine = got and self._wanted
            self._state.notify()
            if got and not self._mine:
                _unlock(file, _TURN)
            _unlock(file, _NEXT)
            if self._closed:
                os.close(file)


def _unlock(file: int, byte: int) -> None:
    with suppress(OSError):  # what was written is written
        lockf(file, LOCK_UN, 1, byte)
