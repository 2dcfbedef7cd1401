"""AsymRE (arXiv:2506.20520): a baseline below the mean, for data that are off-policy."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from trinity_buffer.algorithm import group_scores
from trinity_buffer.algorithm.advantage_fn.advantage_fn import (
    ADVANTAGE_FN,
    GroupAdvantage,
    TrainerAdvantage,
)
from trinity_buffer.algorithm.advantage_fn.group_rows import broadcast, scored_rows
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.annotating import annotate, reward_of
from trinity_buffer.experience import Experience


def shifted_baseline(rewards: group_scores.Rewards, shift: float) -> float:
    """Return the mean plus ``shift``; 0 for a group of one, as the reference does."""
    return 0.0 if len(rewards) == 1 else float(rewards.mean()) + shift


@ADVANTAGE_FN.register_module("asymre")
class ASYMREGroupAdvantage(GroupAdvantage):
    """``reward - (mean + baseline_shift)`` on every action token of a group.

    Args:
        baseline_shift: added to the mean; negative values keep average answers attractive.
    """

    def __init__(self, baseline_shift: float = -0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.baseline_shift = baseline_shift

    @override
    def calculate_group_advantage(
        self, group_id: str, exps: list[Experience]
    ) -> tuple[list[Experience], dict[str, Any]]:
        """Score one group with its distance from the shifted mean."""
        rewards = group_scores.as_rewards([reward_of(e) for e in exps])
        reference = shifted_baseline(rewards, self.baseline_shift)
        for experience, reward in zip(exps, rewards, strict=True):
            annotate(experience, float(reward) - reference)
        return exps, {"group_baseline": reference, "reward_mean": float(rewards.mean())}


@ADVANTAGE_FN.register_module("asymre_verl")
class ASYMREAdvantageFn(TrainerAdvantage):
    """``reward - (mean + baseline_shift)`` of the rows' summed token-level rewards.

    Args:
        baseline_shift: added to the mean.
    """

    def __init__(self, baseline_shift: float = -0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.baseline_shift = baseline_shift

    def score(self, rewards: group_scores.Rewards) -> group_scores.Rewards:
        """Return the scores of one group."""
        return rewards - shifted_baseline(rewards, self.baseline_shift)

    @override
    def compute(self, rows: Rows) -> Result:
        """Return the score of each row on its action tokens."""
        like = rows.raw("token_level_rewards")
        advantages = broadcast(scored_rows(rows, self.score), rows, like)
        return Result(advantages, advantages.clone())
