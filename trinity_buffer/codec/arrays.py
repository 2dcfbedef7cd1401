"""NumPy's arrays and numbers, and tensors, as `objects` packs them: dtype, shape, bytes.

The element types of tensors, by torch's names, and how NumPy looks at their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, TypeGuard

import numpy as np

from trinity_buffer.errors import CodecError, InvalidArgumentError

DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(code)
    for name, code in {
        "bool": "?",
        "uint8": "u1",
        "int8": "i1",
        "uint16": "<u2",
        "int16": "<i2",
        "uint32": "<u4",
        "int32": "<i4",
        "uint64": "<u8",
        "int64": "<i8",
        "float16": "<f2",
        "float32": "<f4",
        "float64": "<f8",
        "complex64": "<c8",
        "complex128": "<c16",
        # NumPy has no such types: unsigned integers that hold the bits.
        "bfloat16": "<u2",
        "complex32": "<u4",
        "float8_e4m3fn": "u1",
        "float8_e4m3fnuz": "u1",
        "float8_e5m2": "u1",
        "float8_e5m2fnuz": "u1",
        "float8_e8m0fnu": "u1",
        "float4_e2m1fn_x2": "u1",
    }.items()
}
"""torch's name of a dtype, without the prefix -> little-endian NumPy dtype of the same width."""

MAX_DIMENSIONS = 64
"""Of a tensor; torch's own limit for most operations."""


ARRAY, SCALAR = 3, 4
"""Codes of the extensions."""

_KINDS = "biufc"
_NUMPY = frozenset(name for name, dtype in DTYPES.items() if dtype.name == name)
"""The dtypes that NumPy has too."""


def is_array(value: object) -> TypeGuard[np.generic | np.ndarray[Any, Any]]:
    """Return whether ``value`` is one of NumPy's numbers, or an array of them."""
    return isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _KINDS


def packed_form(value: np.generic | np.ndarray[Any, Any], name: str) -> tuple[int, list[object]]:
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
    """Return the array or scalar of a `packed_form`.

    Raises:
        CodecError: it cannot have been.
    """
    name, shape, data = checked(items, _NUMPY)
    array = np.frombuffer(data, np.dtype(name).newbyteorder("<")).astype(name).reshape(shape)
    if not scalar:
        return array
    if shape:
        raise CodecError("a NumPy scalar has a shape: its bytes are damaged")
    return array[()]


def checked(
    items: list[Any], dtypes: Collection[str] = DTYPES.keys()
) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and data of an array or a tensor, if they fit each other.

    Raises:
        CodecError: they do not.
    """
    if len(items) != 3 or not isinstance(items[0], str) or items[0] not in dtypes:
        raise CodecError("an array in a value has no known dtype: its bytes are damaged")
    name, shape, data = items
    good = isinstance(shape, list) and isinstance(data, bytes) and len(shape) <= MAX_DIMENSIONS
    if not good or not all(type(size) is int and size >= 0 for size in shape):
        raise CodecError("an array in a value has no shape: its bytes are damaged")
    if math.prod(shape) * DTYPES[name].itemsize != len(data):
        raise CodecError(f"an array in a value has {len(data)} bytes, its shape says otherwise")
    return name, tuple(shape), data
