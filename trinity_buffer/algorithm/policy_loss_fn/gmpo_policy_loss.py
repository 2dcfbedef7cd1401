"""GMPO: the geometric mean of a sequence's ratios (arXiv:2507.20673)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from trinity_buffer.algorithm.functional import Tokens, aggregate_rows, bounded_exp, row_means
from trinity_buffer.algorithm.policy_loss_fn import policy_loss_fn


@policy_loss_fn.POLICY_LOSS_FN.register_module("gmpo")
@dataclass(eq=False)
class GMPOLossFn(policy_loss_fn.ComparingLossFn):
    """``-A exp(mean_t d_t)`` per sequence, with ``d_t`` the log-ratio, clipped where A pushes it.

    An outlier among a thousand tokens moves a geometric mean little. The loss is one number per
    sequence, so that there is nothing to choose about how tokens are aggregated.

    Args:
        backend: whose names callers use.
        clip_range_low: log-ratios below minus this stop learning where A < 0.
        clip_range_high: log-ratios above this stop learning where A > 0.
    """

    row_metrics = ("ratio/mean",)

    clip_range_low: float = 0.4
    clip_range_high: float = 0.4

    @override
    def loss_of(self, tokens: Tokens) -> policy_loss_fn.LossAndMetrics:
        """Return the mean over sequences."""
        logprob, old_logprob, advantages, mask, layout, _ = tokens
        difference = logprob - old_logprob
        upper = difference.clamp(max=self.clip_range_high)
        lower = difference.clamp(min=-self.clip_range_low)
        # Only the direction in which the advantage pushes is clipped, as in PPO's pessimistic
        # bound.
        clipped = torch.where(advantages > 0, upper, lower)
        # The mean of log-ratios is the logarithm of the geometric mean.
        ratio = bounded_exp(row_means(clipped, mask, layout))
        loss = aggregate_rows(-row_means(advantages, mask, layout) * ratio, layout)
        metrics = {
            "pg_clipfrac": tokens.mean(clipped != difference),
            "ppo_kl": tokens.mean(-difference),
            "ratio/mean": ratio.mean(),
            "pg_loss": loss,
        }
        return loss, policy_loss_fn.detached(metrics)
