"""Addresses that `verify` remembers come back as they were, and take little memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_buffer.pipeline.verify import addresses
from trinity_buffer.pipeline.verify.addresses import (
    Addresses,
    beside,
    lacking,
    packed,
    repeated,
    unpacked,
)

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


@given(st.sets(st.integers(0, 99)), st.integers(0, 120), st.integers(1, 9), st.data())
def test_stretches_of_what_is_below_are_found_beside_others(
    known: set[int], end: int, at_once: int, data: st.DataObject
) -> None:
    every, ordered = Addresses(), sorted(known)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ordered)), max_size=5)))
    for first, last in pairwise([0, *cuts, len(ordered)]):
        every.add(np.array(ordered[first:last], np.int64))
    others = sorted(data.draw(st.lists(st.integers(0, 110), max_size=30)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(addresses, "AT_ONCE", at_once)
        pairs = list(beside(every.below(end), np.array(others, np.int64)))
        again = repeated(np.array(others, np.int64))
        there = {one for stretch, some in pairs for one in some[~lacking(stretch, some)].tolist()}
        alone = [one for stretch, some in pairs for one in stretch[lacking(some, stretch)].tolist()]
    below = [one for one in ordered if one < end]
    assert [one for stretch, _ in pairs for one in stretch.tolist()] == below
    assert [one for _, some in pairs for one in some.tolist()] == others
    assert again == [one for before, one in pairwise(others) if before == one]
    assert there == set(below) & set(others)
    assert alone == [one for one in below if one not in others]


def test_groups_take_less_than_a_byte_an_address() -> None:
    groups = [np.arange(64) + (position << 20) for position in range(1, 9)]
    assert len(packed(np.concatenate(groups))) < 8 * 64
