"""Bytes in pieces: what is written piece by piece need not be joined before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

JOINED_BYTES = 1 << 16
"""Pieces below this are joined with their neighbours: each is a call of whoever writes them."""


class Blob:
    """Bytes in ``pieces``, of which memoryviews are of bytes.

    Attributes:
        pieces: in order; whoever made them changes them no more.
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
        found, some, room = list[Blob](), list[Buffer](), size
        for piece in self.pieces:
            view = memoryview(piece)
            while view:
                some.append(view[:room])
                view, room = view[room:], room - len(some[-1])
                if not room:
                    found.append(Blob(some))
                    some, room = [], size
        return [*found, Blob(some)] if some else found


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
