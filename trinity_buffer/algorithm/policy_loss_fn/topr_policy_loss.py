"""TOPR: importance weights for the failures alone (arXiv:2503.14286)."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import (
    aggregate_loss,
    aggregation_mode,
    bounded_exp,
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


@POLICY_LOSS_FN.register_module("topr")
class TOPRPolicyLossFn(PolicyLossFn):
    """``-sg(alpha) A logprob``: alpha is 1 for successes, the ratio cut to [0, 1] for failures.

    The ratio is the token's, as in the reference; the paper's is the sequence's.

    Args:
        backend: whose names callers use.
        advantage_threshold: a token succeeds if its advantage is above it.
        loss_agg_mode: see `aggregate_loss`.
    """

    def __init__(
        self,
        backend: str = "verl",
        advantage_threshold: float = 0.0,
        loss_agg_mode: str = "token-mean",
    ) -> None:
        super().__init__(backend)
        self.advantage_threshold = advantage_threshold
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
        logprob, advantages = keep(action_mask, logprob), keep(action_mask, advantages)
        ratio = bounded_exp((logprob - keep(action_mask, old_logprob)).detach())
        failed = advantages <= self.advantage_threshold
        alpha = torch.where(failed, ratio.clamp(0.0, 1.0), 1.0)
        losses = -alpha * advantages * logprob
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode, layout=layout)
        metrics = {
            "topr_loss": loss,
            "avg_alpha": masked_mean(alpha, action_mask),
            "avg_ratio": masked_mean(ratio, action_mask),
        }
        return loss, detached(metrics)
