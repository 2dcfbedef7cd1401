"""Whether staleness grew, and whose, is said for each actor."""

from __future__ import annotations

import anyio

from tests.cli.calling import Cli
from tests.contract.making import opened, rollout
from trinity_buffer import run_strategy


async def _by_two(url: str) -> None:
    """Train 11 steps on rows of version 0 by ``old`` and, but in the first, of the newest."""
    async with opened(url, rollouts_per_group=2) as experiment:
        for batch in range(11):
            versions = {"old": 0, "new": batch} if batch else {"old": 0}
            for task, (actor, version) in enumerate(versions.items()):
                group = [
                    rollout(f"b{batch}", task, run, reward=float(run), version=version)
                    for run in range(2)
                ]
                await experiment.writer(actor).write(group)
            await run_strategy(experiment, "grpo")
            stream = experiment.train_stream(strategy="grpo", groups_per_step=len(versions))
            async with stream as steps:
                async for step in steps:
                    await steps.commit(step, checkpoint=None)


def test_staleness_says_whose_grew(cli: Cli, new_sqlite_url: str) -> None:
    anyio.run(_by_two, new_sqlite_url)
    told = cli("staleness", "--store", new_sqlite_url).out.splitlines()[-3:]
    assert told == [
        "steps 1 to 11: new mean 0 (steps 1 to 2: 0; steps 10 to 11: 0), greatest 0, over 20 rows",
        "steps 1 to 11: old mean 5 (steps 1 to 2: 0.5; steps 10 to 11: 9.5), greatest 10, "
        "over 22 rows",
        "steps 1 to 11: all actors mean 2.62 (steps 1 to 2: 0.333; steps 10 to 11: 4.75), "
        "greatest 10, over 42 rows",
    ]
    few = cli("staleness", "--store", new_sqlite_url, "--after", 0, "--limit", 2).out.splitlines()
    assert few[-3] == (
        "steps 1 to 2: new mean 0 (step 1: no rows; step 2: 0), greatest 0, over 2 rows"
    )
    last = cli("staleness", "--store", new_sqlite_url, "--limit", 1).out.splitlines()
    assert last[-2] == "step 11: old mean 10, greatest 10, over 2 rows"
