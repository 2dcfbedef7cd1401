"""PPO (arXiv:1707.06347) with a dual clip (arXiv:1912.09729), or with DAPO's clip-higher."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import functional
from trinity_buffer.algorithm.arguments import checked
from trinity_buffer.algorithm.functional import Metrics, Tokens
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, ClippedLossFn


@POLICY_LOSS_FN.register_module("ppo")
@dataclass(eq=False)
class PPOPolicyLossFn(ClippedLossFn):
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``, and at most ``-A c`` where A is negative.

    Args:
        backend: whose names callers use.
        clip_range: both limits at once; the two below win.
        clip_range_low: how far the ratio may fall below 1.
        clip_range_high: how far it may rise above 1 (DAPO's clip-higher, arXiv:2503.14476: 0.28).
        clip_ratio_c: bound of the ratio for negative advantages, above 1.
        loss_agg_mode: see `aggregate_loss`.
        enable_sequence_masking: leave out negative-advantage tokens of sequences that drifted too
            far (DeepSeek-V3.2, arXiv:2512.02556, section 3.1); they count in the denominator.
        delta_sequence_masking: how far is too far, in mean ``old_logprob - logprob``.
        fallback_to_policy_gradient: ignore ``old_logprob``: the ratio is 1, its gradient that of
            ``logprob``.
    """

    row_metrics = ("seq_mask/mean_sequence_kl",)

    clip_ratio_c: float = checked(3.0, (lambda value: value > 1, "be greater than 1"))
    enable_sequence_masking: bool = False
    delta_sequence_masking: float = 0.1
    fallback_to_policy_gradient: bool = False

    @override
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the clipped objective, bounded where the advantage is negative."""
        logprob, old_logprob, advantages, mask, layout, _ = tokens
        # A ratio of 1 whose gradient is that of the log-probability: plain policy gradient.
        old = logprob.detach() if self.fallback_to_policy_gradient else old_logprob
        difference = functional.log_ratio(logprob, old)
        ratio = difference.exp()

        plain = -advantages * ratio
        clipped = functional.clipped_objective(ratio, advantages, self.low, self.high)
        worse = torch.maximum(plain, clipped)
        # A ratio that runs away under a negative advantage would dominate the step.
        bound = -advantages * self.clip_ratio_c
        negative = advantages < 0
        losses = torch.where(negative, torch.minimum(bound, worse), worse)

        metrics: Metrics = {
            "pg_clipfrac": tokens.mean(clipped > plain),
            "pg_clipfrac_lower": tokens.mean((worse > bound) & negative),
            "ppo_kl": tokens.mean(-difference),
        }
        if self.enable_sequence_masking:
            weights = mask.to(difference.dtype)
            # The mean of `old_logprob - logprob` of each sequence.
            summed = functional.row_sums(-difference.detach() * weights, layout)
            drift = summed / (functional.row_sums(weights, layout) + 1e-10)
            far = functional.spread(drift > self.delta_sequence_masking, ratio, layout)
            losses = torch.where(far & negative, 0.0, losses)
            # The reference counts tokens outside the mask among the dropped ones.
            dropped = far & (tokens.unmasked_advantages < 0)
            count = mask.to(ratio).sum() + 1e-10
            metrics["seq_mask/masked_tokens"] = dropped.to(ratio).sum() / count
            metrics["seq_mask/mean_sequence_kl"] = drift.mean()
        return losses, metrics
