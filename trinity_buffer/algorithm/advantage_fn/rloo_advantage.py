"""REINFORCE leave-one-out (arXiv:2402.14740): each run is compared with the mean of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, TrainerAdvantage
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows, broadcast, scored_rows
from trinity_buffer.algorithm.group_scores import Over, Rewards, check_over, means, size_of


@ADVANTAGE_FN.register_module("rloo")
class RLOOAdvantageFn(TrainerAdvantage):
    """``(reward - mean) n / (n - 1)`` of the rows' summed token-level rewards; raw if n = 1.

    Args:
        over: what counts once in the statistics: ``"runs"``, where the batch says which rows are
            one (``run_index``), or each of their ``"rows"``, as in the reference.
    """

    reference_args: ClassVar[Mapping[str, Any]] = {"over": "rows"}

    def __init__(self, *, over: Over = "runs", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.over = check_over(over)

    def score(self, rewards: Rewards, weights: Rewards | None = None) -> Rewards:
        """Return the scores of one group."""
        size = size_of(rewards, weights)
        mean = means(rewards, weights)
        return rewards if size == 1 else (rewards - mean) * (size / (size - 1))

    @override
    def compute(self, rows: Rows) -> Result:
        """Return the score of each row on its action tokens."""
        like = rows.raw("token_level_rewards")
        advantages = broadcast(scored_rows(rows, self.score, self.over), rows, like)
        return Result(advantages, advantages.clone())
