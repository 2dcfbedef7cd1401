"""Clip-Cov and KL-Cov: hold the tokens that use up entropy (arXiv:2505.22617)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import functional
from trinity_buffer.algorithm.functional import Metrics, Tokens
from trinity_buffer.algorithm.policy_loss_fn import policy_loss_fn


def covariances(logprob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return ``(A - mean A) (logprob - mean logprob)`` per token; means of the micro-batch."""
    # A covariance chooses tokens; no gradient may flow through the choice.
    logprob = logprob.detach()
    centred = advantages - functional.masked_mean(advantages, mask)
    return centred * (logprob - functional.masked_mean(logprob, mask))


def chosen_tokens(scores: Tensor, eligible: Tensor, share: float, mask: Tensor) -> Tensor:
    """Return where the best ``share`` of all masked tokens is, at least one, eligible ones only."""
    # On the device: an int() here would wait for it in every micro-batch.
    wanted = (mask.sum() * share).floor().clamp(min=1.0)
    order = torch.where(eligible, scores, -torch.inf).flatten().argsort(descending=True)
    # The rank of each token; topk would need the number wanted as a Python int.
    rank = order.argsort()
    return (rank < wanted).reshape(scores.shape) & eligible


@policy_loss_fn.POLICY_LOSS_FN.register_module("clip_cov")
@dataclass(eq=False)
class ClipCovLossFn(policy_loss_fn.ClippedLossFn):
    """PPO in which a few random tokens of high covariance do not learn.

    Which tokens, is chosen in each micro-batch, from its own mean and its own random numbers: how a
    step is cut therefore matters. The choice draws from torch's generator.

    Args:
        backend: whose names callers use.
        clip_range: see `PPOPolicyLossFn`.
        clip_range_low: see there.
        clip_range_high: see there.
        clip_cov_ratio: share of the tokens that is held, at least one token.
        clip_cov_lb: covariances above it are candidates,
        clip_cov_ub: and below it.
        loss_agg_mode: see `aggregate_loss`.
    """

    per_microbatch = True

    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0

    @override
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return PPO's terms, 0 for the tokens that are held."""
        logprob, old_logprob, advantages, mask, *_ = tokens
        difference = functional.log_ratio(logprob, old_logprob)
        ratio = difference.exp()
        plain = -advantages * ratio
        clipped = functional.clipped_objective(ratio, advantages, self.low, self.high)
        covariance = covariances(logprob, advantages, mask)
        between = (covariance > self.clip_cov_lb) & (covariance < self.clip_cov_ub)
        # Tokens that PPO clips learn nothing already.
        eligible = between & (clipped <= plain) & (mask != 0)
        # Random ranks choose among the eligible ones.
        held = chosen_tokens(torch.rand_like(covariance), eligible, self.clip_cov_ratio, mask)
        return torch.where(held, 0.0, torch.maximum(plain, clipped)), {
            "pg_clipfrac": tokens.mean(clipped > plain),
            "cov_frac": tokens.mean(held),
            "ppo_kl": tokens.mean(-difference),
        }


@policy_loss_fn.POLICY_LOSS_FN.register_module("kl_cov")
@dataclass(eq=False)
class KLCovLossFn(policy_loss_fn.TokenLossFn):
    """``-A r``, plus ``coef |logprob - old_logprob|`` for the tokens of highest covariance.

    Which tokens, is chosen in each micro-batch: how a step is cut therefore matters.

    Args:
        backend: whose names callers use.
        kl_cov_ratio: share of the tokens that is held back, at least one token.
        kl_cov_coef: how strongly.
        loss_agg_mode: see `aggregate_loss`.
    """

    per_microbatch = True

    kl_cov_ratio: float = 0.0002
    kl_cov_coef: float = 1.0

    @override
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the weighted advantages, and the penalty of the tokens that are held back."""
        logprob, old_logprob, advantages, mask, *_ = tokens
        difference = functional.log_ratio(logprob, old_logprob)
        ratio = difference.exp()
        covariance = covariances(logprob, advantages, mask)
        held = chosen_tokens(covariance, mask != 0, self.kl_cov_ratio, mask).to(ratio)
        losses = -advantages * ratio + self.kl_cov_coef * held * difference.abs()
        return losses, {"cov_frac": tokens.mean(held), "ppo_kl": tokens.mean(-difference)}
