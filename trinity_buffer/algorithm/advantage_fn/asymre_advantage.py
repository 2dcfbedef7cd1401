"""AsymRE (arXiv:2506.20520): a baseline below the mean, for data that are off-policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from trinity_buffer.algorithm import group_scores
from trinity_buffer.algorithm.advantage_fn.advantage_fn import (
    ADVANTAGE_FN,
    RewardAdvantage,
    TrainerAdvantage,
)
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows, broadcast, scored_rows
from trinity_buffer.algorithm.group_scores import ScoredGroups


def shifted_baseline(
    rewards: group_scores.Rewards, shift: float, weights: group_scores.Rewards | None = None
) -> float:
    """Return the mean plus ``shift``; 0 for a group of one, as the reference does."""
    alone = group_scores.size_of(rewards, weights) == 1
    return 0.0 if alone else float(group_scores.means(rewards, weights)) + shift


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
        mean = group_scores.means(rewards, weights)
        alone = group_scores.size_of(rewards, weights) == 1
        reference = np.zeros_like(mean) if alone else mean + self.baseline_shift
        metrics = {"group_baseline": reference, "reward_mean": mean}
        return ScoredGroups(scores=rewards - reference[:, np.newaxis], metrics=metrics)


@ADVANTAGE_FN.register_module("asymre_verl")
class ASYMREAdvantageFn(TrainerAdvantage):
    """``reward - (mean + baseline_shift)`` of the rows' summed token-level rewards.

    Args:
        baseline_shift: added to the mean.
        over: what counts once in the statistics: ``"runs"``, where the batch says which rows are
            one (``run_index``), or each of their ``"rows"``, as in the reference.
    """

    reference_args: ClassVar[Mapping[str, Any]] = {"over": "rows"}

    def __init__(
        self, baseline_shift: float = -0.1, *, over: group_scores.Over = "runs", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.baseline_shift = baseline_shift
        self.over = group_scores.check_over(over)

    def score(
        self, rewards: group_scores.Rewards, weights: group_scores.Rewards | None = None
    ) -> group_scores.Rewards:
        """Return the scores of one group."""
        return rewards - shifted_baseline(rewards, self.baseline_shift, weights)

    @override
    def compute(self, rows: Rows) -> Result:
        """Return the score of each row on its action tokens."""
        like = rows.raw("token_level_rewards")
        advantages = broadcast(scored_rows(rows, self.score, self.over), rows, like)
        return Result(advantages, advantages.clone())
