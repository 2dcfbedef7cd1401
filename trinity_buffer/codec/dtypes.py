"""The element types of tensors, by torch's names, and how NumPy looks at their bytes."""

from __future__ import annotations

import numpy as np

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
