"""ReMax (arXiv:2310.10505): the return less the reward of the greedy answer."""

from __future__ import annotations

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, TrainerAdvantage
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.advantage_fn.token_scores import discounted_returns


@ADVANTAGE_FN.register_module("remax")
class REMAXAdvantageFn(TrainerAdvantage):
    """``returns - reward_baselines`` on action tokens; needs ``reward_baselines``, one per row."""

    def compute(self, rows: Rows) -> Result:
        """Return the rewards that are still to come, less the baseline."""
        returns = discounted_returns(rows["token_level_rewards"], 1.0)
        baselines = rows.per_row("reward_baselines").to(returns.dtype).unsqueeze(-1)
        return Result((returns - baselines.where(rows.mask, 0.0)), returns)
