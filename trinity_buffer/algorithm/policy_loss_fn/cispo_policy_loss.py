"""CISPO: clip the weight, not the update (MiniMax-M1, arXiv:2506.13585)."""

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


@POLICY_LOSS_FN.register_module("cispo")
class CISPOPolicyLossFn(PolicyLossFn):
    """``-A sg(clip(r, 1 - low, 1 + high)) sg(M) logprob``: clipped tokens still learn.

    Args:
        backend: whose names callers use.
        clip_range_low: how far the weight may fall below 1; at 1 there is no lower bound, which is
            what the paper uses.
        clip_range_high: how far it may rise above 1.
        enable_mask_clip: leave out (M = 0) tokens that PPO would clip, by the two limits below.
        mask_clip_range_low: lower limit of M, for negative advantages.
        mask_clip_range_high: upper limit of M, for positive advantages.
        loss_agg_mode: see `aggregate_loss`.
    """

    def __init__(
        self,
        backend: str = "verl",
        clip_range_low: float = 1.0,
        clip_range_high: float = 0.28,
        enable_mask_clip: bool = False,
        mask_clip_range_low: float = 1.0,
        mask_clip_range_high: float = 0.28,
        loss_agg_mode: str = "token-mean",
    ) -> None:
        super().__init__(backend)
        self.clip_range_low = clip_range_low
        self.clip_range_high = clip_range_high
        self.enable_mask_clip = enable_mask_clip
        self.mask_clip_range_low = mask_clip_range_low
        self.mask_clip_range_high = mask_clip_range_high
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
        difference = (logprob - keep(action_mask, old_logprob)).detach()
        ratio = bounded_exp(difference)
        weight = ratio.clamp(1.0 - self.clip_range_low, 1.0 + self.clip_range_high)
        learns = self._learns(ratio, advantages).to(ratio)
        losses = -advantages * weight * learns * logprob
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode, layout=layout)
        metrics = {
            "cispo_loss": loss,
            "ppo_kl": masked_mean(-difference, action_mask),
            "unmasked_frac": masked_mean(learns, action_mask),
        }
        return loss, detached(metrics)

    def _learns(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return M, bool."""
        if not self.enable_mask_clip:
            return torch.ones_like(ratio, dtype=torch.bool)
        above = (ratio > 1.0 + self.mask_clip_range_high) & (advantages > 0)
        below = (ratio < 1.0 - self.mask_clip_range_low) & (advantages < 0)
        return ~(above | below)
