"""Addresses that `verify` remembers come back as they were, and take little memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_buffer.pipeline.verify import addresses
from trinity_buffer.pipeline.verify.addresses import lacking, packed, repeated, together, unpacked

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
    every = together(unpacked(packed(part)) for part in parts)
    expected = [one for part in parts for one in part]
    assert every.tolist() == expected


@given(st.sets(st.integers(0, 99)), st.lists(st.integers(0, 110)), st.integers(1, 9))
def test_what_is_lacking_and_what_is_repeated_is_found_in_any_number_of_goes(
    known: set[int], wanted: list[int], at_once: int
) -> None:
    wanted = sorted(wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(addresses, "AT_ONCE", at_once)
        missing = lacking(np.array(sorted(known), np.int64), np.array(wanted, np.int64))
        again = repeated(np.array(wanted, np.int64))
    assert missing.tolist() == [one not in known for one in wanted]
    assert again == [one for before, one in pairwise(wanted) if before == one]


def test_groups_take_less_than_a_byte_an_address() -> None:
    groups = [np.arange(64) + (position << 20) for position in range(1, 9)]
    assert len(packed(np.concatenate(groups))) < 8 * 64
