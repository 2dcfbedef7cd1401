"""Bytes in pieces that can be written without being joined, and memory to read into."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

JOINED_BYTES = 1 << 16
"""Shorter pieces are joined with their neighbours: each piece costs its writer a call."""

_LARGE_BLOCK_BYTES = 31 << 20  # glibc learns from blocks of up to 32 MiB


class Blob:
    """Bytes in ``pieces``; memoryviews among them have the format of bytes.

    Attributes:
        pieces: in order; their maker does not change them any more.
    """

    __slots__ = ("_size", "pieces")

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self.pieces = pieces
        self._size = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return bytes(self.pieces[0]) if len(self.pieces) == 1 else b"".join(self.pieces)

    def cut(self, size: int) -> list[Blob]:
        """Return the same bytes in blobs of ``size`` bytes, the last one perhaps smaller."""
        if len(self) <= size:
            return [self]
        blobs, pieces, room = list[Blob](), list[Buffer](), size
        for piece in self.pieces:
            view = memoryview(piece)
            while view:
                pieces.append(view[:room])
                view, room = view[room:], room - len(pieces[-1])
                if not room:
                    blobs.append(Blob(pieces))
                    pieces, room = [], size
        return [*blobs, Blob(pieces)] if pieces else blobs


def few_pieces(pieces: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yield the same bytes, short neighbours joined."""
    short, size = list[Buffer](), 0
    for piece in pieces:
        if size and size + len(piece) > JOINED_BYTES:
            yield b"".join(short)
            short, size = [], 0
        if len(piece) >= JOINED_BYTES:
            yield piece
            continue
        short.append(piece)
        size += len(piece)
    if size:
        yield b"".join(short)


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
