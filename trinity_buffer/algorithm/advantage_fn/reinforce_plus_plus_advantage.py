"""REINFORCE++ (arXiv:2501.03262): discounted returns, whitened over the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, TrainerAdvantage
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.advantage_fn.token_scores import discounted_returns, whitened
from trinity_buffer.algorithm.arguments import require
from trinity_buffer.algorithm.functional import masked_whiten
from trinity_buffer.algorithm.group_scores import Over, check_over


@ADVANTAGE_FN.register_module("reinforceplusplus")
class REINFORCEPLUSPLUSAdvantageFn(TrainerAdvantage):
    """Whitened discounted returns of ``token_level_rewards`` on action tokens.

    Args:
        gamma: discount of a time step, which is an action token.
        mask_aware: time runs over action tokens alone; False takes every column for a time step, as
            the reference does.
        over: what counts once when advantages are whitened: ``"runs"``, where the batch says which
            rows are one (``run_index``), or each of their ``"rows"``, as in the reference.
    """

    reference_args: ClassVar[Mapping[str, Any]] = {"mask_aware": False, "over": "rows"}

    def __init__(
        self, gamma: float = 1.0, *, mask_aware: bool = True, over: Over = "runs", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.over = check_over(over)
        require(0 <= gamma <= 1, "gamma", gamma, "lie between 0 and 1")
        self.gamma = gamma
        self.mask_aware = mask_aware

    @override
    def compute(self, rows: Rows) -> Result:
        """Return whitened returns, and the returns."""
        rewards = rows.raw("token_level_rewards")
        if not self.mask_aware:
            returns = discounted_returns(rewards, self.gamma)
            return Result(masked_whiten(returns, rows.mask).where(rows.mask, 0.0), returns)
        returns = discounted_returns(rewards, self.gamma, rows.mask)
        return Result(whitened(returns, rows, over=self.over).where(rows.mask, 0.0), returns)
