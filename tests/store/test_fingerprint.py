"""Rows have one fingerprint whatever backend gave them, and in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_buffer.store.auditing.fingerprint import Fingerprint

VALUES = st.none() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
ROWS = st.lists(st.tuples(VALUES, VALUES), max_size=5)


@given(ROWS, st.randoms())
def test_the_order_does_not_count(rows: list[tuple[Any, ...]], random: Any) -> None:
    other = list(rows)
    random.shuffle(other)
    assert Fingerprint.of(rows) == Fingerprint.of(other)


@given(ROWS, ROWS)
def test_other_rows_have_another(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> None:
    same = len(one) == len(other) and all(one.count(row) == other.count(row) for row in one)
    assert (Fingerprint.of(one) == Fingerprint.of(other)) == same


@pytest.mark.parametrize(
    ("one", "other"), [(True, 1), (False, 0), (1.0, 1), (-0.0, 0), (float("nan"), None)]
)
def test_what_sql_takes_for_the_same_is_the_same(one: Any, other: Any) -> None:
    assert Fingerprint.of([(one,)]) == Fingerprint.of([(other,)])


def test_two_equal_rows_are_not_none() -> None:
    assert Fingerprint.of([(1,), (1,)]) != Fingerprint.of([])
    assert Fingerprint.of([("1",)]) != Fingerprint.of([(1,)]) != Fingerprint.of([(b"1",)])


@given(ROWS, ROWS)
def test_parts_add_up(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> None:
    assert Fingerprint.of(one) + Fingerprint.of(other) == Fingerprint.of([*one, *other])
