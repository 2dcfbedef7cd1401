"""Fields of many rows as blocks of values that are contiguous in a segment.

The rows of a step were mostly written together, so a batch takes a few large copies instead of
thousands of small ones, in whatever order its rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trinity_buffer.codec.segments import Column
from trinity_buffer.pipeline.tensors import flat_tensor
from trinity_buffer.store.rows import position_of, slot_of

Array: TypeAlias = npt.NDArray[Any]
Value: TypeAlias = "Array | float | None"
"""A vector as a view, one number that stands for ``number * action_mask``, or None."""

_ONLY_TORCH = ("bfloat", "float8", "float4")
"""Prefixes of the names of float dtypes that NumPy lacks."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The values of one field in some rows of a step; views that must not be written to.

    Attributes:
        rows: ``[n]``, the rows of the step.
        data: their elements, row after row; if scaled, one number per row.
        ends: ``[n + 1]``, offsets of the rows in ``data``.
        scaled: whether each number stands for ``number * action_mask``.
        size: number of elements of every row, -1 if rows may differ.
    """

    rows: Array
    data: Array
    ends: Array
    scaled: bool = False
    size: int = -1

    def values(self) -> list[Value]:
        """Return the value of each row."""
        if self.scaled:
            return [float(number) for number in self.data]
        return [self.data[a:z] for a, z in pairwise(self.ends.tolist())]


@dataclass(slots=True)
class Field:
    """One field of the ``number`` rows of a step; rows outside all blocks have no value."""

    number: int
    blocks: list[Block] = field(default_factory=list)

    def values(self) -> list[Value]:
        """Return the value of each row, None for missing ones."""
        values: list[Value] = [None] * self.number
        for block in self.blocks:
            for row, value in zip(block.rows.tolist(), block.values(), strict=True):
                values[row] = value
        return values

    def present(self) -> Array:
        """Return ``[rows]`` bool: which rows have a value."""
        there = np.zeros(self.number, np.bool_)
        for block in self.blocks:
            there[block.rows] = True
        return there

    def missing(self) -> list[int]:
        """Return the rows that have no value."""
        if sum(len(block.rows) for block in self.blocks) == self.number:  # blocks do not overlap
            return []
        rows_without: list[int] = np.flatnonzero(~self.present()).tolist()
        return rows_without

    def sizes(self) -> Array:
        """Return ``[rows]``: the number of elements of each row, 0 for missing ones."""
        sizes = np.zeros(self.number, np.int64)
        for block in self.blocks:
            sizes[block.rows] = np.diff(block.ends) if block.size < 0 else block.size
        return sizes

    def misfits(self, sizes: Array) -> list[int]:
        """Return the rows whose number of elements differs from ``sizes`` (``[rows]``)."""
        wrong: list[int] = []
        for block in self.blocks:
            if not block.scaled:
                own = np.diff(block.ends) if block.size < 0 else block.size
                wrong += block.rows[own != sizes[block.rows]].tolist()
        return wrong

    def without(self, dropped: Array) -> Field:
        """Return the field without the ``dropped`` rows (``[rows]`` bool)."""
        parts = []
        for block in self.blocks:
            left = np.flatnonzero(~dropped[block.rows])
            for a, z in contiguous_ranges(left):
                first, last = int(left[a]), int(left[z - 1]) + 1
                ends = block.ends[first : last + 1]
                data, rows = block.data[ends[0] : ends[-1]], block.rows[first:last]
                parts.append(Block(rows, data, ends - ends[0], block.scaled, block.size))
        return Field(self.number, parts)


def field_of_values(values: Sequence[Array]) -> Field:
    """Return a field made of one vector per row."""
    ends, size = _ends(np.array([len(value) for value in values], np.int64))
    block = Block(np.arange(len(values)), np.concatenate(values), ends, size=size)
    return Field(len(values), [block])


def contiguous_ranges(numbers: Array | Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of the ranges in which each number is one more than the last."""
    if not len(numbers):
        return []
    breaks = np.flatnonzero(np.diff(np.asarray(numbers)) != 1) + 1
    return list(pairwise([0, *breaks.tolist(), len(numbers)]))


class SlotRange(NamedTuple):
    """Rows of a step that are consecutive slots of one event."""

    rows: Array
    position: int
    slots: range


def slot_ranges(addresses: Sequence[int]) -> list[SlotRange]:
    """Return the rows at these addresses as ranges, ordered by address."""
    unordered = np.array(addresses)
    order = np.argsort(unordered, kind="stable")
    ordered = unordered[order]
    # Consecutive addresses are consecutive rows of one segment: an address holds the position in
    # its high bits, so the next event's addresses are far away.
    ranges = []
    for a, z in contiguous_ranges(ordered):
        first = int(ordered[a])
        slots = range(slot_of(first), slot_of(first) + z - a)
        ranges.append(SlotRange(order[a:z], position_of(first), slots))
    return ranges


def block_of(column: Column, rows: Array, slots: range) -> Block | None:
    """Return the ``slots`` of a column as a block of the step's ``rows``; None if it has none."""
    first, last = slots.start, slots.stop
    if column.rows is not None:
        first, last = np.searchsorted(column.rows, [first, last]).tolist()
        if first == last:
            return None
        rows = rows[column.rows[first:last] - slots.start]
    if column.encoding == "scaled_mask":
        ends, size, scaled = np.arange(len(rows) + 1), 1, True
    else:
        sizes, scaled = column.sizes, False
        ends, size = _ends(sizes[first:last])
        first = int(sizes[:first].sum()) if first else 0
        last = first + int(ends[-1])
    elements = column.elements
    if not column.dtype.startswith(_ONLY_TORCH):
        return Block(rows, elements[first:last], ends, scaled, size)
    width = elements.itemsize
    data = np.array(column.data[first * width : last * width])
    numbers: Array = flat_tensor(replace(column, data=data)).float().numpy()
    return Block(rows, numbers, ends, scaled, size)


def _ends(sizes: Array) -> tuple[Array, int]:
    """Return the offsets of rows of these sizes, and their common size or -1."""
    size, number = int(sizes[0]), len(sizes)
    if (sizes == size).all():
        return np.arange(0, (number + 1) * size, size) if size else np.zeros(number + 1, int), size
    ends = np.zeros(number + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    return ends, -1
