"""GMPO: the geometric mean of a sequence's ratios (arXiv:2507.20673)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import functional
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn import policy_loss_fn


@policy_loss_fn.POLICY_LOSS_FN.register_module("gmpo")
@dataclass(eq=False)
class GMPOLossFn(policy_loss_fn.PolicyLossFn):
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
    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        *,
        layout: BatchLayout | None = None,
    ) -> policy_loss_fn.LossAndMetrics:
        """Return the loss; inputs ``[B, T]``, or ``[T]`` packed."""
        advantages = functional.keep(action_mask, advantages)
        difference = functional.keep(action_mask, logprob) - functional.keep(
            action_mask, old_logprob
        )
        upper, lower = (
            difference.clamp(max=self.clip_range_high),
            difference.clamp(min=-self.clip_range_low),
        )
        # Only the direction in which the advantage pushes is clipped, as in PPO's pessimistic
        # bound.
        clipped = torch.where(advantages > 0, upper, lower)
        # The mean of log-ratios is the logarithm of the geometric mean.
        ratio = functional.bounded_exp(functional.row_means(clipped, action_mask, layout))
        loss = functional.aggregate_rows(
            -functional.row_means(advantages, action_mask, layout) * ratio, layout
        )
        metrics = {
            "pg_clipfrac": functional.masked_mean((clipped != difference).to(ratio), action_mask),
            "ppo_kl": functional.masked_mean(-difference, action_mask),
            "ratio/mean": ratio.mean(),
            "pg_loss": loss,
        }
        return loss, policy_loss_fn.detached(metrics)
