"""News that a file was written to, from the kernel where it tells (inotify, on Linux)."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

_IN_MODIFY = 0x2
_NUM_BYTES = 4_096
"""Of one read: over a hundred events, and those that repeat the last one are not queued."""


def watch(path: Path) -> int | None:
    """Return a descriptor that is readable after each write to ``path``; the caller closes it.

    None where there is no such news: another system, no such file, or too many watches already. A
    write through a memory map is none.
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
