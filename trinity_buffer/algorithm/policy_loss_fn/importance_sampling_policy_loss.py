"""A policy gradient weighted by the importance ratio, without any clip."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import (
    aggregate_loss,
    aggregation_mode,
    keep,
    log_ratio,
    masked_mean,
)
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import (
    POLICY_LOSS_FN,
    LossAndMetrics,
    PolicyLossFn,
    detached,
)


@POLICY_LOSS_FN.register_module("importance_sampling")
class ImportanceSamplingLossFn(PolicyLossFn):
    """``-A r`` with ``r = exp(logprob - old_logprob)``.

    Args:
        backend: whose names callers use.
        loss_agg_mode: see `aggregate_loss`.
    """

    def __init__(self, backend: str = "verl", loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend)
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
        difference = log_ratio(keep(action_mask, logprob), keep(action_mask, old_logprob))
        ratio = difference.exp()
        losses = -keep(action_mask, advantages) * ratio
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode, layout=layout)
        metrics = {
            "pg_loss": loss,
            "ratio/mean": masked_mean(ratio, action_mask),
            "approx_kl": masked_mean(-difference, action_mask),
        }
        return loss, detached(metrics)
