"""Generalized advantage estimation (arXiv:1506.02438), for PPO with a critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, TrainerAdvantage
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.advantage_fn.token_scores import generalized_advantages, whitened
from trinity_buffer.algorithm.arguments import require
from trinity_buffer.algorithm.functional import masked_whiten
from trinity_buffer.algorithm.group_scores import Over, check_over


@ADVANTAGE_FN.register_module("ppo")
class PPOAdvantageFn(TrainerAdvantage):
    """Whitened generalized advantages of ``values`` and ``token_level_rewards``.

    Returns are the unwhitened advantages plus the values.

    Args:
        gamma: discount of a time step, which is an action token.
        lam: decay of the estimator.
        mask_aware: time runs over action tokens alone, and advantages are 0 elsewhere. False takes
            every column for a time step and leaves whitened numbers outside the mask, as the
            reference does.
        over: what counts once when advantages are whitened: ``"runs"``, where the batch says which
            rows are one (``run_index``), or each of their ``"rows"``, as in the reference.
    """

    tensors: ClassVar[tuple[str, ...]] = ("values",)
    reference_args: ClassVar[Mapping[str, Any]] = {"mask_aware": False, "over": "rows"}

    def __init__(
        self,
        gamma: float = 1.0,
        lam: float = 1.0,
        *,
        mask_aware: bool = True,
        over: Over = "runs",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.over = check_over(over)
        require(0 <= gamma <= 1, "gamma", gamma, "lie between 0 and 1")
        require(0 <= lam <= 1, "lam", lam, "lie between 0 and 1")
        self.gamma = gamma
        self.lam = lam
        self.mask_aware = mask_aware

    @override
    def compute(self, rows: Rows) -> Result:
        """Return whitened advantages, and returns from the unwhitened ones."""
        rewards = rows.raw("token_level_rewards")
        if not self.mask_aware:
            values = rows.raw("values")
            raw = generalized_advantages(rewards, values, self.gamma, self.lam)
            # As the reference: whitened outside the mask too.
            return Result(masked_whiten(raw, rows.mask), raw + values)
        values = rows["values"]
        raw = generalized_advantages(rewards, values, self.gamma, self.lam, rows.mask)
        # The critic learns unwhitened returns: their scale is that of the rewards.
        return Result(whitened(raw, rows, over=self.over).where(rows.mask, 0.0), raw + values)
