"""REINFORCE leave-one-out (arXiv:2402.14740): each run is compared with the mean of the others."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, GroupScoredAdvantage
from trinity_buffer.algorithm.group_scores import Rewards, ScoredGroups, statistics


@ADVANTAGE_FN.register_module("rloo")
class RLOOAdvantageFn(GroupScoredAdvantage):
    """``(reward - mean) n / (n - 1)`` of the rows' summed token-level rewards; raw if n = 1."""

    @override
    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return the distance of each run from the mean of the others."""
        size, mean, _ = statistics(rewards, weights)
        centred = rewards - mean[:, np.newaxis]
        return ScoredGroups(scores=rewards if size == 1 else centred * (size / (size - 1)))
