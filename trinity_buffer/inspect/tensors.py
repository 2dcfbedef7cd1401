"""Tensors of stored segments in a few numbers, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trinity_buffer.codec import Column, Segment

FIRST_VALUES = 8


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor as people read it.

    Attributes:
        minimum, mean, maximum: None of an empty tensor, and of bits that NumPy cannot read.
        first: the first elements.
        scaled_mask: stored as one number that stands for ``number * action_mask``.
    """

    dtype: str
    shape: tuple[int, ...]
    minimum: float | None
    mean: float | None
    maximum: float | None
    first: tuple[float | int | bool, ...]
    scaled_mask: bool = False


def values_of(column: Column) -> npt.NDArray[Any] | None:
    """Return the elements of a column as numbers, None of dtypes that NumPy cannot read."""
    if column.dtype == "bfloat16":
        return (column.elements.astype(np.uint32) << 16).view(np.float32)
    if column.dtype.startswith(("float8", "float4", "complex")):
        return None
    return column.elements


def row_of(column: Column, row: int) -> int | None:
    """Return where ``row`` of the segment is in its column, None if it has no tensor there."""
    if column.rows is None:
        return row
    place = int(np.searchsorted(column.rows, row))
    return place if place < len(column.rows) and column.rows[place] == row else None


def summaries(segment: Segment, row: int) -> Iterator[tuple[str, TensorSummary]]:
    """Yield field and summary of each tensor in one row of a segment."""
    for field, columns in segment.columns.items():
        for column in columns:
            place = row_of(column, row)
            if place is not None:
                yield field, _summary(column, place)


def _summary(column: Column, place: int) -> TensorSummary:
    begin, end = column.offsets[place : place + 2].tolist()
    shape = tuple(column.shapes[place].tolist())
    scaled = column.encoding == "scaled_mask"
    elements = values_of(column)
    if elements is None or begin == end:
        return TensorSummary(column.dtype, shape, None, None, None, (), scaled)
    values = elements[begin:end]
    numbers = values.astype(np.float64)
    return TensorSummary(
        column.dtype,
        shape,
        float(numbers.min()),
        float(numbers.mean()),
        float(numbers.max()),
        tuple(values[:FIRST_VALUES].tolist()),
        scaled,
    )


def mean_of(segment: Segment, field: str, row: int) -> float | None:
    """Return the mean of one field in one row, of a scaled mask its scale; None if it has none."""
    for column in segment.columns.get(field, []):
        place = row_of(column, row)
        if place is not None:
            return _summary(column, place).mean
    return None


def means_of(segment: Segment, field: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return `mean_of` for all rows, up to rounding, and which of them have one."""
    means, known = np.zeros(segment.rows), np.zeros(segment.rows, bool)
    for column in segment.columns.get(field, []):
        values, begins, sizes = values_of(column), column.offsets[:-1], column.sizes
        if values is None or not len(values):
            continue
        full = sizes > 0
        rows = np.flatnonzero(full) if column.rows is None else column.rows[full]
        sums = np.add.reduceat(values.astype(np.float64), begins[full])
        means[rows], known[rows] = sums / sizes[full], True
    return means, known


def elements_of(segment: Segment, field: str, row: int) -> npt.NDArray[Any] | None:
    """Return the elements of one field in one row; see `elements_of_rows`."""
    return elements_of_rows(segment, field, [row])[0]


def elements_of_rows(
    segment: Segment, field: str, rows: Sequence[int]
) -> list[npt.NDArray[Any] | None]:
    """Return the elements of one field in some rows, each flat; None where NumPy can read none.

    Of a scaled mask it is the one number that stands before the mask.
    """
    found: list[npt.NDArray[Any] | None] = [None] * len(rows)
    for column in segment.columns.get(field, []):
        values, ends = values_of(column), column.offsets.tolist()
        if values is None:
            continue
        places = None if column.rows is None else _places(column.rows)
        for at, row in enumerate(rows):
            place = row if places is None else places.get(row)
            if place is not None and found[at] is None:
                found[at] = values[ends[place] : ends[place + 1]]
    return found


def _places(rows: npt.NDArray[Any]) -> dict[int, int]:
    return {row: place for place, row in enumerate(rows.tolist())}
