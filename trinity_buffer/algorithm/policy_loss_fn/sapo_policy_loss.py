"""SAPO: a soft gate in the place of a clip (arXiv:2511.20347)."""

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
from trinity_buffer.errors import InvalidArgumentError


@POLICY_LOSS_FN.register_module("sapo")
class SAPOPolicyLossFn(PolicyLossFn):
    """``-f(r) A`` with ``f(r) = 4 / tau * sigmoid(tau (r - 1))``.

    The gradient then weighs ``A grad logprob`` with ``r f'(r)``, where ``f'`` is 1 at r = 1 and
    fades on both sides. The reference weighs it with ``f(r)``: ``2 / tau`` at r = 1, *growing*.

    Args:
        backend: whose names callers use.
        tau_pos: temperature where A > 0.
        tau_neg: temperature elsewhere, at least ``tau_pos``: noise fades sooner.
        loss_agg_mode: see `aggregate_loss`.
        detach_gate: the reference's loss, ``-A sg(f(r)) logprob``.
    """

    reference_args = {"detach_gate": True}

    def __init__(
        self,
        backend: str = "verl",
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        loss_agg_mode: str = "token-mean",
        detach_gate: bool = False,
    ) -> None:
        super().__init__(backend)
        if not 0.0 < tau_pos <= tau_neg:
            raise InvalidArgumentError(
                "tau_neg must be at least tau_pos, and both positive; "
                f"they are {tau_neg} and {tau_pos}"
            )
        self.tau_pos = tau_pos
        self.tau_neg = tau_neg
        self.loss_agg_mode = aggregation_mode(loss_agg_mode)
        self.detach_gate = detach_gate

    def soft_gate_function(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return ``4 / tau * sigmoid(tau (ratio - 1))`` per token."""
        tau = torch.full_like(ratio, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        return torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau

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
        difference = logprob - keep(action_mask, old_logprob)
        ratio = bounded_exp(difference)
        gate = self.soft_gate_function(ratio, advantages)
        losses = -gate.detach() * advantages * logprob if self.detach_gate else -gate * advantages
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode, layout=layout)
        metrics = {
            "sapo_loss": loss,
            "ppo_kl": masked_mean(-difference, action_mask),
            "avg_soft_gate": masked_mean(gate, action_mask),
            "avg_ratio": masked_mean(ratio, action_mask),
            "pos_adv_frac": masked_mean((advantages > 0).to(ratio), action_mask),
        }
        return loss, detached(metrics)
