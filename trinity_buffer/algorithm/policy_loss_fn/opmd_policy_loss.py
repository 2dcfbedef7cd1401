"""OPMD: online policy mirror descent; no ratio (after Kimi k1.5, arXiv:2501.12599)."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import aggregate_loss, aggregation_mode, keep
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import (
    POLICY_LOSS_FN,
    LossAndMetrics,
    PolicyLossFn,
    detached,
)
from trinity_buffer.errors import InvalidArgumentError


@POLICY_LOSS_FN.register_module("opmd")
class OPMDPolicyLossFn(PolicyLossFn):
    """``-A logprob / (1 + tau)``.

    Args:
        backend: whose names callers use.
        tau: temperature; only scales the gradient.
        loss_agg_mode: see `aggregate_loss`.
    """

    def __init__(
        self, backend: str = "verl", tau: float = 1.0, loss_agg_mode: str = "token-mean"
    ) -> None:
        super().__init__(backend)
        if not tau > -1.0:
            raise InvalidArgumentError(f"tau must be greater than -1, it is {tau}")
        self.tau = tau
        self.loss_agg_mode = aggregation_mode(loss_agg_mode)

    @override
    def __call__(
        self,
        logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        *,
        layout: BatchLayout | None = None,
    ) -> LossAndMetrics:
        """Return the loss; inputs ``[B, T]``, or ``[T]`` packed."""
        losses = -keep(action_mask, advantages) * keep(action_mask, logprob) / (1.0 + self.tau)
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode, layout=layout)
        return loss, detached({"opmd_loss": loss})
