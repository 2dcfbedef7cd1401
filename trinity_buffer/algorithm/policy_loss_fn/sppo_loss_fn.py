"""sPPO: a policy gradient inside a trust region, simpler than PPO (arXiv:2108.05828)."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import (
    aggregate_loss,
    aggregation_mode,
    bounded_exp,
    inside,
    keep,
    masked_mean,
)
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import (
    POLICY_LOSS_FN,
    LossAndMetrics,
    PolicyLossFn,
    detached,
)
from trinity_buffer.errors import InvalidArgumentError


@POLICY_LOSS_FN.register_module("sppo")
class sPPOPolicyLossFn(PolicyLossFn):  # noqa: N801 - the documented name
    """``-A (logprob - old_logprob)`` where the ratio is within ``[1 / (1 + e), 1 + e]``, else 0.

    Args:
        backend: whose names callers use.
        epsilon: half-width ``e`` of the region, not negative.
        loss_agg_mode: see `aggregate_loss`.
    """

    def __init__(
        self, backend: str = "verl", epsilon: float = 0.3, loss_agg_mode: str = "token-mean"
    ) -> None:
        super().__init__(backend)
        if not epsilon >= 0.0:
            raise InvalidArgumentError(f"epsilon must not be negative, it is {epsilon}")
        self.epsilon = epsilon
        self.loss_agg_mode = aggregation_mode(loss_agg_mode)

    @override
    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        *,
        layout: BatchLayout | None = None,
    ) -> LossAndMetrics:
        """Return the loss; inputs ``[B, T]``, or ``[T]`` packed."""
        difference = keep(action_mask, logprob) - keep(action_mask, old_logprob)
        ratio = bounded_exp(difference.detach())
        within = inside(ratio, 1.0 / (1.0 + self.epsilon), 1.0 + self.epsilon).to(ratio)
        losses = -keep(action_mask, advantages) * difference * within
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode, layout=layout)
        clipped = masked_mean(1.0 - within, action_mask)
        return loss, detached({"pg_clipfrac": clipped, "pg_loss": loss})
