"""What is recorded before any training is finite: rollouts, rewards, advantages, settings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from tests.trainer.data import rollouts
from trinity_buffer import assign_rewards, open_store, run_strategy
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.pipeline.write.batch import PER_TOKEN

NAN, INF = math.nan, math.inf
LARGE = 1e39
"""Finite in float64, and infinite in a micro-batch."""


@pytest.mark.parametrize("value", [NAN, INF, -INF, LARGE, -LARGE])
@pytest.mark.parametrize("field", ["reward", "action_mask", *PER_TOKEN])
async def test_what_an_explorer_says_is_finite(field: str, value: float, sqlite_url: str) -> None:
    made = rollouts()
    size = len(made[4].tokens) - made[4].prompt_length
    if field == "reward":
        made[4].reward = value
    else:
        setattr(made[4], field, torch.full((size,), value, dtype=torch.float64))
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={"schema": "experience"})
        with pytest.raises(InvalidExperienceError, match=rf"{made[4].eid.uid}: {field}"):
            await experiment.writer("test").write(made)


@pytest.mark.parametrize("value", [NAN, LARGE, "good", "1", [1.0], 1j, torch.ones(2), np.ones(2)])
async def test_what_scores_rollouts_anew_is_a_finite_number(value: Any, sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await experiment.writer("test").write(rollouts())
        with pytest.raises(InvalidArgumentError, match="scoring 'broken': the reward of b0/0/0/0/"):
            await assign_rewards(experiment, "broken", lambda _: value)
        assert [e async for e in experiment.events(kinds=("RewardsAssigned",))] == []


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True), torch.tensor(1.0)])
async def test_a_truth_scores_rollouts_anew(value: Any, sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await experiment.writer("test").write(rollouts())
        await assign_rewards(experiment, "equal", lambda _: value)
        (event,) = [e async for e in experiment.events(kinds=("RewardsAssigned",))]
        assert {*event.body["rewards"]} == {1.0}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
async def test_what_configures_a_run_is_finite(value: float, store_url: str) -> None:
    async with open_store(store_url) as store:
        with pytest.raises(InvalidArgumentError, match="config of experiment 'run'"):
            await store.experiment("run", config={"extra": {"rates": [value]}})
        experiment = await store.experiment("run", config={"rollouts_per_group": 3})
        with pytest.raises(InvalidArgumentError, match="arguments of strategy 'grpo'"):
            await run_strategy(experiment, "grpo", {"std_threshold": value})
        assert [event.kind async for event in experiment.events()] == ["ExperimentCreated"]


class BrokenStrategy(AddStrategy):
    """Gives one run of each task an advantage that is no number, or too large."""

    broken = NAN

    @override
    async def add(self, experiences: list[Any], step: int) -> tuple[int, dict[str, Any]]:
        for one in experiences:
            value = self.broken if one.eid.run == 1 else 1.0
            one.advantages = one.returns = torch.full_like(one.logprobs.double(), value)
        await self.writer.write(experiences)
        return len(experiences), {"spread": NAN, "size": 3.0}


class LargeStrategy(BrokenStrategy):
    broken = LARGE


@pytest.mark.parametrize("strategy", [BrokenStrategy, LargeStrategy])
async def test_what_a_strategy_computed_that_is_not_finite_is_rejected(
    strategy: type[AddStrategy], store_url: str
) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 3})
        await experiment.writer("test").write(rollouts())
        report = await run_strategy(experiment, strategy, name="broken")
        assert (report.annotated, report.rejected) == (12, 6)
        events = [event async for event in experiment.events()]
    (annotated,) = (e for e in events if e.kind == "ExperiencesAnnotated")
    assert all(found == {"size": 3.0} for found in annotated.body["metrics"])
    (rejected,) = (e for e in events if e.kind == "ExperiencesRejected")
    assert set(rejected.body["reasons"]) == {"invalid: advantages, returns"}
