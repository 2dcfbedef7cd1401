"""CHORD: an expert whose share is scheduled and whose tokens are weighted (arXiv:2508.11408)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.arguments import UP_TO_1, checked
from trinity_buffer.algorithm.functional import bounded_exp
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn import policy_loss_fn
from trinity_buffer.algorithm.policy_loss_fn.mix_policy_loss import TwoKindsLossFn
from trinity_buffer.errors import InvalidArgumentError


@policy_loss_fn.POLICY_LOSS_FN.register_module("sft_is")
class SFTISLossFn(policy_loss_fn.LikelihoodLossFn):
    """``-sg(p) logprob``: SFT weighted by the policy's own probability of the token.

    Args:
        backend: whose names callers use.
        loss_agg_mode: see `aggregate_loss`.
    """

    loss_name = "sft_is_loss"

    @override
    def terms(self, logprob: Tensor) -> Tensor:
        """Return the negative log-likelihoods, weighted by the likelihoods."""
        return -bounded_exp(logprob.detach()) * logprob


@policy_loss_fn.POLICY_LOSS_FN.register_module("sft_phi")
@dataclass(eq=False)
class SFTPhiLossFn(policy_loss_fn.LikelihoodLossFn):
    """``-sg(p (1 - p)) logprob``: SFT that learns most where the policy is undecided.

    Args:
        backend: whose names callers use.
        loss_agg_mode: see `aggregate_loss`.
        cutoff_prob: tokens above this probability stop learning, in (0, 1]; 1: none does.
    """

    loss_name = "sft_phi_loss"

    cutoff_prob: float = checked(1.0, UP_TO_1)

    @override
    def terms(self, logprob: Tensor) -> Tensor:
        """Return the negative log-likelihoods, weighted by how undecided the policy is."""
        probability = bounded_exp(logprob.detach())
        if self.cutoff_prob < 1.0:
            # Beyond the cut-off the gradient of a clamp is 0, and the value stays finite.
            logprob = logprob.clamp(max=math.log(self.cutoff_prob))
        # phi is 0 for certain tokens of both kinds: known by heart, and out of reach.
        return -probability * (1.0 - probability) * logprob


@policy_loss_fn.POLICY_LOSS_FN.register_module("mix_chord")
@dataclass(eq=False)
class MIXCHORDPolicyLossFn(TwoKindsLossFn):
    """``(1 - mu(step)) PPO(usual rows) + mu(step) SFT-phi(expert rows)``.

    ``mu`` rises linearly to ``mu_peak`` within the warm-up, falls along a cosine to ``mu_valley``
    within the decay, and stays there. A kind that a batch lacks contributes 0.

    Args:
        backend: whose names callers use.
        mu_warmup_steps: gradient steps of the warm-up.
        mu_decay_steps: gradient steps of the decay.
        mu_peak: share of the expert part at the end of the warm-up.
        mu_valley: share at the end of the decay.
        enable_phi_function: False: plain SFT of the expert rows.
        kwargs: the options of `TwoKindsLossFn`.
    """

    mu_warmup_steps: int = 0
    mu_decay_steps: int = 0
    mu_peak: float = 0.1
    mu_valley: float = 0.1
    enable_phi_function: bool = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_phi_function:
            self.expert = SFTPhiLossFn("trinity", self.expert.mode)

    def mu_schedule(self, step: Tensor) -> Tensor:
        """Return the share of the expert part at each of ``step``, float64."""
        at = step.double()
        warmup, decay = self.mu_warmup_steps, self.mu_decay_steps
        rising = at / max(warmup, 1) * self.mu_peak
        progress = ((at - warmup) / max(decay, 1)).clamp(0.0, 1.0)
        cosine = 0.5 * (1.0 + torch.cos(math.pi * progress))
        falling = self.mu_valley + (self.mu_peak - self.mu_valley) * cosine
        # Branch-free: a compiled loss cannot branch on a tensor.
        settled = torch.where(at >= warmup + decay, self.mu_valley, falling)
        return torch.where(at < warmup, rising, settled)

    @override
    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
        step: Tensor,
        *,
        layout: BatchLayout | None = None,
    ) -> policy_loss_fn.LossAndMetrics:
        """Return the loss; as `MIXPolicyLossFn`, with the gradient ``step`` of each row ``[N]``.

        Raises:
            InvalidArgumentError: the steps differ. A compiled loss cannot raise it: it is NaN.
        """
        mu = self.mu_schedule(_one_step(step)).to(logprob.device)
        tensors = (logprob, old_logprob, action_mask, advantages)
        usual, expert, metrics = self.parts(tensors, expert_mask, layout)
        # The shares are float64; the loss keeps the dtype of its parts.
        loss = (1.0 - mu).to(usual) * usual + mu.to(expert) * expert
        return loss, policy_loss_fn.detached({**metrics, "loss": loss, "mu": mu})


def _one_step(step: Tensor) -> Tensor:
    """Return the number, float64, that all of ``step`` are; compiled, NaN if they differ.

    Steps come from the loader, on whatever device; one comparison of N integers per batch.
    """
    first = step.flatten()[0] if step.numel() else step.new_zeros(())
    alike = (step == first).all()
    if torch.compiler.is_compiling():  # no branch there may depend on what a tensor holds
        return torch.where(alike, first.double(), torch.nan)
    if not bool(alike):
        raise InvalidArgumentError(f"step must be one number for all rows: {step.tolist()}")
    return first.double()
