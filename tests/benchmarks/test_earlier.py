"""What is measured beside an earlier version is counted, and the first calls are not in it."""

from __future__ import annotations

import pytest

from benchmarks import earlier_role


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_role, "WRITTEN", 256)
    monkeypatch.setattr(earlier_role, "STEPS", 1)


@pytest.mark.parametrize(("role", "number"), [("write", 128), ("step", 256)])
def test_a_role_says_how_many_it_measured(store_url: str, role: str, number: int) -> None:
    seconds, measured = earlier_role.ROLES[role](store_url)
    assert measured == number
    assert seconds > 0
