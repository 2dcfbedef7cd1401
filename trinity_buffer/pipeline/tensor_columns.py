"""Between torch's tensors and the codec's columns of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.codec import DTYPES, Column, RawTensor
from trinity_buffer.codec.columns import Integers
from trinity_buffer.errors import CodecError, InvalidArgumentError

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
"""Name -> dtype, of those that the installed torch has."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# What ``torch.cat`` is fast for, and at home with; it warns of complex32.
_JOINED = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16}) | {
    *(torch.float16, torch.float32, torch.float64)
}

_Kind: TypeAlias = "tuple[torch.dtype, int, torch.device, torch.layout]"
_kind_of: Callable[[Tensor], _Kind] = attrgetter("dtype", "ndim", "device", "layout")


def columns_of(field: str, tensors: Sequence[Tensor | None]) -> list[Column]:
    """Return the columns of one field, ``tensors`` by row; none where all are None.

    Rows of one dtype and number of dimensions share a column, made with a single ``torch.cat``.

    Raises:
        InvalidArgumentError: a tensor that has no bytes of its own (sparse, meta), or of a dtype
            that is not an element type.
    """
    rows = [row for row, tensor in enumerate(tensors) if tensor is not None]
    given: list[Any] = [tensors[row] for row in rows]
    kinds = list(map(_kind_of, given))
    if len(set(kinds)) == 1:
        present = None if len(rows) == len(tensors) else np.array(rows, np.int64)
        return [_column(field, given, kinds[0], present)]
    found = []
    for kind in dict.fromkeys(kinds):
        mine = [index for index, other in enumerate(kinds) if other == kind]
        some, places = [given[index] for index in mine], [rows[index] for index in mine]
        found.append(_column(field, some, kind, np.array(places, np.int64)))
    return found


def _column(field: str, given: list[Tensor], kind: _Kind, rows: Integers | None) -> Column:
    dtype, ndim, device, layout = kind
    if dtype not in DTYPE_NAMES or layout != torch.strided or device.type == "meta":
        raise InvalidArgumentError(
            f"{field} is {dtype}, {layout} on {device}: make it a dense tensor "
            f"of one of {', '.join(TORCH_DTYPES)}"
        )
    if ndim == 1:
        shapes = np.array([tensor.numel() for tensor in given], np.int64)
    else:
        shapes = np.array([tuple(tensor.shape) for tensor in given], np.int64)
        given = [tensor.reshape(-1) for tensor in given]
    return Column(
        field,
        DTYPE_NAMES[dtype],
        shapes.reshape(len(given), ndim),
        bytes_of(given),
        rows,
    )


def bytes_of(tensors: Sequence[Tensor]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of 1-D ``tensors`` of one dtype, one after another."""
    if tensors[0].dtype not in _JOINED:
        tensors = [_raw(tensor) for tensor in tensors]
    flat = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
    found: np.ndarray[tuple[int], np.dtype[np.uint8]] = _raw(flat).cpu().numpy()
    return found


def _raw(tensor: Tensor) -> Tensor:
    # A lazily conjugated or negated view would give the bytes of what it looks at.
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
    return torch.from_numpy(column.data).view(dtype)


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
    (column,) = columns_of("a tensor", [value])
    return RawTensor(column.dtype, tuple(value.shape), column.data.tobytes())


def tensor_of(raw: RawTensor) -> Tensor:
    """Return the tensor of its bytes, with memory of its own."""
    shapes = np.array([raw.shape], np.int64).reshape(1, len(raw.shape))
    data = np.frombuffer(bytearray(raw.data), np.uint8)
    return tensors_of(Column("a tensor", raw.dtype, shapes, data))[0]
