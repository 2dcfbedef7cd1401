"""What the checks of all guarantees need: a small store, and a verdict on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.handles import Experiment, VerifyReport
from tests.sample_run import rollout
from trinity_buffer import open_store

RUNS = 4
BLOCKED_S = 0.5
"""So long something must not happen; it is over in a millisecond where nothing holds it."""


@asynccontextmanager
async def opened(url: str, **config: Any) -> AsyncIterator[Experiment]:
    async with open_store(url) as store:
        yield await store.experiment("run", config={"rollouts_per_group": RUNS, **config})


async def write_groups(experiment: Experiment, tasks: int, *, equal: bool = False) -> list[str]:
    """Plan, write and seal one batch; return its uids."""
    writer = experiment.writer("e0")
    await writer.plan("b0", list(range(tasks)), RUNS)
    uids: list[str] = []
    for task in range(tasks):
        rewards = [1.0 if equal else float(run % 2) for run in range(RUNS)]
        some = [rollout("b0", task, run, rewards[run]) for run in range(RUNS)]
        uids += (await writer.write(some)).uids
    await writer.seal("b0", tasks * RUNS)
    return uids


def nothing_is_wrong(report: VerifyReport) -> None:
    assert report.problems == ()
    assert report.lost_items == ()
    assert report.duplicated_items == ()
