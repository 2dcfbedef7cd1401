"""Memory that is used again as soon as nobody looks at it any more.

What a write makes of its tensors is a few hundred kilobytes and lives for milliseconds. Allocated
anew each time, its pages come from the kernel and go back there, which takes longer than to fill
them.
"""

from __future__ import annotations

from threading import Lock

import numpy as np

from trinity_buffer.codec.columns import Bytes
from trinity_buffer.sizes import sizes

ALIGNMENT = 64


class Block:
    """The bytes of ``whole``, to be taken from its beginning on."""

    def __init__(self, whole: bytearray) -> None:
        self._bytes: Bytes = np.frombuffer(whole, np.uint8)
        self._used = 0

    def take(self, size: int) -> Bytes:
        """Return ``size`` bytes that nobody else has; new ones, if there are not so many left."""
        begin, end = self._used, self._used + size
        if end > len(self._bytes):
            return np.empty(size, np.uint8)
        self._used = end + -end % ALIGNMENT
        return self._bytes[begin:end]


class ReusedMemory:
    """A few blocks, of which one that nothing is left of is given out anew. Threads may share it.

    Python counts who looks at a bytearray, and does not resize it while somebody does. So nothing
    has to be given back, and nothing can be given back too early.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a forked child: there, nobody gives back a lock that a thread had."""
        self._lock = Lock()
        self._kept: list[bytearray] = []

    def block(self, size: int) -> Block:
        """Return a block of at least ``size`` bytes, or of none where so much is not kept."""
        if not 0 < size <= sizes().bytes_per_block:
            return Block(bytearray())
        with self._lock:
            for number, whole in enumerate(self._kept):
                if not _is_looked_at(whole):
                    if len(whole) < size:
                        self._kept[number] = _room(size)
                    return Block(self._kept[number])
            made = _room(size)
            if len(self._kept) < sizes().blocks_kept:
                self._kept.append(made)
            return Block(made)


def _is_looked_at(whole: bytearray) -> bool:
    try:
        whole.append(whole.pop())
    except BufferError:
        return True
    return False


def _room(size: int) -> bytearray:
    return bytearray(1 << (size - 1).bit_length())
