"""Converts torch tensors to the codec's columns of bytes and back.

The columns of a write are a few hundred kilobytes that live for milliseconds. `BufferPool` reuses
their memory: fresh pages from the kernel take longer to map than to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.codec import DTYPES, Column, RawTensor
from trinity_buffer.codec.segments import Bytes
from trinity_buffer.errors import CodecError, InvalidArgumentError
from trinity_buffer.limits import sizes

ALIGNMENT = 64


class Block:
    """Hands out the bytes of ``whole`` from its beginning on."""

    def __init__(self, whole: bytearray) -> None:
        self._bytes: Bytes = np.frombuffer(whole, np.uint8)
        self._used = 0

    def take(self, size: int) -> Bytes:
        """Return ``size`` unused bytes of the block, or newly allocated ones if it is full."""
        begin, end = self._used, self._used + size
        if end > len(self._bytes):
            return np.empty(size, np.uint8)
        self._used = end + -end % ALIGNMENT
        return self._bytes[begin:end]


class BufferPool:
    """A few reusable blocks, shared between threads.

    Python refuses to resize a bytearray that has exported views, which tells whether a block is
    still in use. So blocks need not be released, and cannot be released too early.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset, in a forked child: a lock held by another thread would never be released there."""
        self._lock = Lock()
        self._blocks: list[bytearray] = []

    def block(self, size: int) -> Block:
        """Return a pooled block, or an empty one if ``size`` exceeds the pool's limit."""
        if not 0 < size <= sizes().bytes_per_block:
            return Block(bytearray())
        with self._lock:
            for number, whole in enumerate(self._blocks):
                if not _in_use(whole):
                    if len(whole) < size:
                        self._blocks[number] = _allocate(size)
                    return Block(self._blocks[number])
            made = _allocate(size)
            if len(self._blocks) < sizes().blocks_kept:
                self._blocks.append(made)
            return Block(made)


def _in_use(whole: bytearray) -> bool:
    try:
        whole.append(whole.pop())
    except BufferError:
        return True
    return False


def _allocate(size: int) -> bytearray:
    return bytearray(1 << (size - 1).bit_length())


TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
"""Name -> dtype, of the dtypes that the installed torch has."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# ``torch.cat`` is fast for these dtypes; for complex32, it warns.
_JOINED = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16}) | {
    *(torch.float16, torch.float32, torch.float64)
}

Take: TypeAlias = Callable[[int], Bytes]
_Kind: TypeAlias = "tuple[torch.dtype, int, torch.device, torch.layout]"
_kind_of: Callable[[Tensor], _Kind] = attrgetter("dtype", "ndim", "device", "layout")
_size_of: Callable[[Tensor], int] = methodcaller("numel")


@dataclass(frozen=True, slots=True)
class PresentTensors:
    """The tensors of one field that are not None, with their kinds and sizes.

    Attributes:
        tensors: the tensors.
        rows: the rows that have one; None: all.
        kinds: dtype, number of dimensions, device and layout of each.
        sizes: number of elements of each.
    """

    tensors: Sequence[Tensor]
    rows: Sequence[int] | None
    kinds: Sequence[_Kind]
    sizes: Sequence[int]

    @property
    def bytes_to_join(self) -> int:
        """Upper bound of the bytes that the columns need."""
        kinds = set(self.kinds)
        width = max((dtype.itemsize for dtype, *_ in kinds), default=0)
        return width * sum(self.sizes) + ALIGNMENT * len(kinds)

    def only(self, kind: _Kind) -> PresentTensors:
        """Return the tensors of one kind."""
        mine = [index for index, other in enumerate(self.kinds) if other == kind]
        rows = range(len(self.tensors)) if self.rows is None else self.rows
        return PresentTensors(
            [self.tensors[index] for index in mine],
            [rows[index] for index in mine],
            [kind] * len(mine),
            [self.sizes[index] for index in mine],
        )


def present_tensors(tensors: Sequence[Tensor | None]) -> PresentTensors:
    """Return ``tensors``, by row, without those that are None."""
    if any(tensor is None for tensor in tensors):
        rows = [row for row, tensor in enumerate(tensors) if tensor is not None]
        present: list[Any] = [tensors[row] for row in rows]
        return PresentTensors(
            present, rows, list(map(_kind_of, present)), list(map(_size_of, present))
        )
    every: Any = tensors
    return PresentTensors(every, None, list(map(_kind_of, every)), list(map(_size_of, every)))


def columns_of(
    field: str, tensors: Sequence[Tensor | None], take: Take | None = None
) -> list[Column]:
    """Return the columns of one field, ``tensors`` by row, as `columns_of_present` does."""
    return columns_of_present(field, present_tensors(tensors), take)


def columns_of_present(
    field: str, tensors: PresentTensors, take: Take | None = None
) -> list[Column]:
    """Return the columns of one field; an empty list without tensors.

    Rows of one dtype and number of dimensions share a column, made with a single ``torch.cat``.

    Args:
        field: name of the field.
        tensors: the tensors of its rows.
        take: returns memory of a given size, into which tensors of the CPU are copied; by default a
            column of a single tensor is a view of it.

    Raises:
        InvalidArgumentError: a tensor without dense memory (sparse, meta), or of a dtype that is
            not an element type.
    """
    kinds = dict.fromkeys(tensors.kinds)
    if len(kinds) == 1:
        return [_column(field, tensors, take)]
    return [_column(field, tensors.only(kind), take) for kind in kinds]


def _column(field: str, tensors: PresentTensors, take: Take | None) -> Column:
    dtype, ndim, device, layout = tensors.kinds[0]
    if dtype not in DTYPE_NAMES or layout != torch.strided or device.type == "meta":
        raise InvalidArgumentError(
            f"{field} is {dtype}, {layout} on {device}: make it a dense tensor "
            f"of one of {', '.join(TORCH_DTYPES)}"
        )
    flat = tensors.tensors
    if ndim == 1:
        shapes = np.array(tensors.sizes, np.int64)
    else:
        shapes = np.array([tuple(tensor.shape) for tensor in flat], np.int64)
        flat = [tensor.reshape(-1) for tensor in flat]
    copies = take is not None and device.type == "cpu"
    out = take(dtype.itemsize * sum(tensors.sizes)) if take is not None and copies else None
    return Column(
        field,
        DTYPE_NAMES[dtype],
        shapes.reshape(len(flat), ndim),
        bytes_of(flat, out),
        None if tensors.rows is None else np.array(tensors.rows, np.int64),
    )


def bytes_of(tensors: Sequence[Tensor], out: Bytes | None = None) -> Bytes:
    """Return the concatenated bytes of 1-D ``tensors`` of one dtype; in ``out`` if given."""
    dtype = tensors[0].dtype
    if dtype not in _JOINED:
        tensors = [_raw(tensor) for tensor in tensors]
    if out is None:
        flat = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
        joined: Bytes = _raw(flat).cpu().numpy()
    elif len(tensors) == 1:  # for one tensor, torch.cat would wake its threads
        np.copyto(out, _raw(tensors[0]).numpy())
        joined = out
    else:
        with torch.no_grad():  # out= refuses tensors that require a gradient
            torch.cat(list(tensors), out=torch.from_numpy(out).view(tensors[0].dtype))
        joined = out
    # Booleans viewed from other bytes may hold any value, and torch treats all but 0 as true.
    if dtype == torch.bool and joined.max(initial=0) > 1:
        return np.minimum(joined, np.uint8(1))
    return joined


def _raw(tensor: Tensor) -> Tensor:
    # The memory of a lazily conjugated or negated view holds the original values.
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(torch.uint8)


def flat_tensor(column: Column) -> Tensor:
    """Return all elements of ``column`` as a 1-D tensor: a view of its data, which is writable.

    Raises:
        CodecError: the installed torch has no such dtype.
    """
    dtype = TORCH_DTYPES.get(column.dtype)
    if dtype is None:
        raise CodecError(
            f"column {column.field} holds {column.dtype}, which torch {torch.__version__} does not "
            "have: upgrade torch"
        )
    # Some empty NumPy arrays have strides of 0, which torch cannot view.
    bare = torch.from_numpy(column.data) if len(column.data) else torch.empty(0, dtype=torch.uint8)
    return bare.view(dtype)


def tensors_of(column: Column, wanted: Sequence[int] | None = None) -> list[Tensor]:
    """Return the tensors of a column, views of its data; ``wanted`` are indices into its rows."""
    flat = flat_tensor(column)
    if wanted is None:
        pieces = list(flat.split_with_sizes(column.sizes.tolist())) if len(column.shapes) else []
    else:
        ends = column.offsets.tolist()
        pieces = [flat[ends[index] : ends[index + 1]] for index in wanted]
    if column.shapes.shape[1] == 1:
        return pieces
    shapes = column.shapes.tolist()
    order = range(len(shapes)) if wanted is None else wanted
    return [piece.view(shapes[index]) for piece, index in zip(pieces, order, strict=True)]


def raw_tensor(value: object) -> RawTensor | None:
    """Return a tensor as bytes for the codec; None for anything else."""
    if not isinstance(value, Tensor):
        return None
    if value.is_nested:
        raise InvalidArgumentError("a tensor is a nested one: make a dense tensor of it")
    (column,) = columns_of("a tensor", [value])
    return RawTensor(column.dtype, tuple(value.shape), column.data.tobytes())


def tensor_of(raw: RawTensor) -> Tensor:
    """Return the tensor of its bytes, with memory of its own."""
    shapes = np.array([raw.shape], np.int64).reshape(1, len(raw.shape))
    data = np.frombuffer(bytearray(raw.data), np.uint8)
    return tensors_of(Column("a tensor", raw.dtype, shapes, data))[0]
