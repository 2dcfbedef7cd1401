from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_buffer.algorithm import group_scores
from trinity_buffer.errors import InvalidArgumentError


def scores(values: list[float], **options: Any) -> group_scores.Rewards:
    of_group = group_scores.NormalizedScores(**options).score_groups(np.array([values], float))
    assert of_group.scores is not None
    first: group_scores.Rewards = of_group.scores[0]
    return first


rewards = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=12)


def test_scores_are_the_distance_from_the_mean_in_sample_deviations() -> None:
    found = scores([1.0, 2.0, 3.0], epsilon=0.0)
    assert found.tolist() == [-1.0, 0.0, 1.0]


def test_ddof_0_takes_the_deviation_of_the_population() -> None:
    found = scores([0.0, 2.0], epsilon=0.0, ddof=0)
    assert found.tolist() == [-1.0, 1.0]


def test_epsilon_is_added_to_the_deviation() -> None:
    found = scores([0.0, 2.0], epsilon=1.0, ddof=0)
    assert found.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 1e-12])
@pytest.mark.parametrize("value", [0.1, 0.3, -7.7, 1e6 + 0.1, 1e-9])
def test_seven_equal_rewards_are_equal_whatever_their_binary_form(
    value: float, epsilon: float
) -> None:
    assert not scores([value] * 7, epsilon=epsilon).any()
    assert group_scores.statistics([value] * 7).variance == 0.0


def test_without_a_floor_equal_rewards_are_divided_by_rounding_noise() -> None:
    noisy = [0.1, 0.1, 0.30000000000000004 - 0.2]
    assert np.abs(scores(noisy, epsilon=0.0, std_floor=0.0)).max() > 0.1
    assert not scores(noisy, epsilon=0.0).any()


def test_the_floor_is_relative_small_differences_of_small_rewards_count() -> None:
    assert group_scores.statistics([1e-9, 2e-9]).variance > 0
    assert group_scores.statistics([1.0, 1.0 + 1e-9]).variance == 0.0


def test_a_group_of_one_scores_its_reward_or_nothing() -> None:
    assert scores([3.0], epsilon=0.0).tolist() == [3.0]
    found = scores([3.0], epsilon=0.0, single_member="zero")
    assert found.tolist() == [0.0]


def test_the_logavgexp_baseline_lies_between_mean_and_maximum() -> None:
    assert group_scores.baseline([0.0, 1.0], "logavgexp", 1.0) == pytest.approx(
        np.log((1 + np.e) / 2)
    )
    assert group_scores.baseline([0.0, 1.0], "logavgexp", 1e-3) == pytest.approx(1.0, abs=1e-3)
    assert group_scores.baseline([0.0, 1.0], "mean") == 0.5
    assert group_scores.baseline([5.0], "mean") == 0.0


def test_likelihood_ranks_give_the_likeliest_the_highest_and_ties_by_order() -> None:
    assert group_scores.likelihood_ranks([-1.0, -3.0, -2.0, -2.0]).tolist() == [0.75, 0, 0.25, 0.5]


@given(rewards)
def test_scores_sum_to_zero(values: list[float]) -> None:
    found = scores(values, epsilon=1e-6)
    assert found.sum() == pytest.approx(0.0, abs=1e-6)


@given(rewards, st.randoms(use_true_random=False))
def test_the_order_of_a_group_does_not_matter(values: list[float], random: random.Random) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    whole = scores(values, epsilon=1e-6)
    shuffled = scores([values[i] for i in order], epsilon=1e-6)
    assert shuffled == pytest.approx(whole[order], abs=1e-6)


@given(
    st.lists(st.integers(-20, 20), min_size=2, max_size=12), st.floats(0.1, 10), st.floats(-10, 10)
)
def test_scores_do_not_change_with_scale_and_offset_of_the_rewards(
    values: list[float], scale: float, offset: float
) -> None:
    whole = scores(values, epsilon=0.0)
    moved = scores([scale * v + offset for v in values], epsilon=0.0)
    assert moved == pytest.approx(whole, abs=1e-9)


@pytest.mark.parametrize(
    ("epsilon", "ddof", "std_floor", "single", "named"),
    [
        (-1.0, 1, 0.0, "raw", "epsilon"),
        (float("nan"), 1, 0.0, "raw", "epsilon"),
        (0.0, 2, 0.0, "raw", "ddof"),
        (0.0, 1, -1.0, "raw", "std_floor"),
        (0.0, 1, 0.0, "none", "single_member"),
    ],
)
def test_a_choice_that_cannot_be_right_is_named(
    epsilon: Any, ddof: Any, std_floor: Any, single: Any, named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        group_scores.DeviationOptions(
            epsilon=epsilon, ddof=ddof, std_floor=std_floor, single_member=single
        )
