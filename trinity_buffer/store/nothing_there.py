"""What somebody is told who looks for a store where there is none."""

from __future__ import annotations

import difflib
from pathlib import Path

from trinity_buffer.errors import UnknownStoreError

_WRITE_FIRST = ": start the explorer first, or wait until it has written"


def nothing_at(path: Path, *, read_only: bool = True) -> UnknownStoreError:
    """Return the error that names what is there in place of ``path``.

    Args:
        path: of a file that is not there.
        read_only: False for a trainer, which comes after an explorer.
    """
    near = sorted(one.name for one in path.parent.glob("*.db"))
    meant = difflib.get_close_matches(path.name, near, n=1)
    there = "" if read_only else _WRITE_FIRST
    if meant:
        there = f" (did you mean {path.with_name(meant[0])}?)"
    if not path.parent.is_dir():
        there = ", nor is there its folder"
    return UnknownStoreError(f"{path}: there is no store to read{there}")


def nothing_in(name: str, *, read_only: bool) -> UnknownStoreError:
    """Return the error of an empty database; see `nothing_at`."""
    remedy = "" if read_only else _WRITE_FIRST
    return UnknownStoreError(f"{name} is empty: there is no store to read{remedy}")
