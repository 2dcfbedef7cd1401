"""Sizes of pages, blocks, spans and batches that little data crosses many times."""

from __future__ import annotations

from dataclasses import fields

from trinity_buffer.limits import Sizes

NAMES = [field.name for field in fields(Sizes) if not field.name.startswith("wal_")]


def small(size: int) -> dict[str, int]:
    """Return this size for everything, and parts of a segment that are some bytes long."""
    return dict.fromkeys(NAMES, size) | {"bytes_per_part": 50 * size}
