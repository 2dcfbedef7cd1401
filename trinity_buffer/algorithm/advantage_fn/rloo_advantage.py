"""REINFORCE leave-one-out (arXiv:2402.14740): each run is compared with the mean of the others."""

from __future__ import annotations

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, GroupScoredAdvantage
from trinity_buffer.algorithm.group_scores import Rewards, means, size_of


@ADVANTAGE_FN.register_module("rloo")
class RLOOAdvantageFn(GroupScoredAdvantage):
    """``(reward - mean) n / (n - 1)`` of the rows' summed token-level rewards; raw if n = 1."""

    @override
    def score(self, rewards: Rewards, weights: Rewards | None = None) -> Rewards:
        """Return the scores of one group."""
        size = size_of(rewards, weights)
        mean = means(rewards, weights)
        return rewards if size == 1 else (rewards - mean) * (size / (size - 1))
