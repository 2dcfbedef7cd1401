from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from typing_extensions import override

from tests.algorithm.strategies.rollouts import group, rollout, scores
from trinity_buffer.algorithm import ADVANTAGE_FN
from trinity_buffer.algorithm.advantage_fn import (
    ASYMREGroupAdvantage,
    GiGPOAdvantageFn,
    GRPOGroupedAdvantage,
    OPMDGroupAdvantage,
    PipelineAdvantage,
    RECGroupedAdvantage,
    REINFORCEGroupAdvantage,
    StepWiseGRPOAdvantageFn,
)
from trinity_buffer.algorithm.copies import original_uid
from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.experience import Experience

PIPELINE = ["grpo", "opmd", "asymre", "rec", "reinforce", "step_wise_grpo", "gigpo"]
HALF = 2**-0.5


def liked(rewards: list[float], likelihoods: list[float], task: int = 0) -> list[Experience]:
    """Return a group whose members have these likelihoods."""
    exps = group(rewards, task)
    for e, likelihood in zip(exps, likelihoods, strict=True):
        e.logprobs = torch.full((2,), likelihood)
    return exps


def test_grpo_returns_the_groups_one_after_the_other() -> None:
    exps = [rollout(t, r, float(r)) for r in range(2) for t in (3, 1)]
    kept, metrics = GRPOGroupedAdvantage(epsilon=0.0).process(exps)
    assert [e.eid.task for e in kept] == [3, 3, 1, 1]
    assert scores(kept) == pytest.approx([-HALF, HALF] * 2)
    assert metrics["filtered_count"] == 0
    assert metrics["group_advantages/reward_mean/mean"] == 0.5


def test_a_threshold_leaves_out_equal_groups_and_groups_of_one() -> None:
    exps = [*group([0.1] * 7, 1), *group([0.0, 1.0], 2), rollout(3)]
    kept, metrics = GRPOGroupedAdvantage(std_threshold=0.0).process(exps)
    assert {e.eid.task for e in kept} == {2}
    assert metrics["filtered_count"] == 8


def test_left_out_groups_are_replaced_by_copies_with_addresses_of_their_own() -> None:
    exps = [*group([1.0, 1.0], 1), *group([0.0, 1.0], 2), *group([0.5, 0.5], 3)]
    duplicating = GRPOGroupedAdvantage(std_threshold=0.0, duplicate_experiences=True)
    kept, _ = duplicating.process(exps)
    assert len(kept) == 6
    assert len({e.eid.uid for e in kept}) == 6
    assert [original_uid(e) for e in kept[2:]] == ["b/2/0/0/", "b/2/1/0/"] * 2
    assert scores(kept[2:4]) == scores(kept[:2])


def test_the_deviation_of_the_batch_keeps_hard_and_easy_groups_comparable() -> None:
    exps = [*group([0.0, 1.0], 1), *group([0.0, 3.0], 2)]
    kept, _ = GRPOGroupedAdvantage(epsilon=0.0, std_cal_level="batch").process(exps)
    std = torch.tensor([0.0, 1.0, 0.0, 3.0]).std().item()
    assert scores(kept) == pytest.approx([-0.5 / std, 0.5 / std, -1.5 / std, 1.5 / std])


def test_penalized_rewards_give_advantages_that_sum_to_zero_and_the_references_do_not() -> None:
    exps = liked([1.0, 0.0, 1.0, 1.0], [-1.0, -2.0, -3.0, -0.5])
    kept, _ = GRPOGroupedAdvantage(rank_penalty=0.25).process(exps)
    assert sum(scores(kept)) == pytest.approx(0.0, abs=1e-5)
    raw, _ = GRPOGroupedAdvantage(rank_penalty=0.25, rank_scores="raw").process(exps)
    assert abs(sum(scores(raw))) > 0.1


def test_what_is_read_and_how_much_at_once_follows_from_the_options() -> None:
    assert GRPOGroupedAdvantage.families_for() == ("light",)
    assert GRPOGroupedAdvantage.families_for(rank_penalty=0.1) == ("light", "tokens")
    assert GRPOGroupedAdvantage.unit_for() == "group"
    assert GRPOGroupedAdvantage.unit_for(std_cal_level="batch") == "batch"
    assert GRPOGroupedAdvantage.unit_for(duplicate_experiences=True) == "batch"
    assert StepWiseGRPOAdvantageFn.unit_for(std_cal_level="batch") == "batch"
    assert GiGPOAdvantageFn.unit_for(anchor_scope="batch") == "batch"


def test_opmd_and_asymre_differ_by_the_shift() -> None:
    exps = group([0.0, 1.0])
    OPMDGroupAdvantage().process(exps)
    assert scores(exps) == [-0.5, 0.5]
    _, metrics = ASYMREGroupAdvantage(baseline_shift=-0.25).process(exps)
    assert scores(exps) == [-0.25, 0.75]
    assert metrics["group_advantages/group_baseline/mean"] == 0.25
    assert metrics["group_advantages/reward_mean/mean"] == 0.5


def test_reinforce_is_the_reward() -> None:
    exps = group([0.25, -1.0])
    REINFORCEGroupAdvantage().process(exps)
    assert scores(exps) == [0.25, -1.0]


def test_rec_divides_by_the_deviation_of_the_population() -> None:
    exps = group([0.0, 2.0])
    RECGroupedAdvantage(std_normalize=True, epsilon=0.0).process(exps)
    assert scores(exps) == [-1.0, 1.0]
    RECGroupedAdvantage().process([rollout(reward=3.0)])


def test_rec_drops_random_bad_answers_until_the_numbers_are_equal() -> None:
    exps = group([1.0, 0.0, 0.0, 0.0])
    kept, metrics = RECGroupedAdvantage(drop="balance").process(exps)
    assert sorted(scores(kept)) == [-0.5, 0.0, 0.0, 0.5]
    assert metrics["group_advantages/drop_balance/mean"] == 0.5
    again = group([1.0, 0.0, 0.0, 0.0])
    RECGroupedAdvantage(drop="balance").process(again)
    assert scores(again) == scores(exps)


def test_step_wise_skips_whole_tasks() -> None:
    exps = [
        rollout(task, run, float(run * task), step=step)
        for task in (0, 1)
        for run in range(2)
        for step in range(2)
    ]
    kept, metrics = StepWiseGRPOAdvantageFn(std_threshold=0.0, epsilon=0.0).process(exps)
    assert scores(kept) == pytest.approx([-HALF, -HALF, HALF, HALF])
    assert metrics["experience_count"] == metrics["filtered_count"] == 4
    assert metrics["skipped_group_ratio"] == 0.5


@pytest.mark.parametrize(("single_member", "score"), [("raw", 1.0), ("zero", 0.0)])
def test_an_only_run_is_scored_by_its_reward_or_not_at_all(
    single_member: Any, score: float
) -> None:
    scoring = StepWiseGRPOAdvantageFn(epsilon=0.0, single_member=single_member)
    kept, _ = scoring.process([rollout(0, 0, 1.0)])
    assert scores(kept) == [score]


def visit(
    run: int, step: int, state: str, reward: float | None = None, task: int = 0, **info: Any
) -> Experience:
    """Return a step that was taken in ``state``."""
    return rollout(task, run, reward, step=step, info={"env_state_hash": state, **info})


def test_gigpo_adds_the_comparison_of_steps_taken_in_one_state() -> None:
    exps = [visit(0, 0, "s"), visit(0, 1, "t", 1.0), visit(1, 0, "s", 0.0), visit(2, 0, "u", 0.5)]
    _, metrics = GiGPOAdvantageFn(gamma=0.5, epsilon=0.0, omega=2.0).process(exps)
    # runs: 1, 0, 0.5; state s: returns 0.5 and 0, hence +0.25 and -0.25
    assert scores(exps) == pytest.approx([0.5 + 0.5, 0.5, -0.5 - 0.5, 0.0])
    assert metrics["gigpo/anchor_groups_total"] == 3
    assert metrics["gigpo/anchor_groups_size_gt1"] == 1


def test_gigpo_anchors_stay_within_a_task_unless_asked() -> None:
    exps = [visit(0, 0, "s", 1.0, task=0), visit(0, 0, "s", 0.0, task=1)]
    _, metrics = GiGPOAdvantageFn().process(exps)
    assert metrics["gigpo/anchor_groups_size_gt1"] == 0
    _, metrics = GiGPOAdvantageFn(anchor_scope="batch").process(exps)
    assert metrics["gigpo/anchor_groups_size_gt1"] == 1


def test_gigpo_takes_step_rewards_where_there_are_some() -> None:
    exps = [
        visit(0, 0, "a", step_reward=1.0),
        visit(0, 1, "b", step_reward=2.0),
        visit(1, 0, "c", step_reward=1.0),
    ]
    GiGPOAdvantageFn(epsilon=0.0).process(exps)
    assert scores(exps) == [1.0, 1.0, -1.0]


@pytest.mark.parametrize("reward", [float("nan"), None, "a lot", [1.0]])
def test_gigpo_names_a_broken_step_reward(reward: Any) -> None:
    said = rf"b/0/0/0/.*step_reward.* is {re.escape(str(reward))}"
    with pytest.raises(InvalidExperienceError, match=said):
        GiGPOAdvantageFn().process([visit(0, 0, "a", step_reward=reward)])


@pytest.mark.parametrize("name", PIPELINE)
def test_nothing_in_nothing_out(name: str) -> None:
    kept, _ = ADVANTAGE_FN.get(name)()([])
    assert kept == []
    assert not ADVANTAGE_FN.get(name).compute_in_trainer()


@pytest.mark.parametrize("name", PIPELINE)
def test_an_experience_that_cannot_be_scored_is_named(name: str) -> None:
    with pytest.raises(InvalidExperienceError, match=r"b/0/1/0/.*reward"):
        ADVANTAGE_FN.get(name)()([rollout(0, 0, 1.0), rollout(0, 1, None)])


def test_misspelt_arguments_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="did you mean 'std_threshold'"):
        GRPOGroupedAdvantage(std_treshold=0.0)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match="did you mean 'omega'"):
        GiGPOAdvantageFn(omga=0.0)  # type: ignore[call-arg]


class Rewarded(PipelineAdvantage):
    """Looks at each experience alone."""

    @override
    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        self.check(exps)
        return exps, {}


def test_a_function_of_ones_own_names_what_it_cannot_score() -> None:
    good, bad = rollout(0, 0, 1.0), rollout(0, 1)
    bad.reward = float("nan")
    (problem,) = Rewarded().problems([good, bad])
    assert (problem.together, problem.culprit, problem.text) == ([bad], bad, "reward is nan")
    with pytest.raises(InvalidExperienceError) as refused:
        Rewarded()([good, bad])
    told = f"{bad.eid.uid}: Rewarded cannot use it, its reward is nan"
    assert str(refused.value) == told
    assert Rewarded()([good]) == ([good], {})
