"""Addresses that `verify` remembers come back as they were, and take little memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trinity_buffer.pipeline.verifying.addresses import Addresses, packed, unpacked

ADDRESSES = st.integers(-(2**62), 2**62)
RUNS = st.builds(
    lambda first, count: list(range(first, first + count)), ADDRESSES, st.integers(0, 9)
)
MANY = st.lists(RUNS, max_size=6).map(lambda runs: [one for run in runs for one in run])


@given(MANY | st.lists(ADDRESSES, max_size=9))
def test_what_is_packed_is_the_same_again(some: list[int]) -> None:
    assert unpacked(packed(np.array(some, np.int64))).tolist() == some


@given(st.lists(MANY, max_size=4))
def test_parts_come_back_in_the_order_in_which_they_were_added(parts: list[list[int]]) -> None:
    every = Addresses()
    for part in parts:
        every.add(np.array(part, np.int64))
    expected = [one for part in parts for one in part]
    assert every.all().tolist() == expected
    assert len(every) == len(expected)


def test_groups_take_less_than_a_byte_an_address() -> None:
    groups = [np.arange(64) + (position << 20) for position in range(1, 9)]
    assert len(packed(np.concatenate(groups))) < 8 * 64
