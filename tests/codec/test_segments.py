from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_buffer.codec import segments
from trinity_buffer.codec.arrays import DTYPES
from trinity_buffer.codec.segments import (
    JOINED_BYTES,
    Column,
    decode_segment,
    encode_segment,
    few_pieces,
)
from trinity_buffer.errors import CodecError, CodecVersionError, InvalidArgumentError

MASK = Column("mask", "bool", np.array([[2], [0], [3]]), np.array([1, 0, 1, 1, 0], np.uint8))


def column(
    field: str = "x",
    dtype: str = "uint8",
    shapes: Any = ((1,),),
    data: bytes = b"\x07",
    rows: list[int] | None = None,
    encoding: str = "raw",
) -> Column:
    return Column(
        field,
        dtype,
        np.array(shapes, np.int64).reshape(len(shapes), -1 if len(shapes[0]) else 0),
        np.frombuffer(data, np.uint8),
        None if rows is None else np.array(rows),
        encoding,
    )


@st.composite
def columns(draw: st.DrawFn) -> list[Column]:
    """Columns of one field that share three rows among them, of any dtypes and dimensions."""
    made, kinds = [], draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
    for kind in sorted(set(kinds)):
        rows = [row for row in range(3) if kinds[row] == kind]
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        ndim = draw(st.integers(0, 3))
        shapes = np.array(
            [[draw(st.integers(0, 3)) for _ in range(ndim)] for _ in rows], np.int64
        ).reshape(len(rows), ndim)
        size = int(shapes.prod(axis=1).sum()) * DTYPES[dtype].itemsize
        data = draw(st.binary(min_size=size, max_size=size))
        if dtype == "bool":
            data = bytes(byte & 1 for byte in data)
        present = None if len(rows) == 3 else np.array(rows)
        made.append(Column("x", dtype, shapes, np.frombuffer(data, np.uint8), present))
    return made


@given(columns())
def test_columns_of_every_dtype_and_shape_come_back(given_columns: list[Column]) -> None:
    segment = decode_segment(encode_segment(given_columns, {}, 3))
    for found, meant in zip(segment.columns["x"], given_columns, strict=True):
        assert (found.dtype, found.encoding) == (meant.dtype, meant.encoding)
        assert found.shapes.tolist() == meant.shapes.tolist()
        assert found.data.tobytes() == meant.data.tobytes()
        rows = [None if column.rows is None else column.rows.tolist() for column in (found, meant)]
        assert rows[0] == rows[1]


@given(st.lists(st.one_of(st.none(), st.text(), st.dictionaries(st.text(), st.integers()))))
def test_objects_come_back_row_by_row(values: list[Any]) -> None:
    found = decode_segment(encode_segment([], {"info": values}, len(values))).objects["info"]
    assert found.values(range(len(values))) == values
    assert [found[row] for row in range(len(values))] == values
    for beyond in (len(values), -1):
        with pytest.raises(IndexError, match="row"):
            found[beyond]


def test_a_blob_is_one_msgpack_document() -> None:
    blob = encode_segment([MASK], {"text": ["a", None, "c"]}, 3)
    length, header, filler, body = msgpack.unpackb(blob)
    assert header["v"] == 1
    assert length == len(msgpack.packb(header))
    assert len(blob) == 6 + length + 5 + len(filler) + 5 + len(body)


@given(st.text(max_size=100), st.integers(1, 40))
def test_columns_start_at_multiples_of_64_bytes(name: str, size: int) -> None:
    first = column(shapes=((size,),), data=bytes(size))
    blob = bytearray(encode_segment([first, column(name + "y")], {name + "z": ["o"]}, 1))
    start = np.frombuffer(blob, np.uint8).ctypes.data
    segment = decode_segment(blob)
    for some in segment.columns.values():
        assert (some[0].data.ctypes.data - start) % 64 == 0


def test_columns_are_views_of_the_blob_that_was_given() -> None:
    blob = bytearray(encode_segment([MASK], {}, 3))
    (mask,) = decode_segment(blob).columns["mask"]
    elements = mask.elements
    assert mask.offsets.tolist() == [0, 2, 2, 5]
    assert elements.dtype == np.bool_
    whole = np.frombuffer(blob, np.uint8)
    assert np.shares_memory(whole, elements)
    whole[elements.ctypes.data - whole.ctypes.data] = 0
    assert elements.tolist() == [False, False, True, True, False]


def test_bytes_are_read_without_a_copy_and_cannot_be_written() -> None:
    blob = encode_segment([MASK], {}, 3)
    elements = decode_segment(memoryview(blob)).columns["mask"][0].elements
    assert np.shares_memory(np.frombuffer(blob, np.uint8), elements)
    assert not elements.flags.writeable


def test_bfloat16_is_bits_to_numpy() -> None:
    blob = encode_segment([column(dtype="bfloat16", data=b"\x80\x3f")], {}, 1)
    assert decode_segment(blob).columns["x"][0].elements.tolist() == [0x3F80]


def test_an_alias_has_the_columns_of_its_target() -> None:
    segment = decode_segment(encode_segment([MASK], {}, 3, aliases={"again": "mask"}))
    assert segment.columns["again"] is segment.columns["mask"]
    assert segment.aliases == {"again": "mask"}


@pytest.mark.parametrize(
    ("given_columns", "objects", "sentence"),
    [
        ([column(data=b"12")], {}, "column x: 2 bytes of uint8 do not fit"),
        ([column(rows=[0, 1])], {}, "1 shapes in 2 rows"),
        ([column(dtype="quint8")], {}, "column x"),
        ([column(shapes=((1,) * 65,))], {}, "65 dimensions"),
        ([], {"info": [1, 2]}, "objects info: 2 values for 1 rows"),
        ([], {"info": [{"a": object()}]}, r"info\['a'\]"),
    ],
)
def test_columns_that_do_not_fit_are_not_written(
    given_columns: list[Column], objects: Any, sentence: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        encode_segment(given_columns, objects, 1)


def test_a_newer_segment_says_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_VERSION", 2)
    blob = encode_segment([], {}, 0)
    monkeypatch.undo()
    with pytest.raises(CodecVersionError, match=r"version 2.*up to 1: upgrade trinity-buffer"):
        decode_segment(blob)


BODY = b"\x07".ljust(128, b"\0")


def forged(body: bytes = BODY, **header: Any) -> bytes:
    """A well-formed blob around a header that may claim anything."""
    given_header = {"v": 1, "rows": 1, "columns": [], "objects": [], "aliases": {}, **header}
    head = msgpack.packb(given_header)
    filler = -(6 + len(head) + 10) % 64
    return b"".join(
        [
            b"\x94\xce" + len(head).to_bytes(4, "big") + head,
            b"\xc6" + filler.to_bytes(4, "big") + bytes(filler),
            b"\xc6" + len(body).to_bytes(4, "big") + body,
        ]
    )


def u32(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def entry(**changed: Any) -> list[Any]:
    good = {
        "field": "x",
        "dtype": "uint8",
        "encoding": "raw",
        "rows": None,
        "ndim": 1,
        "shapes": u32(1),
        "offset": 0,
        "size": 1,
    }
    return list({**good, **changed}.values())


def test_the_forger_can_write_a_good_segment() -> None:
    segment = decode_segment(forged(columns=[entry()]))
    assert segment.columns["x"][0].elements.tolist() == [7]


HOSTILE_HEADERS = [
    {"rows": -1},
    {"rows": 1.0},
    {"rows": float("nan")},
    {"rows": True},
    {"rows": None},
    {"v": 0},
    {"v": "1"},
    {"columns": None},
    {"objects": {}},
    {"aliases": []},
    {"columns": [7]},
    {"columns": [entry()[:-1]]},
    {"columns": [[*entry(), 0]]},
    {"columns": [entry(field=7)]},
    {"columns": [entry(dtype="object")]},
    {"columns": [entry(dtype=["uint8"])]},
    {"columns": [entry(encoding="zip")]},
    {"columns": [entry(encoding=["raw"])]},
    {"columns": [entry(ndim=-1)]},
    {"columns": [entry(ndim=float("nan"))]},
    {"columns": [entry(ndim=2**62)]},
    {"columns": [entry(ndim=1, encoding="scaled_mask")]},
    {"columns": [entry(shapes=None)]},
    {"columns": [entry(shapes=b"123")]},
    {"columns": [entry(shapes=u32(1, 1))]},
    {"columns": [entry(shapes=u32(2))]},
    {"columns": [entry(ndim=4, shapes=u32(*[2**32 - 1] * 4))]},
    {"columns": [entry(ndim=4, shapes=u32(2**16, 2**16, 2**16, 2**16), size=0)]},
    {"columns": [entry(ndim=0, shapes=b"")], "rows": 10**12},
    {"columns": [entry()], "rows": 10**12},
    {"columns": [entry(size=10**12)]},
    {"columns": [entry(size=-1)]},
    {"columns": [entry(size=1.0)]},
    {"columns": [entry(offset=-64)]},
    {"columns": [entry(offset=1)]},
    {"columns": [entry(offset=64, size=65)]},
    {"columns": [entry(offset=2**63)]},
    {"columns": [entry(), entry(field="y")]},  # the same bytes twice
    {"columns": [entry(), entry(offset=64)]},  # one field twice, dense
    {"columns": [entry(rows=u32(0)), entry(rows=u32(0), offset=64)]},  # a row twice
    {"columns": [entry(rows=u32(1))]},
    {"columns": [entry(rows=u32(2**32 - 1))]},
    {"columns": [entry(rows=7)]},
    {"columns": [entry(rows=u32(1, 0), shapes=u32(1, 0))], "rows": 2},
    {"columns": [entry(dtype="bool")]},  # 7 is no bool
    {"objects": [["o", 0]]},
    {"objects": [["o", 0, 7]]},
    {"objects": [["o", 0, 8]], "rows": 10**12},
    {"objects": [["o", 0, 9]]},  # offsets that do not end at its end
    {"objects": [["o", 0, 8], ["o", 64, 8]]},
    {"columns": [entry(offset=0)], "objects": [["x", 64, 8]]},
    {"aliases": {"y": "x"}},
    {"aliases": {"x": "x"}, "columns": [entry()]},
    {"aliases": {7: "x"}, "columns": [entry()]},
    {"aliases": {"y": ["x"]}, "columns": [entry()]},
]


@pytest.mark.parametrize("header", HOSTILE_HEADERS)
def test_a_header_that_lies_is_a_codec_error(header: dict[str, Any]) -> None:
    body = b"\x07".ljust(64, b"\0") + u32(0, 0).ljust(64, b"\0")
    with pytest.raises(CodecError):
        decode_segment(forged(body, **header))


def test_objects_that_overlap_are_a_codec_error() -> None:
    body = (u32(0, 9, 3, 4) + b"\x07" * 4).ljust(64, b"\0")
    with pytest.raises(CodecError, match="overlap"):
        decode_segment(forged(body, rows=3, objects=[["o", 0, 20]]))


def test_an_object_that_is_damaged_says_so_when_it_is_read() -> None:
    segment = decode_segment(forged((u32(0, 1) + b"\xc1").ljust(64, b"\0"), objects=[["o", 0, 9]]))
    with pytest.raises(CodecError, match="damaged"):
        segment.objects["o"].values([0])


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_blob_that_was_cut_off_is_a_codec_error(cut: Any) -> None:
    blob = encode_segment([MASK], {"text": ["a", "b", "c"]}, 3)
    with pytest.raises(CodecError):
        decode_segment(blob[:cut])


def test_a_blob_with_a_tail_is_a_codec_error() -> None:
    with pytest.raises(CodecError, match="its length"):
        decode_segment(encode_segment([MASK], {}, 3) + b"\0" * 64)


def test_short_neighbours_are_joined_and_long_pieces_stay_as_they_are() -> None:
    long = bytearray(JOINED_BYTES)
    joined = list(few_pieces([b"a", b"b", long, b"", b"c", bytes(JOINED_BYTES - 1), b"d"]))
    assert [len(piece) for piece in joined] == [2, JOINED_BYTES, JOINED_BYTES, 1]
    assert joined[1] is long
    assert list(few_pieces([b"", b""])) == []
