"""What a segment is made of: columns of numbers, columns of objects. All are views of one blob."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from trinity_buffer.codec.arrays import DTYPES
from trinity_buffer.codec.objects import AsTensor, unpack_object
from trinity_buffer.errors import CodecError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]

ANNOTATED = ("advantages", "returns", "token_level_reward")
"""Fields of an annotation, one number per token of the response each."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One field of many rows whose tensors share dtype and number of dimensions, concatenated.

    Attributes:
        field: name of the field.
        dtype: torch's name, without the prefix; a key of `DTYPES`.
        shapes: ``[n, ndim]``, the shape of each row's tensor.
        data: ``[bytes]``, the elements of all rows, each row in C order.
        rows: ``[n]`` ascending, the rows that are present; None: all.
        encoding: ``raw``, or ``scaled_mask``: one scalar per row (``ndim`` 0) that stands for the
            tensor ``scalar * action_mask`` in ``dtype``.
    """

    field: str
    dtype: str
    shapes: Integers
    data: Bytes
    rows: Integers | None = None
    encoding: str = "raw"

    @property
    def sizes(self) -> Integers:
        """Number of elements of each row, ``[n]``."""
        if self.shapes.shape[1] == 1:
            return self.shapes[:, 0]
        sizes: Integers = self.shapes.prod(axis=1, dtype=np.int64)
        return sizes

    @property
    def offsets(self) -> Integers:
        """Where each row begins, in elements, and where the last one ends: ``[n + 1]``."""
        offsets = np.zeros(len(self.shapes) + 1, np.int64)
        np.cumsum(self.sizes, out=offsets[1:])
        return offsets

    @property
    def elements(self) -> npt.NDArray[Any]:
        """The elements as a view of `data`; bits in unsigned integers where NumPy has no type."""
        return self.data.view(DTYPES[self.dtype])


class ObjectColumn(Sequence[Any]):
    """One field of objects, decoded when asked for."""

    __slots__ = ("_data", "_offsets")

    def __init__(self, offsets: npt.NDArray[np.uint32], data: memoryview) -> None:
        self._offsets = offsets
        self._data = data

    @override
    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    @override
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.values(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.values([index % len(self)])[0]

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self.values(range(len(self))))

    @property
    def pieces(self) -> list[bytes]:
        """The objects as they are packed; an empty one is None."""
        ends, data = self._offsets.tolist(), self._data
        return [bytes(data[start:stop]) for start, stop in pairwise(ends)]

    def values(self, rows: Sequence[int], as_tensor: AsTensor | None = None) -> list[Any]:
        """Return the objects of ``rows``.

        Raises:
            CodecError: a damaged one.
        """
        ends, data = self._offsets.tolist(), self._data
        return [
            unpack_object(data[ends[row] : ends[row + 1]], as_tensor)
            if ends[row] < ends[row + 1]
            else None
            for row in rows
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """What a blob holds; arrays are views of the blob.

    Attributes:
        rows: how many rows it has.
        columns: field -> its columns, more than one where rows differ in dtype or dimensions.
        objects: field -> its objects, one per row.
        aliases: fields that are bit for bit another one; `columns` has them under both names.
    """

    rows: int
    columns: dict[str, list[Column]] = field(default_factory=dict)
    objects: dict[str, ObjectColumn] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def flat(self, name: str) -> tuple[npt.NDArray[Any], Integers]:
        """Return the elements of all rows of a one-dimensional field, and where each row begins.

        Row ``i`` is ``elements[offsets[i]:offsets[i + 1]]``; both are views. Types that NumPy does
        not have come as unsigned integers that hold the bits.

        Raises:
            CodecError: the field is absent, or its rows are not all there, of one dtype and 1-D.
        """
        columns = self.columns.get(name, [])
        # `rows` says that some are absent; what is scaled has one scalar in place of a row.
        flat = [c.rows is None and c.shapes.shape[1] == 1 and c.encoding == "raw" for c in columns]
        if flat != [True]:
            raise CodecError(
                f"{name} is not one-dimensional and of one dtype in all {self.rows} rows: "
                "decode it row by row"
            )
        return columns[0].elements, columns[0].offsets


def is_scorable(columns: Mapping[str, Sequence[Column]]) -> bool:
    """Return whether one number per row can stand for what a strategy makes of it.

    That is so where each row has a boolean action mask, and no row has values per token that an
    annotation would hand on.

    Args:
        columns: field -> columns of one write, at least those of the light family.
    """
    masks = columns.get("action_mask", ())
    plain = [mask.rows is None and mask.dtype == "bool" for mask in masks] == [True]
    return plain and not any(columns.get(field) for field in ANNOTATED)
