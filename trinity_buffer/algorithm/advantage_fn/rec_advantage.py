"""Advantages of group-relative REINFORCE (REC, arXiv:2509.24203)."""

from __future__ import annotations

import random
from dataclasses import KW_ONLY
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trinity_buffer.algorithm import group_scores
from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, GroupAdvantage
from trinity_buffer.algorithm.annotating import Scored, annotate, annotate_group, reward_of, runs_of
from trinity_buffer.algorithm.arguments import NOT_NEGATIVE, checked, configured
from trinity_buffer.algorithm.group_scores import Rewards, RewardScorer, ScoredGroups
from trinity_buffer.experience import Experience


@ADVANTAGE_FN.register_module("rec")
@configured
class RECGroupedAdvantage(group_scores.Deviation, GroupAdvantage):
    """``reward - mean``; on request divided by the deviation, or balanced.

    Args:
        epsilon: added to the deviation.
        std_normalize: divide by the population deviation.
        drop: ``"balance"``: where answers below the mean outnumber the others, random ones of them
            get advantage 0 and leave the statistics, until the numbers are equal. None drops
            nothing.
        std_floor: deviations below this share of the largest reward are 0, and so are the
            normalized advantages.
        seed: of the choice of answers that are dropped; None draws from the global generator.
    """

    reference_args = {"std_floor": 0.0, "over": "rows"}
    ddof = 0

    epsilon: float = checked(1e-6, NOT_NEGATIVE)
    std_normalize: bool = False
    drop: Literal["balance", None] = None
    _: KW_ONLY
    std_floor: float = checked(group_scores.RELATIVE_FLOOR, NOT_NEGATIVE)
    seed: int | None = 0

    @override
    def from_rewards(self) -> RewardScorer | None:
        """Return `score_groups`, if no lots are drawn, which takes the name of the group."""
        return super().from_rewards() if self.drop is None else None

    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return the scores of groups of which no run is dropped."""
        mean, std = self.moments(rewards, weights)
        scores = rewards - mean[:, np.newaxis]
        if self.std_normalize:
            scores = group_scores.scaled(scores, std[:, np.newaxis], self.epsilon)
        metrics = {"drop_balance": np.zeros_like(mean), "reward_mean": mean, "reward_std": std}
        return ScoredGroups(scores=scores, metrics=metrics)

    @override
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> Scored:
        """Score one group; members that are dropped are returned, with advantage 0."""
        rewards = np.array([reward_of(e) for e in exps])
        runs = runs_of(exps, self.over)
        stay = self._staying(group_id, group_scores.run_means(rewards, runs))
        counts = stay if runs is None else stay[runs]
        left = [e for e, stays in zip(exps, counts.tolist(), strict=True) if stays]
        _, metrics = annotate_group(left, rewards[counts], self.score_groups, self.over)
        for experience in (e for e, stays in zip(exps, counts.tolist(), strict=True) if not stays):
            annotate(experience, 0.0)
        return exps, metrics | {"drop_balance": 1.0 - float(stay.mean())}

    def _staying(self, group_id: str, rewards: Rewards) -> NDArray[np.bool_]:
        """Return which members stay: all, or as many below the mean as not below it."""
        stay = np.ones(len(rewards), dtype=np.bool_)
        # Rounding may put the mean of equal rewards a little above them.
        slack = group_scores.RELATIVE_FLOOR * float(np.abs(rewards).max())
        below = np.flatnonzero(rewards < rewards.mean() - slack)
        # So many must go until as many are below the mean as not.
        surplus = 2 * len(below) - len(rewards)
        if self.drop == "balance" and surplus > 0:
            draw = random if self.seed is None else random.Random(f"{self.seed}/{group_id}")
            stay[draw.sample(below.tolist(), surplus)] = False
        return stay
