"""REINFORCE (Williams, 1992) without a baseline."""

from __future__ import annotations

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, RewardAdvantage
from trinity_buffer.algorithm.group_scores import Rewards, ScoredGroups, statistics


@ADVANTAGE_FN.register_module("reinforce")
class REINFORCEGroupAdvantage(RewardAdvantage):
    """The reward on every action token."""

    reference_args = {"on_unknown": "ignore", "over": "rows"}

    @override
    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return the rewards."""
        mean = statistics(rewards, weights).mean
        return ScoredGroups(scores=rewards, metrics={"reward_mean": mean})
