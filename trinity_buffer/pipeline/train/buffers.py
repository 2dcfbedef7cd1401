"""The flat columns of a step: places of its rows in them, and copying of stored blocks.

Rows of one shape at equal distances form a rectangle: a few large copies write each byte of a
column once. The zeros between rows are written with them, while both are in the cache.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.load.blocks import Array, Block

_Allocate: TypeAlias = "Callable[[int], npt.NDArray[np.uint8]]"


class Rectangle(NamedTuple):
    """Rows of one shape at equal distances in a column.

    Attributes:
        first: begin of the first row.
        distance: distance between the begins of two rows.
        rows: number of rows.
        prompt: begin of the response in each row.
        length: number of tokens of each row.
        extent: number of elements of each row, padding included.
    """

    first: int
    distance: int
    rows: int
    prompt: int
    length: int
    extent: int

    def of(self, column: Array) -> Array:
        """Return the rectangle as a view of ``column``, ``[rows, extent]``."""
        width = column.itemsize
        shape, strides = (self.rows, self.extent), (self.distance * width, width)
        return np.ndarray(shape, column.dtype, column, self.first * width, strides)


class Part(NamedTuple):
    """A micro-batch in the columns of its rank: its rows, its elements, and its shape."""

    rows: slice
    elements: slice
    shape: tuple[int, ...]


@dataclass(slots=True)
class Places:
    """The places of one rank's rows in the columns of a step.

    A column is the concatenation of the rank's micro-batches, each padded or packed.

    Attributes:
        begins: ``[rows]``, begin of each row of the step; negative: on another rank.
        prompts, lengths: ``[rows]``, number of tokens of the prompt and of the whole row.
        extents: ``[rows]``, number of elements of each row, padding included.
        parts: the part of each micro-batch.
        padded: whether micro-batches are padded.
    """

    begins: Array
    prompts: Array
    lengths: Array
    extents: Array
    parts: Sequence[Part]
    padded: bool
    _known: dict[int, tuple[Array, Rectangle | None]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of elements of a column."""
        return self.parts[-1].elements.stop if self.parts else 0

    @property
    def number(self) -> int:
        """Number of rows on this rank."""
        return int((self.begins >= 0).sum())

    def rectangle(self, rows: Array) -> Rectangle | None:
        """Return ``rows`` as a rectangle; None if they differ, or are not all on this rank."""
        # Blocks of one segment share their array of rows, so its identity can be the cache key.
        known = self._known.get(id(rows))
        if known is None or known[0] is not rows:
            known = self._known[id(rows)] = rows, self._rectangle(rows)
        return known[1]

    def _rectangle(self, rows: Array) -> Rectangle | None:
        bounds = np.stack((self.begins, self.prompts, self.lengths, self.extents))[:, rows]
        first, prompt, length, extent = bounds[:, 0].tolist()
        distance = extent
        if len(rows) > 1:
            steps = bounds[:, 1:] - bounds[:, :-1]
            distance = int(steps[0, 0])
            if distance < extent or (steps != [[distance], [0], [0], [0]]).any():
                return None
        return None if first < 0 else Rectangle(first, distance, len(rows), prompt, length, extent)


@dataclass(frozen=True, slots=True)
class PackedMask:
    """A mask as it was when the step was made, an eighth of its size."""

    bits: Array
    size: int

    @classmethod
    def of(cls, mask: Array) -> PackedMask:
        """Return a packed copy of ``mask``, whose memory may be reused afterwards."""
        return cls(np.packbits(mask), len(mask))

    def unpacked(self) -> Array:
        """Return the mask."""
        return np.unpackbits(self.bits, count=self.size).view(np.bool_)


def put_rows(
    column: Array,
    blocks: deque[Block],
    places: Places,
    weights: Array | None = None,
    *,
    after_prompt: bool = True,
) -> Iterator[None]:
    """Write a whole column: the rows of ``blocks``, and zeros everywhere else.

    Yields after each block, which is released by then.

    Args:
        column: uninitialized memory.
        blocks: disjoint blocks, removed as they are written.
        places: places of the rows.
        weights: column of factors of scaled values; None: all tokens are trained.
        after_prompt: whether the blocks cover responses instead of whole rows.
    """
    rectangles = [_rectangle_of(block, places, after_prompt=after_prompt) for block in blocks]
    whole = None not in rectangles and sum(len(block.rows) for block in blocks) == places.number
    if not whole:
        column.fill(0)
    for where in rectangles:
        if where is None:
            _put_each(column, blocks.popleft(), places, weights, after_prompt=after_prompt)
        else:
            start, area = where.prompt if after_prompt else 0, where.of(column)
            if whole:
                area[:, :start] = area[:, where.length :] = 0
            mask = None if weights is None else where.of(weights)[:, start : where.length]
            _put_rectangle(area[:, start : where.length], blocks.popleft(), mask)
        yield


def _put_rectangle(target: Array, block: Block, mask: Array | None) -> None:
    if not block.scaled:
        target[...] = block.data.reshape(target.shape)
    elif mask is None:
        target[...] = block.data[:, None]
    else:
        np.multiply(mask, block.data[:, None], out=target, casting="unsafe")


def _rectangle_of(block: Block, places: Places, *, after_prompt: bool) -> Rectangle | None:
    """Return the rectangle of a block; None if its rows must be written one by one."""
    where = places.rectangle(block.rows)
    if where is None or block.scaled:
        return where
    fits = block.size == where.length - (where.prompt if after_prompt else 0)
    return where if fits else None


def _put_each(
    column: Array, block: Block, places: Places, weights: Array | None, *, after_prompt: bool
) -> None:
    begins, prompts = places.begins[block.rows], places.prompts[block.rows]
    starts = (begins + prompts if after_prompt else begins).tolist()
    here = (begins >= 0).tolist()
    if not block.scaled:
        for start, mine, (a, z) in zip(starts, here, pairwise(block.ends.tolist()), strict=True):
            if mine:
                column[start : start + z - a] = block.data[a:z]
        return
    stops = (begins + places.lengths[block.rows]).tolist()
    for start, stop, mine, scalar in zip(starts, stops, here, block.data, strict=True):
        if mine and weights is None:
            column[start:stop] = scalar
        elif mine and weights is not None:
            np.multiply(weights[start:stop], scalar, out=column[start:stop], casting="unsafe")


def put_text(column: Array, places: Places) -> Iterator[None]:
    """Write the attention mask."""
    column.fill(1)
    for rows, elements, shape in places.parts if places.padded else ():
        lengths = places.lengths[rows]
        if (lengths < shape[1]).any():
            np.less(np.arange(shape[1]), lengths[:, None], out=column[elements].reshape(shape))
        yield


def put_positions(column: Array, places: Places) -> Iterator[None]:
    """Write the position of each token in its packed row."""
    for rows, elements, _ in places.parts:
        lengths = places.lengths[rows]
        longest = np.arange(lengths.max(initial=0))
        if len(lengths) and (lengths == lengths[0]).all():
            column[elements].reshape(len(lengths), len(longest))[...] = longest
        else:
            for begin, size in zip(places.begins[rows].tolist(), lengths.tolist(), strict=True):
                column[begin : begin + size] = longest[:size]
        yield


class Arena:
    """The memory of all columns of a step in one piece.

    Args:
        memory: reusable memory of earlier steps.
        size: number of elements of a column.
        dtypes: dtypes of the columns, in the order in which `column` is called.
    """

    def __init__(self, memory: StepMemory, size: int, dtypes: Sequence[type[np.generic]]) -> None:
        self._dtypes = iter(dtypes)
        self._size = size
        self._memory = memory.take(
            sum(aligned(size * np.dtype(dtype).itemsize) for dtype in dtypes)
        )
        self._used = 0

    def column(self) -> Array:
        """Return the next column, uninitialized."""
        dtype = next(self._dtypes)
        begin, end = self._used, self._used + self._size * np.dtype(dtype).itemsize
        self._used = aligned(end)
        return self._memory[begin:end].view(dtype)


def aligned(size: int) -> int:
    """Return ``size`` rounded up to where the next column may begin."""
    return size + -size % 64


_OUR_REFERENCES = 3
"""References to an unused piece: by the deque, the loop, and the call of `sys.getrefcount`."""


def _usual(size: int) -> npt.NDArray[np.uint8]:
    return np.empty(size, np.uint8)


class StepMemory:
    """Reuses memory, in one piece for all columns of a step.

    Touching fresh memory costs more than writing to it: the kernel has to find, clear and map each
    page. So pieces are kept, and handed out again once no array or tensor refers to them. Not for
    concurrent use by threads.

    Args:
        allocate: returns fresh bytes; None: ordinary memory.
    """

    def __init__(self, allocate: _Allocate | None = None) -> None:
        self._allocate = allocate or _usual
        self._pieces: deque[npt.NDArray[np.uint8]] = deque(maxlen=sizes().pieces_kept)

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Return ``size`` uninitialized bytes."""
        for piece in self._pieces:
            fits = size <= len(piece) <= 4 * size
            if fits and sys.getrefcount(piece) <= _OUR_REFERENCES:
                return piece[:size]
        new = self._allocate(size + size // 8)  # slack: sizes of steps differ a little
        self._pieces.append(new)
        return new[:size]
