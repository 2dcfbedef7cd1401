"""A group of which a run was refused at the door: decided without waiting, and incomplete."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.contract.making import assert_conserved, group, opened, rollout
from tests.pipeline.watching import Watcher, reasons
from trinity_buffer import run_strategy


@pytest.mark.parametrize("strategy", ["grpo", Watcher])
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("planned", [True, False])
async def test_a_late_run_completes_no_group(
    store_url: str, strategy: type[Watcher] | str, looks: bool, planned: bool
) -> None:
    rules: dict[str, Any] = {"rollouts_per_group": 2, "on_incomplete_group": "reject"}
    async with opened(store_url, **rules) as experiment:
        writer = experiment.writer("e0")
        if planned:
            await writer.plan("b", [0, 1], 2)
        await writer.write([*group(task=0, runs=2), rollout(task=1)])
        await writer.seal("b", 3)
        if looks:  # before the late run comes: whether it does makes no difference
            await run_strategy(experiment, strategy, name="all")
        await writer.write([rollout(task=1, run=1)])
        await run_strategy(experiment, strategy, name="all")
        assert await reasons(experiment, "all") == {"b/1/0": "incomplete_group"}
        await assert_conserved(experiment)


@pytest.mark.parametrize("strategy", ["grpo", Watcher])
@pytest.mark.parametrize("incomplete", ["keep", "reject"])
async def test_a_group_with_a_refused_run_is_decided_at_once_and_is_incomplete(
    store_url: str, strategy: type[Watcher] | str, incomplete: str
) -> None:
    async with opened(store_url, on_incomplete_group=incomplete) as experiment:
        writer = experiment.writer("e0", on_invalid="quarantine")
        await writer.plan("b", [0], 2)
        await writer.write([rollout()])
        broken = rollout(run=1)
        broken.reward = math.nan
        await writer.write([broken])
        report = await run_strategy(experiment, strategy, name="all")
        assert report.waiting == 0
        expected = {} if incomplete == "keep" else {"b/0/0": "incomplete_group"}
        assert await reasons(experiment, "all") == expected
        await assert_conserved(experiment)
