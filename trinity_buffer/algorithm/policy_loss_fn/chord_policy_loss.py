"""CHORD: an expert whose share is scheduled and whose tokens are weighted (arXiv:2508.11408)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import (
    aggregate_loss,
    aggregation_mode,
    bounded_exp,
    keep,
)
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn.mix_policy_loss import (
    RUN_TIME,
    RowScales,
    TwoKindsLoss,
)
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import (
    POLICY_LOSS_FN,
    LossAndMetrics,
    PolicyLossFn,
    detached,
)
from trinity_buffer.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.sft_loss import SFTLossFn
from trinity_buffer.errors import InvalidArgumentError


@POLICY_LOSS_FN.register_module("sft_is")
class SFTISLossFn(PolicyLossFn):
    """``-sg(p) logprob``: SFT weighted by the policy's own probability of the token.

    Args:
        backend: whose names callers use.
        loss_agg_mode: see `aggregate_loss`.
    """

    def __init__(self, backend: str = "verl", loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend)
        self.loss_agg_mode = aggregation_mode(loss_agg_mode)

    @override
    def __call__(
        self, logprob: Tensor, action_mask: Tensor, *, layout: BatchLayout | None = None
    ) -> LossAndMetrics:
        """Return the loss; inputs ``[B, T]``, or ``[T]`` packed."""
        logprob = keep(action_mask, logprob)
        losses = -bounded_exp(logprob.detach()) * logprob
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode, layout=layout)
        return loss, detached({"sft_is_loss": loss})


@POLICY_LOSS_FN.register_module("sft_phi")
class SFTPhiLossFn(PolicyLossFn):
    """``-sg(p (1 - p)) logprob``: SFT that learns most where the policy is undecided.

    Args:
        backend: whose names callers use.
        loss_agg_mode: see `aggregate_loss`.
        cutoff_prob: tokens above this probability stop learning, in (0, 1]; 1: none does.
    """

    def __init__(
        self,
        backend: str = "verl",
        loss_agg_mode: str = "token-mean",
        cutoff_prob: float = 1.0,
    ) -> None:
        super().__init__(backend)
        if not 0.0 < cutoff_prob <= 1.0:
            raise InvalidArgumentError(f"cutoff_prob must be in (0, 1], it is {cutoff_prob}")
        self.loss_agg_mode = aggregation_mode(loss_agg_mode)
        self.cutoff_prob = cutoff_prob

    @override
    def __call__(
        self, logprob: Tensor, action_mask: Tensor, *, layout: BatchLayout | None = None
    ) -> LossAndMetrics:
        """Return the loss; inputs ``[B, T]``, or ``[T]`` packed."""
        logprob = keep(action_mask, logprob)
        probability = bounded_exp(logprob.detach())
        if self.cutoff_prob < 1.0:
            logprob = logprob.clamp(max=math.log(self.cutoff_prob))
        losses = -probability * (1.0 - probability) * logprob
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode, layout=layout)
        return loss, detached({"sft_phi_loss": loss})


@POLICY_LOSS_FN.register_module("mix_chord")
class MIXCHORDPolicyLossFn(PolicyLossFn):
    """``(1 - mu(step)) PPO(usual rows) + mu(step) SFT-phi(expert rows)``.

    ``mu`` rises linearly to ``mu_peak`` within the warm-up, falls along a cosine to ``mu_valley``
    within the decay, and stays there. Denominators and the arguments that are not listed here are
    those of `MIXPolicyLossFn`. A kind that a batch lacks contributes 0.

    Args:
        backend: whose names callers use.
        mu_warmup_steps: gradient steps of the warm-up.
        mu_decay_steps: gradient steps of the decay.
        mu_peak: share of the expert part at the end of the warm-up.
        mu_valley: share at the end of the decay.
        enable_phi_function: False: plain SFT of the expert rows.
        clip_range: see `PPOPolicyLossFn`.
        clip_range_low: see there.
        clip_range_high: see there.
        use_dynamic_bsz: see `RowScales`.
        ppo_mini_batch_size: see there.
        ppo_micro_batch_size_per_gpu: see there.
        ngpus_trainer: see there.
        train_batch_size_usual: see there.
        train_batch_size_expert: see there.
        loss_agg_mode: of both parts, see `aggregate_loss`.
        sft_loss_agg_mode: of the expert part.
        grpo_loss_agg_mode: of the usual part.
    """

    tuned = {"clip_range": 0.2}
    run_time = RUN_TIME

    def __init__(
        self,
        backend: str = "verl",
        mu_warmup_steps: int = 0,
        mu_decay_steps: int = 0,
        mu_peak: float = 0.1,
        mu_valley: float = 0.1,
        enable_phi_function: bool = True,
        clip_range: float | None = None,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        use_dynamic_bsz: bool | None = None,
        ppo_mini_batch_size: int = 1,
        ppo_micro_batch_size_per_gpu: int = 1,
        ngpus_trainer: int = 1,
        train_batch_size_usual: int = 1,
        train_batch_size_expert: int = 1,
        loss_agg_mode: str = "token-mean",
        sft_loss_agg_mode: str | None = None,
        grpo_loss_agg_mode: str | None = None,
    ) -> None:
        super().__init__(backend)
        self.mu_warmup_steps = mu_warmup_steps
        self.mu_decay_steps = mu_decay_steps
        self.mu_peak = mu_peak
        self.mu_valley = mu_valley
        usual = PPOPolicyLossFn(
            "trinity",
            clip_range,
            clip_range_low,
            clip_range_high,
            loss_agg_mode=aggregation_mode(grpo_loss_agg_mode, loss_agg_mode),
        )
        expert_class = SFTPhiLossFn if enable_phi_function else SFTLossFn
        expert = expert_class("trinity", aggregation_mode(sft_loss_agg_mode, loss_agg_mode))
        scales = RowScales(
            bool(use_dynamic_bsz),
            ppo_mini_batch_size,
            ppo_micro_batch_size_per_gpu,
            ngpus_trainer,
            train_batch_size_usual,
            train_batch_size_expert,
        )
        self.kinds = TwoKindsLoss(usual, expert, scales)

    def mu_schedule(self, step: Tensor) -> Tensor:
        """Return the share of the expert part at each of ``step``, float64."""
        at = step.double()
        warmup, decay = self.mu_warmup_steps, self.mu_decay_steps
        rising = at / max(warmup, 1) * self.mu_peak
        progress = ((at - warmup) / max(decay, 1)).clamp(0.0, 1.0)
        cosine = 0.5 * (1.0 + torch.cos(math.pi * progress))
        falling = self.mu_valley + (self.mu_peak - self.mu_valley) * cosine
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
    ) -> LossAndMetrics:
        """Return the loss; as `MIXPolicyLossFn`, with the gradient ``step`` of each row ``[N]``.

        Raises:
            InvalidArgumentError: the steps differ. A compiled loss cannot raise it: it is NaN.
        """
        mu = self.mu_schedule(_one_step(step)).to(logprob.device)
        tensors = {
            "logprob": logprob,
            "old_logprob": old_logprob,
            "action_mask": action_mask,
            "advantages": advantages,
        }
        usual, expert, metrics = self.kinds.parts(tensors, expert_mask, layout)
        loss = (1.0 - mu).to(usual) * usual + mu.to(expert) * expert
        return loss, detached({**metrics, "loss": loss, "mu": mu})


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
