"""Crash points are set from outside: each must name something that is there, or it kills nobody."""

from __future__ import annotations

import pytest

from tests.crash.points import CRASH_POINTS, TRANSACTIONS, install
from tests.crash.test_sigkill import EXPLORER_POINTS, STRATEGY_POINTS, TRAINER_POINTS
from tests.pipeline.test_compaction import trained
from trinity_buffer import compact, open_store


async def test_each_point_of_a_transaction_is_reached(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[str] = []
    install(points.append, monkeypatch.setattr)
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=1)
        await compact(experiment, keep_steps=0, archive=None, delete=True)
    for name in TRANSACTIONS.values():
        own = [point for point in points if point.endswith(f"-{name}")]
        assert own[:3] == [f"before-{name}", f"inside-{name}", f"after-{name}"]


def test_each_point_is_killed_at_by_some_test() -> None:
    tested = [*EXPLORER_POINTS, *STRATEGY_POINTS, *TRAINER_POINTS]
    assert set(CRASH_POINTS) - set(tested) == {"before-compact", "inside-compact", "after-compact"}
