"""Blocks into the flat columns of a step: as one rectangle where rows are of one size."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trinity_buffer.pipeline.loading.blocks import Array, Block
from trinity_buffer.sizes import sizes


class Arena:
    """The memory of all columns of a step, one after another.

    Args:
        memory: of earlier steps.
        size: elements of a column.
        dtypes: of the columns, in the order in which they are asked for.
    """

    def __init__(self, memory: StepMemory, size: int, dtypes: Sequence[type[np.generic]]) -> None:
        self._dtypes = iter(dtypes)
        self._size = size
        self._memory = memory.take(sum(_aligned(size * np.dtype(one).itemsize) for one in dtypes))
        self._used = 0

    def column(self, *, zeros: bool = True) -> Array:
        """Return the next column: zeros, or anything where the caller writes all of it.

        Zeros are put into it only now: what is written to it next finds it in the cache.
        """
        dtype = next(self._dtypes)
        begin, end = self._used, self._used + self._size * np.dtype(dtype).itemsize
        self._used = _aligned(end)
        found = self._memory[begin:end]
        if zeros:
            found.fill(0)
        return found.view(dtype)


def _aligned(size: int) -> int:
    return size + -size % 64


def rectangle(column: Array, begins: Array, sizes: Array) -> Array | None:
    """Return rows of one size at equal distances as one view of ``column``; None if they differ."""
    first, stride = int(begins[0]), int(sizes[0])
    if len(begins) > 1:
        stride = int(begins[1]) - first
        if first < 0 or stride < sizes[0] or (begins[1:] - begins[:-1] != stride).any():
            return None
    if first < 0 or (sizes != sizes[0]).any():
        return None
    shape, width = (len(begins), int(sizes[0])), column.itemsize
    return np.ndarray(shape, column.dtype, column, first * width, (stride * width, width))


def copy_rows(column: Array, block: Block, begins: Array) -> None:
    """Copy the rows of a block to where they begin in ``column``."""
    to = begins[block.rows]
    target = rectangle(column, to, np.diff(block.ends))
    if target is not None:
        target[...] = block.data.reshape(target.shape)
        return
    for begin, (a, z) in zip(to.tolist(), pairwise(block.ends.tolist()), strict=True):
        if begin >= 0:
            column[begin : begin + z - a] = block.data[a:z]


def scale_mask(column: Array, block: Block, begins: Array, weights: Array, sizes: Array) -> None:
    """Put the multiples of the mask that a block stands for to where its rows begin."""
    to, lengths = begins[block.rows], sizes[block.rows]
    target, mask = rectangle(column, to, lengths), rectangle(weights, to, lengths)
    if target is not None and mask is not None:
        if mask.dtype == np.bool_ and mask.all():
            target[...] = block.data[:, None]
        else:
            np.multiply(mask, block.data[:, None], out=target, casting="unsafe")
        return
    ends = (to + lengths).tolist()
    for begin, end, scalar in zip(to.tolist(), ends, block.data, strict=True):
        if begin >= 0:
            np.multiply(weights[begin:end], scalar, out=column[begin:end], casting="unsafe")


def fill_rows(column: Array, begins: Array, sizes: Array, values: Array) -> None:
    """Put the first of ``values``, as many as it has elements, into every row."""
    target = rectangle(column, begins, sizes)
    if target is not None:
        target[...] = values[: sizes[0]]
        return
    for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
        if begin >= 0:
            column[begin : begin + size] = values[:size]


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
