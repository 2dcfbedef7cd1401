"""How often a strategy goes to the thread of its connection, which takes longer than a query."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.making import assert_conserved, group, opened
from trinity_buffer import run_strategy
from trinity_buffer.store.connection import ConnectionPool


async def test_a_group_is_read_and_decided_on_one_trip(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips, usual = [], ConnectionPool.run_in_thread

    async def noted(self: ConnectionPool, work: Any, session: Any, *, writes: bool) -> Any:
        trips.append(writes)
        return await usual(self, work, session, writes=writes)

    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await run_strategy(experiment, "grpo")
        await experiment.writer("e0").write(group(runs=2))
        monkeypatch.setattr(ConnectionPool, "run_in_thread", noted)
        report = await run_strategy(experiment, "grpo")
        monkeypatch.undo()
        assert report.annotated == 2
        assert trips == [
            *(False, False, True),  # it is registered; nobody else decides, so it does
            False,  # to find where it left off
            *(True, True),  # a group, then nothing
            True,  # it gives the lease back
        ]
        await assert_conserved(experiment)
