"""Buffers of bytes: memory to read into, and what malloc does with it."""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import cache
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

_LARGE_BLOCK_BYTES = 31 << 20  # glibc learns from blocks of up to 32 MiB


def mapped(size: int) -> memoryview:
    """Return memory that goes back to the system once the last view of it is gone.

    malloc may keep what is freed: of blocks of some megabytes, which come and go with each step,
    it keeps as much again.

    Raises:
        MemoryError: no memory is left, or the process has too many mappings.
    """
    try:
        memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them; they halve the time of the first touch
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size]


def writable(blob: Buffer) -> Buffer:
    """Return the same bytes where they may be written: as they are, or else a copy."""
    return bytearray(blob) if memoryview(blob).readonly else blob


@cache
def keep_what_is_freed() -> None:
    """Let malloc keep some dozens of freed megabytes for the next allocation.

    The bytes of a step are a few megabytes, which come and go with each. In a process that has
    never freed a large block, glibc gives them back to the kernel, and has the pages cleared when
    it asks for them again: that was a third of the processor time of a step. It learns from the
    largest block that was freed; this one is not touched, so it costs no memory: the first time.
    Later ones would come from what is kept, and be cleared. Other allocators take no notice.
    """
    with suppress(MemoryError):  # where so much is not allowed, nothing is kept either
        bytes(_LARGE_BLOCK_BYTES)  # zeros that are never written: no page of it is ever made
