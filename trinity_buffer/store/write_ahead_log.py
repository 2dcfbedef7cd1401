"""How long SQLite's write-ahead log has grown, and which processes keep it from beginning anew.

A reader that holds an old state keeps all that was written since: nobody may copy it over what that
reader still sees, and the log grows until it lets go.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trinity_buffer.sizes import sizes
from trinity_buffer.store.sqlite import PAGE_SIZE_BYTES

_READ_LOCKS = range(123, 128)
"""Bytes of the shared memory that readers lock (sqlite.org/walformat.html, section 2.2)."""


@dataclass(frozen=True, slots=True)
class LogState:
    """The write-ahead log of one store.

    Attributes:
        size_bytes: on disk.
        limit_bytes: at which writers copy it into the database; it stays near that.
        readers: numbers of the processes of this machine that read right now, but this one.
    """

    size_bytes: int
    limit_bytes: int
    readers: tuple[int, ...]

    @property
    def has_grown(self) -> bool:
        """Whether something keeps it from beginning anew."""
        return self.size_bytes > 2 * self.limit_bytes

    def told(self) -> str:
        """Return what keeps it so long, as people say it."""
        who = ", ".join(map(str, self.readers)) or "a process of another container"
        size, limit = self.size_bytes >> 20, self.limit_bytes >> 20
        return (
            f"the write-ahead log has {size} MiB where {limit} are usual: a reader holds an old "
            f"state open (readers now: pid {who}); end its read transaction"
        )


def log_state(path: Path) -> LogState:
    """Return the state of the log of the database at ``path``."""
    log = path.with_name(f"{path.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    limit = sizes().wal_pages_limit * PAGE_SIZE_BYTES
    return LogState(size, limit, _readers(path.with_name(f"{path.name}-shm")))


def _readers(shared: Path, locks: Path = Path("/proc/locks")) -> tuple[int, ...]:
    try:
        inode, lines = shared.stat().st_ino, locks.read_text().splitlines()
    except OSError:
        return ()
    found = set()
    for line in lines:
        fields = line.split()  # 1: POSIX ADVISORY READ pid major:minor:inode start end
        if len(fields) == 8 and fields[5].rpartition(":")[2] == str(inode):
            pid, start = int(fields[4]), int(fields[6])
            if start in _READ_LOCKS and pid > 0 and pid != os.getpid():
                found.add(pid)
    return tuple(sorted(found))
