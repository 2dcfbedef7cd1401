"""REINFORCE++ (arXiv:2501.03262): discounted returns, whitened over the whole step."""

from __future__ import annotations

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN
from trinity_buffer.algorithm.advantage_fn.ppo_advantage import WhitenedAdvantage
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.advantage_fn.token_scores import discounted_returns, whitened
from trinity_buffer.algorithm.functional import masked_whiten


@ADVANTAGE_FN.register_module("reinforceplusplus")
class REINFORCEPLUSPLUSAdvantageFn(WhitenedAdvantage):
    """Whitened discounted returns of ``token_level_rewards`` on action tokens."""

    @override
    def compute(self, rows: Rows) -> Result:
        """Return whitened returns, and the returns."""
        rewards = rows.raw("token_level_rewards")
        if not self.mask_aware:
            returns = discounted_returns(rewards, self.gamma)
            return Result(masked_whiten(returns, rows.mask).where(rows.mask, 0.0), returns)
        returns = discounted_returns(rewards, self.gamma, rows.mask)
        return Result(whitened(returns, rows, over=self.over).where(rows.mask, 0.0), returns)
