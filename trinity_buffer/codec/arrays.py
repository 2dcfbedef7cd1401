"""NumPy's arrays and numbers, and tensors, as `objects` packs them: dtype, shape, bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from trinity_buffer.codec.dtypes import DTYPES, MAX_DIMENSIONS
from trinity_buffer.errors import CodecError, InvalidArgumentError

ARRAY, SCALAR = 3, 4
"""Codes of the extensions."""

_KINDS = "biufc"
_SIZES = {
    name: np.dtype(name).itemsize
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


def is_array(value: object) -> TypeGuard[np.generic | np.ndarray[Any, Any]]:
    """Return whether ``value`` is one of NumPy's numbers, or an array of them."""
    return isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _KINDS


def said(value: np.generic | np.ndarray[Any, Any], name: str) -> tuple[int, list[object]]:
    """Return the code of its extension, and dtype, shape and bytes.

    Raises:
        InvalidArgumentError: a dtype that other machines do not have; ``name`` says whose.
    """
    if value.dtype.itemsize > (16 if value.dtype.kind == "c" else 8):
        raise InvalidArgumentError(
            f"{name} is a NumPy {value.dtype}, whose width differs between machines: "
            "make it a float64"
        )
    code = ARRAY if isinstance(value, np.ndarray) else SCALAR
    little = np.asarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
    return code, [value.dtype.name, list(value.shape), little.tobytes()]


def array_of(items: list[Any], *, scalar: bool) -> Any:
    """Return what was `said`.

    Raises:
        CodecError: it cannot have been.
    """
    name, shape, data = _checked(items, _SIZES)
    array = np.frombuffer(data, np.dtype(name).newbyteorder("<")).astype(name).reshape(shape)
    if not scalar:
        return array
    if shape:
        raise CodecError("a NumPy scalar has a shape: its bytes are damaged")
    return array[()]


def checked_tensor(items: list[Any]) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and data of a tensor, if they fit each other.

    Raises:
        CodecError: they do not.
    """
    return _checked(items, {name: dtype.itemsize for name, dtype in DTYPES.items()})


def _checked(items: list[Any], sizes: Mapping[str, int]) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and data, if they fit each other."""
    if len(items) != 3 or not isinstance(items[0], str) or items[0] not in sizes:
        raise CodecError("an array in a value has no known dtype: its bytes are damaged")
    name, shape, data = items
    good = isinstance(shape, list) and isinstance(data, bytes) and len(shape) <= MAX_DIMENSIONS
    if not good or not all(type(size) is int and size >= 0 for size in shape):
        raise CodecError("an array in a value has no shape: its bytes are damaged")
    if math.prod(shape) * sizes[name] != len(data):
        raise CodecError(f"an array in a value has {len(data)} bytes, its shape says otherwise")
    return name, tuple(shape), data
