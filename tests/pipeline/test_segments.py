"""Segments are read some at a time, however large or many they are."""

from __future__ import annotations

import pytest

from trinity_buffer.pipeline.handle import by_size


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
    sizes: list[int], together: list[list[int]]
) -> None:
    found = by_size(sizes, int, 10, lambda group, _: len(group) == 3)
    assert list(found) == together
