from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from tests.algorithm.strategies.rollouts import (
    PlainWriter,
    group,
    rejected,
    rollout,
    scores,
    tensor,
    written,
)
from trinity_buffer.algorithm import ADD_STRATEGY
from trinity_buffer.algorithm.add_strategy import (
    AddStrategy,
    CorrectBiasAddStrategy,
    GroupAdvantageStrategy,
    GRPOAddStrategy,
    OPMDAddStrategy,
    RewardVarianceAddStrategy,
    StepWiseGRPOStrategy,
    group_by,
)
from trinity_buffer.algorithm.group_scores import SingleMember
from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.experience import Experience
from trinity_buffer.writer import StagedWriter

SCORING = [
    "grpo",
    "opmd",
    "correct_bias",
    "step_wise_grpo",
    "asymre",
    "rec",
    "reinforce",
    "gigpo",
    "grpo_grouped",
]


async def test_grpo_scores_every_action_token_and_only_these() -> None:
    writer = PlainWriter()
    exps = group([0.0, 2.0], mask=(1, 0, 1))
    count, metrics = await GRPOAddStrategy(writer, epsilon=0.0).add(exps, 0)
    half = 2**-0.5
    assert count == 2
    assert torch.allclose(tensor(exps[0].advantages), torch.tensor([-half, 0.0, -half]))
    assert torch.allclose(tensor(exps[1].returns), torch.tensor([half, 0.0, half]))
    assert metrics["group_advantages/reward_mean/mean"] == 1.0
    assert metrics["group_advantages/reward_std/max"] == pytest.approx(2**0.5)


async def test_advantages_and_returns_do_not_share_memory() -> None:
    exps = group([0.0, 2.0])
    await GRPOAddStrategy(PlainWriter()).add(exps, 0)
    tensor(exps[0].advantages).zero_()
    assert tensor(exps[0].returns).any()


async def test_groups_are_written_one_by_one_in_order_of_first_appearance() -> None:
    writer = PlainWriter()
    order: list[tuple[int | str, int]] = [("z", 0), (5, 0), ("z", 1), ("a", 0), (5, 1)]
    exps = [rollout(t, r, float(r)) for t, r in order]
    await GRPOAddStrategy(writer).add(exps, 0)
    assert [[e.eid.task for e in some] for some in writer.writes] == [["z", "z"], [5, 5], ["a"]]


async def test_opmd_takes_the_mean_off() -> None:
    exps = group([0.0, 1.0, 2.0])
    _, metrics = await OPMDAddStrategy(PlainWriter()).add(exps, 0)
    assert scores(exps) == [-1.0, 0.0, 1.0]
    assert metrics["group_advantages/group_baseline/mean"] == 1.0


async def test_rank_bias_correction_lowers_the_reward_of_the_likeliest() -> None:
    exps = [
        rollout(0, 0, 1.0, logprobs=torch.tensor([-0.1, -0.1])),
        rollout(0, 1, 1.0, logprobs=torch.tensor([-2.0, -2.0])),
    ]
    strategy = CorrectBiasAddStrategy(PlainWriter(), epsilon=0.0, rank_penalty=0.5)
    await strategy.add(exps, 0)
    # ranks 1/2 and 0: rewards 0.75 and 1, one sample deviation of 0.177 around 0.875
    assert scores(exps) == pytest.approx([-(2**-0.5), 2**-0.5])


async def test_step_wise_scores_all_steps_of_a_run_by_its_last() -> None:
    writer = PlainWriter()
    steps = [(0, 0, None), (0, 1, 1.0), (1, 0, None), (1, 1, None), (1, 2, 0.0)]
    exps = [rollout(0, run, reward, step=step) for run, step, reward in steps]
    await StepWiseGRPOStrategy(writer, epsilon=0.0, enable_step_norm=True).add(exps, 0)
    half = 2**-0.5
    assert scores(exps) == pytest.approx([half / 2] * 2 + [-half / 3] * 3)
    assert [len(some) for some in writer.writes] == [2, 3]


async def test_step_wise_can_look_for_the_last_step_itself() -> None:
    exps = [rollout(0, 0, 5.0, step=1), rollout(0, 0, -1.0, step=0), rollout(0, 1, 1.0, step=0)]
    strategy = StepWiseGRPOStrategy(PlainWriter(), last_step="step")
    _, metrics = await strategy.add(exps, 0)
    assert metrics["group_advantages/reward_mean/mean"] == 3.0


@pytest.mark.parametrize(("single_member", "score"), [("raw", 5.0), ("zero", 0.0)])
async def test_step_wise_scores_an_only_run_as_it_is_told(
    single_member: SingleMember, score: float
) -> None:
    exps = [rollout(0, 0, 5.0)]
    await StepWiseGRPOStrategy(PlainWriter(), single_member=single_member).add(exps, 0)
    assert scores(exps) == pytest.approx([score])


async def test_a_group_of_equal_rewards_is_annotated_with_zeros() -> None:
    exps = group([0.1] * 7)
    count, _ = await GRPOAddStrategy(PlainWriter(), epsilon=0.0).add(exps, 0)
    assert count == 7
    assert scores(exps) == [0.0] * 7


async def test_std_threshold_rejects_what_has_nothing_to_teach() -> None:
    writer = StagedWriter()
    exps = [*group([1.0, 1.0], "equal"), *group([0.0, 1.0], "differ"), rollout("alone")]
    count, _ = await GRPOAddStrategy(writer, std_threshold=0.0).add(exps, 0)
    assert count == 2
    assert {e.eid.task for e in written(writer)} == {"differ"}
    assert {reason for _, reason in rejected(writer)} == {"zero_variance"}
    assert len(writer.rejections) == 3


async def test_reward_variance_recognizes_seven_rewards_of_a_tenth_as_equal() -> None:
    writer = StagedWriter()
    exps = [*group([0.1] * 7, "equal"), *group([0.1, 0.2], "differ")]
    await RewardVarianceAddStrategy(writer).add(exps, 0)
    assert {e.eid.task for e in written(writer)} == {"differ"}
    assert all(e.advantages is None for e in written(writer))
    assert [reason for _, reason in rejected(writer)] == ["zero_variance"] * 7


async def test_reward_variance_says_filtered_where_rewards_do_differ() -> None:
    writer = StagedWriter()
    strategy = RewardVarianceAddStrategy(writer, variance_threshold=1.0)
    await strategy.add(group([0.0, 0.5]), 0)
    scored = strategy.score_groups(np.array([[0.0, 0.5], [0.5, 0.5], [0.0, 4.0]]))
    assert np.asarray(scored.reasons)[:2].tolist() == [["filtered"], ["zero_variance"]]
    assert np.asarray(scored.kept).tolist() == [[False] * 2, [False] * 2, [True] * 2]
    assert [reason for _, reason in rejected(writer)] == ["filtered"] * 2


@pytest.mark.parametrize("name", SCORING)
async def test_no_experiences_are_no_write_and_no_metrics(name: str) -> None:
    writer = PlainWriter()
    assert await ADD_STRATEGY.get(name)(writer).add([], 0) == (0, {})
    assert writer.writes == []


@pytest.mark.parametrize("name", SCORING)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
async def test_a_missing_or_endless_reward_is_refused_before_the_first_write(
    name: str, bad: float | None
) -> None:
    writer = PlainWriter()
    exps = [*group([0.0, 1.0], "good"), rollout("bad", 3, bad)]
    for e in exps:
        e.logprobs = torch.tensor([-1.0, -1.0])
    with pytest.raises(InvalidExperienceError, match=r"b/bad/3/0/.*reward"):
        await ADD_STRATEGY.get(name)(writer).add(exps, 0)
    assert writer.writes == []


@pytest.mark.parametrize("name", SCORING)
async def test_a_writer_that_can_is_told_what_is_invalid_and_the_rest_is_scored(name: str) -> None:
    writer = StagedWriter()
    exps = [*group([0.0, 1.0], "good"), rollout("bad", 3, None)]
    for e in exps:
        e.logprobs = torch.tensor([-1.0, -2.0])
    await ADD_STRATEGY.get(name)(writer).add(exps, 0)
    assert rejected(writer) == [("b/bad/3/0/", "invalid: reward")]
    assert {e.eid.task for e in written(writer)} == {"good"}


async def test_a_run_with_a_step_that_cannot_be_used_is_rejected_whole() -> None:
    writer = StagedWriter()
    exps = [rollout(0, 0, None, step=0), rollout(0, 0, None, step=1), rollout(0, 1, 1.0)]
    await StepWiseGRPOStrategy(writer).add(exps, 0)
    assert rejected(writer) == [("b/0/0/0/", "invalid: reward"), ("b/0/0/1/", "invalid: reward")]
    assert [e.eid.run for e in written(writer)] == [1]


async def test_a_missing_mask_is_named() -> None:
    e = rollout()
    e.action_mask = None
    with pytest.raises(InvalidExperienceError, match=r"b/0/0/0/.*action_mask"):
        await GRPOAddStrategy(PlainWriter()).add([e], 0)


async def test_rank_bias_correction_needs_logprobs_only_where_there_are_ranks() -> None:
    await CorrectBiasAddStrategy(PlainWriter()).add([rollout()], 0)
    with pytest.raises(InvalidExperienceError, match="logprobs"):
        await CorrectBiasAddStrategy(PlainWriter()).add(group([0.0, 1.0]), 0)


@pytest.mark.parametrize("name", SCORING)
async def test_the_order_of_the_experiences_does_not_change_their_advantages(name: str) -> None:
    exps = [rollout(t, r, (3 * t + 7 * r) % 5 / 4) for t in range(3) for r in range(4)]
    for e in exps:
        e.logprobs = torch.tensor([-1.0, -1.0 - e.eid.run])
    await ADD_STRATEGY.get(name)(PlainWriter()).add(exps, 0)
    before = {e.eid.uid: s for e, s in zip(exps, scores(exps), strict=True)}
    random.Random(1).shuffle(exps)
    await ADD_STRATEGY.get(name)(PlainWriter()).add(exps, 0)
    after = {e.eid.uid: s for e, s in zip(exps, scores(exps), strict=True)}
    assert after == pytest.approx(before, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "opmd", "correct_bias", "rec"])
async def test_the_advantages_of_a_group_sum_to_zero(name: str) -> None:
    exps = group([0.3, 0.9, -1.2, 4.0])
    for e in exps:
        e.logprobs = torch.tensor([-1.0, -1.0 - e.eid.run])
    await ADD_STRATEGY.get(name)(PlainWriter()).add(exps, 0)
    assert sum(scores(exps)) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("name", ADD_STRATEGY.names())
def test_every_strategy_says_what_it_needs_and_lists_its_defaults(name: str) -> None:
    cls = ADD_STRATEGY.get(name)
    assert cls.unit_for() in ("group", "batch")
    assert set(cls.families_for()) <= {"light", "tokens", "text", "heavy"}
    assert not set(cls.default_args()) & {"writer", "rng", "on_unknown"}


def test_a_misspelt_argument_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(InvalidArgumentError, match="'epsilom'; did you mean 'epsilon'"):
        GRPOAddStrategy(PlainWriter(), epsilom=1e-3)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match="did you mean 'std_floor'"):
        CorrectBiasAddStrategy(PlainWriter(), std_flor=0.0)  # type: ignore[call-arg]


def test_a_misspelt_argument_can_be_swallowed_as_the_reference_does() -> None:
    options: dict[str, Any] = {"on_unknown": "ignore", "epsilom": 1e-3}
    strategy = GRPOAddStrategy(PlainWriter(), **options)
    assert strategy.epsilon == 1e-6


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("opmd", {"opmd_baseline": "median"}, "opmd_baseline.*'mean', 'logavgexp'"),
        ("opmd", {"tau": 0.0}, "tau"),
        ("grpo", {"epsilon": -1.0}, "epsilon"),
        ("grpo", {"single_member": "drop"}, "single_member"),
        ("step_wise_grpo", {"last_step": "first"}, "last_step"),
        ("duplicate_informative", {"copy_ids": "same"}, "copy_ids"),
        ("rec", {"drop": "half"}, "drop"),
        ("gigpo", {"fnorm": "mean"}, r"^fnorm must be one of 'none', 'std', not 'mean'$"),
        ("grpo", {"ddof": True}, r"^ddof must be one of 0, 1, not True$"),
        (
            *("gigpo", {"missing_reward": "skip"}),
            r"^missing_reward must be one of 'refuse', 'zero', not 'skip'$",
        ),
        (
            *("gigpo", {"anchor_scope": "world"}),
            r"^anchor_scope must be one of 'task', 'batch', not 'world'$",
        ),
        ("grpo_grouped", {"std_cal_level": "world"}, "std_cal_level"),
        ("overlong_penalty", {"max_length": 4, "cache_length": 9}, "cache_length"),
        ("best_of_group", {"num_kept": 0}, "num_kept"),
    ],
)
def test_a_value_that_cannot_be_right_is_named(
    name: str, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        ADD_STRATEGY.get(name)(PlainWriter(), **arguments)


async def test_a_strategy_may_return_copies_of_what_it_was_given() -> None:
    class CopyingStrategy(GRPOAddStrategy):
        """GRPO on copies."""

        @override
        def calculate_group_advantage(
            self, group_id: Any, exps: list[Experience]
        ) -> tuple[list[Experience], dict[str, float]]:
            return super().calculate_group_advantage(group_id, [copy.copy(e) for e in exps])

    writer = StagedWriter()
    exps = group([0.0, 1.0])
    assert (await CopyingStrategy(writer).add(exps, 0))[0] == 2
    assert writer.rejections == []
    assert exps[0].advantages is None


async def test_a_strategy_of_ones_own_needs_two_methods() -> None:
    class LengthStrategy(GroupAdvantageStrategy):
        """The shorter of the runs of a task are better."""

        needs = ("action_mask",)

        @override
        def group_experiences(self, exps: list[Experience]) -> dict[str, list[Experience]]:
            return group_by(exps, "task")

        @override
        def calculate_group_advantage(
            self, group_id: Any, exps: list[Experience]
        ) -> tuple[list[Experience], dict[str, float]]:
            for e in exps:
                assert e.action_mask is not None
                e.advantages = -e.action_mask.float() * len(e.action_mask)
                e.returns = e.advantages
            return exps[:2], {"length": len(exps)}

    writer = StagedWriter()
    exps = group([None, None, None])
    assert await LengthStrategy(writer).add(exps, 0) == (2, {
        "group_advantages/length/mean": 3.0,
        "group_advantages/length/max": 3.0,
        "group_advantages/length/min": 3.0,
    })  # fmt: skip
    assert rejected(writer) == [("b/0/2/0/", "filtered")]
    assert issubclass(LengthStrategy, AddStrategy)
