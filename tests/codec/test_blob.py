"""Bytes in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trinity_buffer.codec import blob
from trinity_buffer.codec.blob import JOINED_BYTES, Blob, few_pieces

PIECES = st.lists(st.binary(max_size=9), max_size=6)


@given(PIECES, st.integers(1, 12))
def test_a_blob_that_is_cut_is_the_same_bytes(pieces: list[bytes], size: int) -> None:
    whole = b"".join(pieces)
    cut = Blob([memoryview(piece) for piece in pieces]).cut(size)
    assert b"".join(map(bytes, cut)) == whole
    assert [len(part) for part in cut[:-1]] == [size] * (len(cut) - 1)
    assert len(cut) == max(1, -(-len(whole) // size))


def test_short_neighbours_are_joined_and_long_pieces_stay_as_they_are() -> None:
    long = bytearray(JOINED_BYTES)
    found = list(few_pieces([b"a", b"b", long, b"", b"c", bytes(JOINED_BYTES - 1), b"d"]))
    assert [len(piece) for piece in found] == [2, JOINED_BYTES, JOINED_BYTES, 1]
    assert found[1] is long
    assert b"".join(found) == bytes(Blob(found))


def test_nothing_is_a_blob_too() -> None:
    assert list(few_pieces([b"", b""])) == []
    assert bytes(Blob([])) == b""
    assert blob.Blob([]).cut(3)[0].pieces == []
