"""Sizes of pages, blocks, spans and batches that little data crosses many times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from trinity_buffer.limits import Sizes, sizes

NAMES = [field.name for field in fields(Sizes) if not field.name.startswith("wal_")]


def small(size: int) -> dict[str, int]:
    """Return this size for everything, and parts of a segment that are some bytes long."""
    return dict.fromkeys(NAMES, size) | {"bytes_per_part": 50 * size}


@contextmanager
def resized(**changed: int) -> Iterator[Sizes]:
    """Let other sizes hold in this process while the context is open.

    Raises:
        AttributeError: there is no such size.
    """
    before = {name: getattr(sizes, name) for name in changed}
    try:
        for name, size in changed.items():
            setattr(sizes, name, size)
        yield sizes
    finally:
        for name, size in before.items():
            setattr(sizes, name, size)
