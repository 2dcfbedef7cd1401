"""The files under an open SQLite database: still the ones that its path names?

A connection keeps the file that it opened. If somebody removes or replaces it, or moves its folder,
commits go on into a file that nobody will find again.
"""

from __future__ import annotations

import os
from pathlib import Path

from trinity_buffer.errors import StoreReplacedError

_Identity = tuple[int, int] | None


class StoreFiles:
    """The database and its log, by device and inode, as they were when they were opened.

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
            found = _identity(path)
            if known is None and found is not None:
                raise StoreReplacedError(
                    f"somebody writes to the store ({path} has come), which was opened to be read "
                    "as it lay: open it again"
                )
            if found != known:
                what = "removed" if found is None else "replaced by another file"
                raise StoreReplacedError(
                    f"{path} was {what} while this process had it open: what it writes now is lost "
                    "when it ends. Nothing of this call is acknowledged; end every process that "
                    "uses the store, put the file back, and write again"
                )


def _identity(path: str) -> _Identity:
    try:
        found = os.stat(path)  # noqa: PTH116 - after every commit: a third of the time
    except OSError:
        return None
    return found.st_dev, found.st_ino
