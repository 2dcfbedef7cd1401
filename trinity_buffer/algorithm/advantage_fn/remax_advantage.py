"""ReMax (arXiv:2310.10505): the return less the reward of the greedy answer."""

from __future__ import annotations

from dataclasses import field

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, TrainerAdvantage
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.advantage_fn.token_scores import discounted_returns
from trinity_buffer.algorithm.arguments import configured


@ADVANTAGE_FN.register_module("remax")
@configured
class REMAXAdvantageFn(TrainerAdvantage):
    """``returns - reward_baselines`` on action tokens; needs ``reward_baselines``, one per row.

    Args:
        mask_aware: returns and advantages are 0 outside the mask, and a reward that falls on a
            token of the environment counts. False drops such a reward and leaves returns at earlier
            masked tokens, as the reference does.
    """

    tensors = ("reward_baselines",)
    reference_args = {"mask_aware": False}

    mask_aware: bool = field(default=True, kw_only=True)

    @override
    def compute(self, rows: Rows) -> Result:
        """Return the rewards that are still to come, less the baseline."""
        if self.mask_aware:
            returns = discounted_returns(rows.raw("token_level_rewards"), 1.0, rows.mask)
        else:
            returns = discounted_returns(rows["token_level_rewards"], 1.0)
        # One greedy answer per row, and so one baseline for all of its tokens.
        baselines = rows.column("reward_baselines").to(returns.dtype).unsqueeze(-1)
        return Result(returns - baselines.where(rows.mask, 0.0), returns)
