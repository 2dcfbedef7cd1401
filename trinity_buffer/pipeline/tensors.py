"""Converts torch tensors to the codec's columns of bytes and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.codec.arrays import DTYPES, MAX_DIMENSIONS
from trinity_buffer.codec.objects import RawTensor
from trinity_buffer.codec.segments import Bytes, Column
from trinity_buffer.errors import CodecError, InvalidArgumentError

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
"""Name -> dtype, of the dtypes that the installed torch has."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# ``torch.cat`` is fast for these dtypes; for complex32, it warns.
_JOINED = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16}) | {
    *(torch.float16, torch.float32, torch.float64)
}

_Kind: TypeAlias = "tuple[torch.dtype, int, torch.device, torch.layout, bool]"
_kind_of: Callable[[Tensor], _Kind] = attrgetter("dtype", "ndim", "device", "layout", "is_nested")


def columns_of(field: str, tensors: Sequence[Tensor | None]) -> list[Column]:
    """Return the columns of one field; an empty list without tensors.

    Rows of one dtype and number of dimensions share a column, made with a single ``torch.cat``. It
    is a copy: whoever gave a tensor may use its memory again.

    Args:
        field: name of the field.
        tensors: the tensors of its rows, by row.

    Raises:
        InvalidArgumentError: a tensor without dense memory (sparse, meta), or of a dtype that is
            not an element type; the message begins with ``field``.
    """
    rows = [row for row, tensor in enumerate(tensors) if tensor is not None]
    present = [tensor for tensor in tensors if tensor is not None]
    kinds = list(map(_kind_of, present))
    columns = []
    distinct = dict.fromkeys(kinds)
    for kind in distinct:
        mine, its_rows = present, rows
        if len(distinct) > 1:
            mine = [tensor for tensor, other in zip(present, kinds, strict=True) if other == kind]
            its_rows = [row for row, other in zip(rows, kinds, strict=True) if other == kind]
        every = len(mine) == len(tensors)
        columns.append(_column(field, kind, mine, None if every else its_rows))
    return columns


def _column(
    field: str, kind: _Kind, tensors: Sequence[Tensor], rows: Sequence[int] | None
) -> Column:
    dtype, ndim, device, layout, is_nested = kind
    if is_nested:  # first, as it raises when it is asked for its shape
        raise InvalidArgumentError(f"{field} is a nested tensor: make an Experience of each row")
    if dtype not in DTYPE_NAMES or layout != torch.strided or device.type == "meta":
        raise InvalidArgumentError(
            f"{field} is {dtype}, {layout} on {device}: make it a dense tensor "
            f"of one of {', '.join(TORCH_DTYPES)}"
        )
    if ndim > MAX_DIMENSIONS:
        raise InvalidArgumentError(f"{field} has {ndim} dimensions, the most are {MAX_DIMENSIONS}")
    if ndim == 1:
        shapes = np.array(list(map(Tensor.numel, tensors)), np.int64)
    else:
        shapes = np.array([tuple(tensor.shape) for tensor in tensors], np.int64)
        tensors = [tensor.reshape(-1) for tensor in tensors]
    return Column(
        field,
        DTYPE_NAMES[dtype],
        shapes.reshape(len(tensors), ndim),
        bytes_of(tensors),
        None if rows is None else np.array(rows, np.int64),
    )


def bytes_of(tensors: Sequence[Tensor]) -> Bytes:
    """Return a copy of the bytes of 1-D ``tensors`` of one dtype, one after the other."""
    dtype = tensors[0].dtype
    if dtype not in _JOINED:
        tensors = [_raw(tensor) for tensor in tensors]
    # For one tensor, torch.cat would wake its threads.
    flat = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0].detach().clone()
    if not flat.numel():  # it may have a stride of 0, which torch cannot view
        return np.empty(0, np.uint8)
    if dtype == torch.bfloat16:  # which NumPy does not have
        flat = flat.detach().view(torch.int16)
    joined: Bytes = flat.numpy(force=True).view(np.uint8)
    # Booleans viewed from other bytes may hold any value, and torch treats all but 0 as true.
    if dtype == torch.bool and joined.max(initial=0) > 1:
        return np.minimum(joined, np.uint8(1))
    return joined


def _raw(tensor: Tensor) -> Tensor:
    # The memory of a lazily conjugated or negated view holds the original values.
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    # A tensor of up to one element is contiguous whatever its stride, which torch cannot view.
    return plain.as_strided(plain.shape, (1,)).view(torch.uint8)


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
