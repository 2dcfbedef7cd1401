"""Segments are read some at a time, however large or many they are."""

from __future__ import annotations

import pytest

from trinity_buffer.events import StepMeasured
from trinity_buffer.pipeline.verify.segments import by_size


def named(size: int) -> StepMeasured:
    return StepMeasured(
        consumer="t",
        step=1,
        segment=bytes(16),
        families={"rows": size - 1, "tokens": 1},
        digest=bytes(16),
        rows=1,
        metrics={},
    )


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
    found = by_size([(7, named(size)) for size in sizes], 10, 3)
    assert [[sum(fact.families.values()) for _, fact in some] for some in found] == together
