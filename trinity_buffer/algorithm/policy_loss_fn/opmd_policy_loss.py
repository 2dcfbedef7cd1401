"""OPMD: online policy mirror descent; no ratio (after Kimi k1.5, arXiv:2501.12599)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.arguments import checked
from trinity_buffer.algorithm.functional import keep
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn import policy_loss_fn


@policy_loss_fn.POLICY_LOSS_FN.register_module("opmd")
@dataclass(eq=False)
class OPMDPolicyLossFn(policy_loss_fn.AggregatedLossFn):
    """``-A logprob / (1 + tau)``.

    Args:
        backend: whose names callers use.
        tau: temperature; only scales the gradient.
        loss_agg_mode: see `aggregate_loss`.
    """

    loss_name = "opmd_loss"

    tau: float = checked(1.0, (lambda value: value > -1, "be greater than -1"))

    @override
    def __call__(
        self,
        logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        *,
        layout: BatchLayout | None = None,
    ) -> policy_loss_fn.LossAndMetrics:
        """Return the loss; inputs ``[B, T]``, or ``[T]`` packed."""
        losses = -keep(action_mask, advantages) * keep(action_mask, logprob) / (1.0 + self.tau)
        return self.aggregated(losses, action_mask, layout)
