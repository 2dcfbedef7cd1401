"""Segments are read some at a time, however large or many they are."""

from __future__ import annotations

import pytest

from tests.conftest import Resize
from trinity_buffer.events import StepMeasured
from trinity_buffer.pipeline.verify.segments import _by_size, _Named


def named(size: int) -> _Named:
    fact = StepMeasured(
        consumer="t",
        step=1,
        segment=bytes(16),
        families={"rows": size - 1, "tokens": 1},
        digest=bytes(16),
        rows=1,
        metrics={},
    )
    return _Named(7, fact)


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ([5, 5, 5, 5, 5], [[5, 5], [5, 5], [5]]),
        ([5, 6, 4, 1], [[5], [6, 4], [1]]),
        ([11, 2, 2, 2, 2], [[11], [2, 2, 2], [2]]),
        ([], []),
    ],
)
def test_what_is_read_at_once_may_just_fill_its_share(
    sizes: list[int], together: list[list[int]], resize: Resize
) -> None:
    resize(bytes_per_audit=10, segments_per_audit=3)
    found = _by_size([named(size) for size in sizes])
    assert [[one.size for one in some] for some in found] == together
