from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum, IntEnum
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_buffer.codec.objects import ObjectPacker, RawTensor, unpack_object
from trinity_buffer.errors import CodecError, InvalidArgumentError

KEYS = st.one_of(st.text(st.characters(), max_size=5), st.integers())
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters()),
    st.binary(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal, with equal types all the way down: True is not 1, and (1,) is not [1]."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            same(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def packed(value: Any) -> bytes:
    return ObjectPacker().pack(value, "info")


@given(st.one_of(SCALARS, st.lists(VALUES), st.dictionaries(KEYS, st.lists(SCALARS))))
def test_every_value_comes_back_with_its_types(value: Any) -> None:
    assert same(unpack_object(packed(value)), value)


@given(st.dictionaries(KEYS, VALUES))
def test_the_order_of_keys_does_not_change_the_canonical_bytes(value: Any) -> None:
    turned = dict(reversed(list(value.items())))
    pack = ObjectPacker(canonical=True).pack
    assert pack({"a": (value,), "b": 1}, "info") == pack({"b": 1, "a": (turned,)}, "info")


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", "complex128"])
def test_numpy_numbers_and_arrays_come_back_with_their_dtype(dtype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    found = unpack_object(packed({"a": array, "s": array[0, 1], "n": array[:0]}))
    assert found["a"].dtype == array.dtype
    assert np.array_equal(found["a"], array)
    assert type(found["s"]) is type(array[0, 1])
    assert found["s"] == array[0, 1]
    assert found["n"].shape == (0, 3)


def test_a_big_endian_array_comes_back_as_numbers_of_this_machine() -> None:
    found = unpack_object(packed({"a": np.arange(3, dtype=">i4")}))["a"]
    assert found.tolist() == [0, 1, 2]
    assert found.dtype == np.int32


def test_an_array_that_comes_back_may_be_written() -> None:
    unpack_object(packed([np.zeros(3)]))[0][1] = 1.0


def test_a_tensor_is_bytes_to_the_codec() -> None:
    raw = RawTensor("bfloat16", (2, 1), b"\x01\x02\x03\x04")
    assert unpack_object(packed({"t": (raw, [raw])})) == {"t": (raw, [raw])}
    assert unpack_object(packed((raw,)), lambda raw: raw.dtype) == ("bfloat16",)


def test_subclasses_come_back_as_their_base() -> None:
    class Colour(IntEnum):
        RED = 1

    class Role(str, Enum):  # noqa: UP042 - as agents write it: of a StrEnum, str() is the value
        USER = "user"

    Pair = namedtuple("Pair", "a b")
    value = {"o": OrderedDict(x=1), "c": Colour.RED, "p": Pair(1, 2), "s": np.str_("s")}
    value["r"] = Role.USER
    plain = {"o": {"x": 1}, "c": 1, "p": (1, 2), "s": "s", "r": "user"}
    assert same(unpack_object(packed(value)), plain)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": {"when": datetime(2026, 1, 1, tzinfo=UTC)}}, r"info\['a'\]\['when'\] is a datetime"),
        ({"a": [1, {2}]}, r"info\['a'\]\[1\] is a builtins.set"),
        ({"a": (1, 2j)}, r"info\['a'\]\[1\] is a builtins.complex"),
        ({"a": {1.5: 1}}, r"info\['a'\] has the key 1.5 of type float"),
        ({True: 1}, "info has the key True of type bool"),
        ({"a": np.longdouble(1)}, r"info\['a'\] is a NumPy"),
        ({"a": np.array(["x"])}, r"info\['a'\] is a numpy.ndarray"),
        ({"a": object}, r"info\['a'\] is a builtins.type"),
    ],
)
def test_what_would_not_come_back_is_refused_by_its_place(value: Any, place: str) -> None:
    with pytest.raises(InvalidArgumentError, match=place):
        packed(value)


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    value = wrap(0)
    for _ in range(levels - 1):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}])
def test_sixty_four_levels_are_the_deepest_value(wrap: Callable[[Any], Any]) -> None:
    assert unpack_object(packed(nested(64, wrap))) == nested(64, wrap)
    with pytest.raises(InvalidArgumentError, match="deeper than 64"):
        packed(nested(65, wrap))


def test_an_array_may_stand_at_the_deepest_level() -> None:
    value = nested(63, lambda v: (v or np.float32(0.5),))
    assert unpack_object(packed(value)) == value


def test_an_int_of_a_kilobyte_is_the_longest() -> None:
    longest = (1 << 8 * 1024 - 1) - 1
    assert unpack_object(packed([longest, -longest])) == [longest, -longest]
    with pytest.raises(InvalidArgumentError, match=r"info\['n'\] is an int of 1025 bytes"):
        packed({"n": longest + 1})
    with pytest.raises(CodecError, match="unknown form"):
        unpack_object(msgpack.packb(msgpack.ExtType(2, bytes(1025))))


def test_a_cycle_is_refused() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(InvalidArgumentError, match="deeper"):
        packed(cycle)


def test_long_lists_come_back() -> None:
    value = {"counts": list(range(40_000)), "nested": [[1.5, "x", b"y", None]] * 20_000}
    assert unpack_object(packed(value)) == value


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\x01",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\x90\x01",  # a list as a key
        b"\x01\x01",  # more than one value
        b"\xa1\xff",  # no UTF-8
        msgpack.packb(msgpack.ExtType(1, msgpack.packb(7))),
        msgpack.packb(msgpack.ExtType(9, b"")),
        msgpack.packb(msgpack.ExtType(3, msgpack.packb(["object", [1], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(3, msgpack.packb(["int8", [-1], b""]))),
        msgpack.packb(msgpack.ExtType(3, msgpack.packb(["int8", [True], b"1"]))),
        msgpack.packb(msgpack.ExtType(3, msgpack.packb(["int8", [0, 2**63], b""]))),
        msgpack.packb(msgpack.ExtType(4, msgpack.packb(["int8", [1], b"1"]))),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb(["float8_e4m3fn", [2], b"1"]))),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb([["int8"], [1], b"1"]))),
        b"\xc7\x03\xff123",  # a damaged timestamp
    ],
)
def test_damaged_bytes_are_a_codec_error(blob: bytes) -> None:
    with pytest.raises(CodecError):
        unpack_object(blob)


def test_nested_extensions_end() -> None:
    blob = msgpack.packb(0)
    for _ in range(500):
        blob = msgpack.packb(msgpack.ExtType(1, b"\x91" + blob))
    with pytest.raises(CodecError, match="deeper"):
        unpack_object(blob)


def test_nested_claims_of_long_lists_allocate_nothing() -> None:
    """500 lists, one in the other, and each claims as many items as there are bytes."""
    code = """
import resource
from trinity_buffer.codec.objects import unpack_object
from trinity_buffer.errors import CodecError
size = 8 << 20
head = b"\\xdd" + size.to_bytes(4, "big")
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    unpack_object(head * 500 + bytes(size))
except CodecError as error:
    assert "claims more" in str(error), error
else:
    raise SystemExit("read without an error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"OMP_NUM_THREADS": "1"})
