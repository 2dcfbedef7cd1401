from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.algorithm.strategies.rollouts import group, rollout, tensor
from trinity_buffer.algorithm import SAMPLE_STRATEGY
from trinity_buffer.algorithm.sample_strategy import (
    DefaultSampleStrategy,
    MixSampleStrategy,
    SamplePlan,
    StalenessControlSampleStrategy,
)
from trinity_buffer.errors import InvalidArgumentError


class ScriptedReader:
    """Hands out its experiences in order and remembers what it was asked."""

    def __init__(self, experiences: list[Any]) -> None:
        self.experiences = experiences
        self.position = 0
        self.asked: list[tuple[int, int]] = []

    async def read(self, batch_size: int, *, min_policy_version: int = 0) -> list[Any]:
        self.asked.append((batch_size, min_policy_version))
        taken = self.experiences[self.position : self.position + batch_size]
        self.position += len(taken)
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


async def test_the_default_takes_what_comes_next_and_says_how_old_it_is() -> None:
    exps = group([0.5, -1.0, 2.0])
    exps[0].info = {"model_version": 4, "model_version_drift": 1}
    exps[1].info = {"model_version": 2}
    strategy = DefaultSampleStrategy(ScriptedReader(exps), batch_size=3)
    taken, metrics, samples = await strategy.sample(step=1)
    assert taken == exps
    assert metrics["sample/model_version/mean"] == 3.0
    assert metrics["sample/model_version_drift/mean"] == 0.5
    assert [sample["reward"] for sample in samples] == [-1.0, 2.0]


@pytest.mark.parametrize(
    ("staleness", "step", "oldest"), [(0, 5, 4), (2, 5, 2), (2, 1, 0), (float("inf"), 9, 0)]
)
async def test_staleness_control_asks_for_young_enough_data(
    staleness: float, step: int, oldest: int
) -> None:
    reader = ScriptedReader(group([1.0]))
    await StalenessControlSampleStrategy(reader, max_staleness=staleness).sample(step)
    assert reader.asked == [(1, oldest)]


@pytest.mark.parametrize(
    ("ratio", "size", "expert"), [(0.5, 8, 4), (0.2, 5, 1), (0.34, 5, 2), (0.0, 5, 0), (1.0, 5, 5)]
)
def test_mix_rounds_the_experts_share_up(ratio: float, size: int, expert: int) -> None:
    plan = MixSampleStrategy(expert_data_ratio=ratio).plan(1, size)
    assert plan == SamplePlan(size - expert, expert)


async def test_mix_marks_both_kinds_and_gives_the_expert_empty_columns() -> None:
    expert = rollout("e", 0, None, mask=(1, 1, 1))
    usual = rollout("u", 0, 1.0, logprobs=torch.tensor([-1.0, -1.0]))
    strategy = MixSampleStrategy(
        ScriptedReader([usual]), batch_size=2, expert_reader=ScriptedReader([expert])
    )
    taken, _, _ = await strategy.sample(step=7)
    assert taken == [usual, expert]
    assert [e.info["is_expert"] for e in taken] == [False, True]
    assert [e.info["step"] for e in taken] == [7, 7]
    assert expert.reward == 0.0
    assert tensor(expert.logprobs).tolist() == tensor(expert.returns).tolist() == [0.0] * 3
    assert [field.destination_field for field in expert.custom_fields] == ["expert_mask", "step"]
    assert tensor(usual.logprobs).tolist() == [-1.0, -1.0]


async def test_a_state_that_was_saved_goes_on_where_it_was() -> None:
    usual, expert = ScriptedReader(group([1.0] * 4)), ScriptedReader(group([1.0] * 4))
    strategy = MixSampleStrategy(usual, batch_size=4, expert_reader=expert)
    await strategy.sample(1)
    state = strategy.state_dict()
    usual.position = expert.position = 0
    strategy.load_state_dict(state)
    assert usual.position == expert.position == 2


async def test_a_strategy_without_readers_can_plan_but_not_sample() -> None:
    assert DefaultSampleStrategy().plan(1, 4) == SamplePlan(4)
    with pytest.raises(InvalidArgumentError, match="reader="):
        await DefaultSampleStrategy().sample(1)
    with pytest.raises(InvalidArgumentError, match="sft_dataset"):
        await MixSampleStrategy(ScriptedReader([]), batch_size=2).sample(1)


def test_values_and_names_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="expert_data_ratio"):
        MixSampleStrategy(expert_data_ratio=1.5)
    with pytest.raises(InvalidArgumentError, match="max_staleness"):
        StalenessControlSampleStrategy(max_staleness=-1)
    with pytest.raises(InvalidArgumentError, match="did you mean 'max_staleness'"):
        StalenessControlSampleStrategy(max_stalenes=1)  # type: ignore[call-arg]
    assert SAMPLE_STRATEGY.get("mix").default_args() == {
        "expert_data_ratio": 0.5,
        "sft_dataset_name": "sft_dataset",
    }


async def test_an_experience_without_a_reward_is_shown_without_one() -> None:
    strategy = DefaultSampleStrategy(ScriptedReader([rollout(reward=None)]))
    _, _, samples = await strategy.sample(1)
    assert samples == [{"prompt": None, "response": None}]
