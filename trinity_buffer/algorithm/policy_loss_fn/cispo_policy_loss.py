"""CISPO: clip the weight, not the update (MiniMax-M1, arXiv:2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import Metrics, Tokens, bounded_exp
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, TokenLossFn


@POLICY_LOSS_FN.register_module("cispo")
@dataclass(eq=False)
class CISPOPolicyLossFn(TokenLossFn):
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

    loss_name = "cispo_loss"

    clip_range_low: float = 1.0
    clip_range_high: float = 0.28
    enable_mask_clip: bool = False
    mask_clip_range_low: float = 1.0
    mask_clip_range_high: float = 0.28

    @override
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the weighted log-probabilities of the tokens that learn."""
        # The weight is data: only `logprob` at the end carries a gradient, so clipping it keeps
        # the update of the token.
        difference = (tokens.logprob - tokens.old_logprob).detach()
        ratio = bounded_exp(difference)
        weight = ratio.clamp(1.0 - self.clip_range_low, 1.0 + self.clip_range_high)
        learns = torch.ones_like(ratio)  # M
        if self.enable_mask_clip:
            above = (ratio > 1.0 + self.mask_clip_range_high) & (tokens.advantages > 0)
            below = (ratio < 1.0 - self.mask_clip_range_low) & (tokens.advantages < 0)
            learns = (~(above | below)).to(ratio)
        losses = -tokens.advantages * weight * learns * tokens.logprob
        return losses, {"ppo_kl": tokens.mean(-difference), "unmasked_frac": tokens.mean(learns)}
