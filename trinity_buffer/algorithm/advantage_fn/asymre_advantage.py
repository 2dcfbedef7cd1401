"""AsymRE (arXiv:2506.20520): a baseline below the mean, for data that are off-policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from trinity_buffer.algorithm import group_scores
from trinity_buffer.algorithm.advantage_fn.advantage_fn import (
    ADVANTAGE_FN,
    GroupScoredAdvantage,
    RewardAdvantage,
)
from trinity_buffer.algorithm.group_scores import ScoredGroups


def shifted_baselines(
    rewards: group_scores.Rewards, shift: float, weights: group_scores.Rewards | None = None
) -> group_scores.Rewards:
    """Return the mean plus ``shift`` of each group of ``rewards`` ``(..., G)``, shape ``(...)``.

    0 for groups of one, as the reference does.
    """
    mean = group_scores.means(rewards, weights)
    alone = group_scores.size_of(rewards, weights) == 1
    return np.zeros_like(mean) if alone else mean + shift


@ADVANTAGE_FN.register_module("asymre")
class ASYMREGroupAdvantage(RewardAdvantage):
    """``reward - (mean + baseline_shift)`` on every action token of a group.

    Args:
        baseline_shift: added to the mean; negative values keep average answers attractive.
    """

    reference_args: ClassVar[Mapping[str, Any]] = {"over": "rows"}

    def __init__(self, baseline_shift: float = -0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.baseline_shift = baseline_shift

    @override
    def score_groups(
        self, rewards: group_scores.Rewards, weights: group_scores.Rewards | None = None
    ) -> ScoredGroups:
        """Return the distance from the shifted mean."""
        reference = shifted_baselines(rewards, self.baseline_shift, weights)
        metrics = {"group_baseline": reference, "reward_mean": group_scores.means(rewards, weights)}
        return ScoredGroups(scores=rewards - reference[:, np.newaxis], metrics=metrics)


@ADVANTAGE_FN.register_module("asymre_verl")
class ASYMREAdvantageFn(GroupScoredAdvantage):
    """``reward - (mean + baseline_shift)`` of the rows' summed token-level rewards.

    Args:
        baseline_shift: added to the mean.
        kwargs: of `GroupScoredAdvantage`.
    """

    def __init__(self, baseline_shift: float = -0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.baseline_shift = baseline_shift

    @override
    def score(
        self, rewards: group_scores.Rewards, weights: group_scores.Rewards | None = None
    ) -> group_scores.Rewards:
        """Return the scores of one group."""
        return rewards - shifted_baselines(rewards, self.baseline_shift, weights)
