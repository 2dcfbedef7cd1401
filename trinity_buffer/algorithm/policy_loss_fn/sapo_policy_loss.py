"""SAPO: a soft gate in the place of a clip (arXiv:2511.20347)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import Metrics, Tokens, bounded_exp
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, TokenLossFn
from trinity_buffer.errors import InvalidArgumentError


@POLICY_LOSS_FN.register_module("sapo")
@dataclass(eq=False)
class SAPOPolicyLossFn(TokenLossFn):
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
    loss_name = "sapo_loss"

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    detach_gate: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.tau_pos <= self.tau_neg:
            raise InvalidArgumentError(
                "tau_neg must be at least tau_pos, and both positive; "
                f"they are {self.tau_neg} and {self.tau_pos}"
            )

    def soft_gate_function(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return ``4 / tau * sigmoid(tau (ratio - 1))`` per token."""
        tau = torch.full_like(ratio, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        return torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau

    @override
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the gated advantages."""
        difference = tokens.logprob - tokens.old_logprob
        ratio = bounded_exp(difference)
        gate = self.soft_gate_function(ratio, tokens.advantages)
        if self.detach_gate:
            # The reference differentiates the log-probability alone, and so weighs by f, not by f'.
            losses = -gate.detach() * tokens.advantages * tokens.logprob
        else:
            losses = -gate * tokens.advantages
        return losses, {
            "ppo_kl": tokens.mean(-difference),
            "avg_soft_gate": tokens.mean(gate),
            "avg_ratio": tokens.mean(ratio),
            "pos_adv_frac": tokens.mean(tokens.advantages > 0),
        }
