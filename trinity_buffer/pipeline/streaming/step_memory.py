"""The memory of a step's tensors, used again once nobody looks at them any more."""

from __future__ import annotations

import sys
from collections import deque

import numpy as np
import numpy.typing as npt

from trinity_buffer.sizes import sizes

_OUR_REFERENCES = 3
"""To a piece that no tensor looks at: the deque's, the loop's, and that of the question itself."""


class StepMemory:
    """Hands out memory, all columns of a step in a single piece.

    The first touch of fresh memory costs more than what is then written to it: the kernel has to
    find, clear and map each page. So pieces are kept, and one that no array and no tensor refers to
    is handed out again. Not to be shared by threads that run at the same time.
    """

    def __init__(self) -> None:
        self._pieces: deque[npt.NDArray[np.uint8]] = deque(maxlen=sizes().pieces_kept)

    def zeros(self, size: int) -> npt.NDArray[np.uint8]:
        """Return ``size`` bytes of zeros."""
        found = self.take(size)
        found.fill(0)
        return found

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Return ``size`` bytes that hold anything."""
        for piece in self._pieces:
            fits = size <= len(piece) <= 4 * size
            if fits and sys.getrefcount(piece) <= _OUR_REFERENCES:
                return piece[:size]
        new = np.empty(size + size // 8, np.uint8)  # steps differ a little
        self._pieces.append(new)
        return new[:size]
