"""Explorers are held back while what they make is rejected for a fault, and by nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.contract.making import group, opened
from tests.contract.test_planning import waiting_plan
from tests.handles import Experiment
from trinity_buffer import run_strategy


async def registered_trainer(experiment: Experiment, **options: Any) -> None:
    """Let a trainer take what there is for it."""
    async with experiment.train_stream(**options) as stream:
        async for _ in stream:
            pass


async def refused_by_strategy(experiment: Experiment, batch: str) -> None:
    await experiment.writer("e0").write(group(batch, rewards=[None, None]))
    await run_strategy(experiment, "grpo")


async def refused_by_trainer(experiment: Experiment, batch: str) -> None:
    made = group(batch, runs=2)
    for one in made:
        one.logprobs = None
    await experiment.writer("e0").write(made)
    await run_strategy(experiment, "grpo")
    await registered_trainer(experiment, strategy="grpo", needs=("logprobs",))


@pytest.mark.parametrize("refused", [refused_by_strategy, refused_by_trainer])
async def test_while_all_is_faulty_no_more_than_a_step_is_planned(
    store_url: str, refused: Callable[[Experiment, str], Awaitable[None]]
) -> None:
    async with opened(store_url, groups_per_step=1, rollouts_per_group=2) as experiment:
        writer = experiment.writer("e0")
        await run_strategy(experiment, "grpo")
        await registered_trainer(experiment, strategy="grpo")
        for batch in ("a", "b", "c"):
            await writer.plan(batch, [0], 2)
            await refused(experiment, batch)
        await writer.plan("d", [0], 2)
        async with waiting_plan(experiment, "e"):
            await writer.write(group("d", runs=2))
            await run_strategy(experiment, "grpo")
            await registered_trainer(experiment, strategy="grpo", needs=("logprobs",))
        await writer.plan("f", [0], 2)


async def test_what_a_filter_leaves_out_holds_nobody_back(store_url: str) -> None:
    async with opened(store_url, groups_per_step=1, rollouts_per_group=2) as experiment:
        writer = experiment.writer("e0")
        await run_strategy(experiment, "reward_variance")
        await registered_trainer(experiment, strategy="reward_variance")
        for batch in ("a", "b", "c", "d"):
            await writer.plan(batch, [0], 2)
            await writer.write(group(batch, rewards=[1.0, 1.0]))
        await run_strategy(experiment, "reward_variance")
        await writer.plan("e", [0], 2)
        await writer.plan("f", [0], 2)
