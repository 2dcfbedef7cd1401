"""Segments in parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Resize
from tests.small_sizes import resized
from trinity_buffer.errors import DamagedSegmentError
from trinity_buffer.store import segments

BLOB = bytes(range(11))


def parts_of(*pieces: bytes) -> list[tuple[int, int, bytes]]:
    rows = segments.SegmentStore().put(b"key", {"light": [memoryview(piece) for piece in pieces]})
    return [(row.part, row.checksum, b"".join(row.data)) for row in rows]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 11, 12])
@pytest.mark.parametrize("blob", [b"", b"1", BLOB])
def test_a_blob_in_parts_of_any_size_comes_back(blob: bytes, size: int, resize: Resize) -> None:
    resize(bytes_per_part=size)
    parts = parts_of(blob)
    assert len(parts) == max(1, -(-len(blob) // size))
    assert segments.blob_of(b"key", "light", parts) == blob


@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(1, 12))
def test_pieces_in_parts_of_any_size_come_back(pieces: list[bytes], size: int) -> None:
    with resized(bytes_per_part=size):
        parts = parts_of(*pieces)
    whole = b"".join(pieces)
    assert segments.blob_of(b"key", "light", parts) == whole
    assert [len(part) for _, _, part in parts[:-1]] == [size] * (len(parts) - 1)
    assert len(parts) == max(1, -(-len(whole) // size))


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_part_that_is_missing_before_the_last_is_damage(gone: int, resize: Resize) -> None:
    resize(bytes_per_part=3)
    parts = parts_of(BLOB)
    assert len(parts) == 4
    del parts[gone]
    with pytest.raises(DamagedSegmentError, match="part"):
        segments.blob_of(b"key", "light", parts)
