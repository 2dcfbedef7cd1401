"""AsymRE (arXiv:2506.20520): a baseline below the mean, for data that are off-policy."""

from __future__ import annotations

import numpy as np

from trinity_buffer.algorithm.advantage_fn import advantage_fn
from trinity_buffer.algorithm.arguments import configured
from trinity_buffer.algorithm.group_scores import Rewards, ScoredGroups, statistics


@configured
class _ShiftedMean(advantage_fn.AdvantageFn):
    """The distance from the mean of a group plus a constant.

    Args:
        baseline_shift: added to the mean; negative values keep average answers attractive.
    """

    baseline_shift: float = -0.1

    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return the distance from the shifted mean; from 0 for a group of one (the reference)."""
        size, mean, _ = statistics(rewards, weights)
        shifted = np.zeros_like(mean) if size == 1 else mean + self.baseline_shift
        return advantage_fn.less_baseline(rewards, shifted, weights)


@advantage_fn.ADVANTAGE_FN.register_module("asymre")
@configured
class ASYMREGroupAdvantage(_ShiftedMean, advantage_fn.RewardAdvantage):
    """``reward - (mean + baseline_shift)`` on every action token of a group."""

    reference_args = {"over": "rows"}


@advantage_fn.ADVANTAGE_FN.register_module("asymre_verl")
@configured
class ASYMREAdvantageFn(_ShiftedMean, advantage_fn.GroupScoredAdvantage):
    """``reward - (mean + baseline_shift)`` of the rows' summed token-level rewards."""
