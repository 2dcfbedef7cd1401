"""GSPO: one importance ratio per sequence (arXiv:2507.18071)."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import (
    aggregate_loss,
    aggregation_mode,
    bounded_exp,
    clip_limits,
    clipped_objective,
    keep,
    masked_mean,
    row_means,
    spread,
)
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import (
    POLICY_LOSS_FN,
    LossAndMetrics,
    PolicyLossFn,
    detached,
)


@POLICY_LOSS_FN.register_module("gspo")
class GSPOLossFn(PolicyLossFn):
    """``max(-A s, -A clip(s, 1 - low, 1 + high))``, ``s = exp(mean_t(logprob - old_logprob))``.

    The value of ``s`` is the sequence's, its gradient flows through each token's own probability
    (``sg(s) p / sg(p)``, equation 14): equal to the gradient of equation 5 where all tokens of a
    sequence have one advantage, and defined where they have not.

    Args:
        backend: whose names callers use.
        clip_range: both limits at once; the two below win.
        clip_range_low: how far the ratio may fall below 1.
        clip_range_high: how far it may rise above 1.
        loss_agg_mode: see `aggregate_loss`; the paper's is the default.
    """

    tuned = {"clip_range_low": 3e-4, "clip_range_high": 4e-4}
    row_metrics = ("ppo_kl_seq",)

    def __init__(
        self,
        backend: str = "verl",
        clip_range: float | None = None,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        loss_agg_mode: str | None = "seq-mean-token-mean",
    ) -> None:
        super().__init__(backend)
        self.low, self.high = clip_limits(clip_range, clip_range_low, clip_range_high)
        self.loss_agg_mode = aggregation_mode(loss_agg_mode, "seq-mean-token-mean")

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
        difference = (logprob - keep(action_mask, old_logprob)).detach()
        log_ratios = row_means(difference, action_mask, layout)
        own = logprob - logprob.detach()
        ratio = bounded_exp(own + spread(log_ratios, logprob, layout))
        plain = -advantages * ratio
        clipped = clipped_objective(ratio, advantages, self.low, self.high)
        losses = torch.maximum(plain, clipped)
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode, layout=layout)
        metrics = {
            "pg_clipfrac": masked_mean((clipped > plain).to(ratio), action_mask),
            "ppo_kl": masked_mean(-difference, action_mask),
            "ppo_kl_seq": (-log_ratios).mean(),
            "pg_loss": loss,
        }
        return loss, detached(metrics)


@POLICY_LOSS_FN.register_module("gspo_token")
class GSPOTokenLossFn(GSPOLossFn):
    """GSPO-token (arXiv:2507.18071, section 4.3): the sequence's ratio with an advantage per token.

    `GSPOLossFn` already is written this way; the name says that the advantages may differ within a
    sequence, as those of a critic or of token-level rewards do.
    """
