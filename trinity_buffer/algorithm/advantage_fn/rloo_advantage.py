"""REINFORCE leave-one-out (arXiv:2402.14740): each run is compared with the mean of the others."""

from __future__ import annotations

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, TrainerAdvantage
from trinity_buffer.algorithm.advantage_fn.group_rows import broadcast, scored_rows
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.group_scores import Rewards


@ADVANTAGE_FN.register_module("rloo")
class RLOOAdvantageFn(TrainerAdvantage):
    """``(reward - mean) n / (n - 1)`` of the rows' summed token-level rewards; raw if n = 1."""

    def score(self, rewards: Rewards) -> Rewards:
        """Return the scores of one group."""
        size = len(rewards)
        return rewards if size == 1 else (rewards - rewards.mean()) * (size / (size - 1))

    @override
    def compute(self, rows: Rows) -> Result:
        """Return the score of each row on its action tokens."""
        like = rows.raw("token_level_rewards")
        advantages = broadcast(scored_rows(rows, self.score), rows, like)
        return Result(advantages, advantages.clone())
