"""Arithmetic over the tokens of rows: discounted sums, generalized advantages, whitening. Pure.

Last comes what Clip-B and Clip-V share: how much a token's update would change the policy's
entropy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_buffer.algorithm.advantage_fn.rows import Rows
from trinity_buffer.algorithm.group_scores import Over


def discounted_returns(rewards: Tensor, gamma: float, mask: Tensor | None = None) -> Tensor:
    """Return ``R_t = r_t + gamma R_{t+1}``, shape ``(B, T)``.

    With ``mask`` only action tokens are time steps: the others neither discount nor hold a return,
    and a reward that falls on one of them counts for the action before it.
    """
    # A return is what is left of generalized advantages where no value is expected of a state.
    return generalized_advantages(rewards, torch.zeros_like(rewards), gamma, 1.0, mask)


def generalized_advantages(
    rewards: Tensor, values: Tensor, gamma: float, lam: float, mask: Tensor | None = None
) -> Tensor:
    """Return generalized advantages (arXiv:1506.02438), shape ``(B, T)``.

    ``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``. With
    ``mask`` the next time step is the next action token, so that values at padding and at tokens of
    the environment do not enter; a reward on one of them counts for the action before it.
    """
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[..., 0])
    next_value, pending = torch.zeros_like(running), torch.zeros_like(running)
    for t in reversed(range(values.shape[-1])):
        here = rewards[..., t] + pending
        delta = here + gamma * next_value - values[..., t]
        current = delta + gamma * lam * running
        if mask is None:
            running, next_value = current, values[..., t]
            advantages[..., t] = running
            continue
        acts = mask[..., t]
        # A reward outside the mask waits for the action before it.
        pending = here.where(~acts, 0.0)
        # Where nothing is acted no time passes: neither discount nor reward.
        running = current.where(acts, running)
        next_value = values[..., t].where(acts, next_value)
        advantages[..., t] = running.where(acts, 0.0)
    return advantages


def whitened(values: Tensor, rows: Rows, epsilon: float = 1e-8, over: Over = "rows") -> Tensor:
    """Return ``(values - mean) / sqrt(var + epsilon)`` with the statistics of action tokens.

    The variance is unbiased. Tokens outside the mask are transformed alike. Over runs, the tokens
    of a row count by 1 divided by the number of rows of its run.
    """
    _, mean, variance = rows.moments(values, ddof=1, weights=rows.weights(over))
    return (values - mean.to(values.dtype)) * torch.rsqrt(variance + epsilon).to(values.dtype)


def largest(values: Tensor, number: int, rows: Rows) -> Tensor:
    """Return which of ``values`` are among the ``number`` largest of all ranks, or equal to one."""
    bits = values.double().view(torch.int64)
    ordered = bits ^ ((bits >> 63) & (2**63 - 1))  # as the numbers are, negative ones too
    low, high = -(2**63), 2**63
    while high - low > 1:
        middle = (low + high) // 2
        count = rows.total((ordered >= middle).sum().to(torch.float64))
        low, high = (middle, high) if count >= number else (low, middle)
    return ordered >= low


def row_statistics(name: str, values: Tensor, rows: Rows) -> dict[str, Tensor]:
    """Return mean and deviation of the sums of action tokens, over the rows of all ranks."""
    sums = values.where(rows.mask, 0.0).sum(-1)
    _, mean, variance = rows.moments(sums, torch.ones_like(sums, dtype=torch.bool), ddof=1)
    return {f"{name}/mean": mean, f"{name}/std": variance.sqrt()}


NEGLIGIBLE_STD = 1e-12
"""Below this all tokens change the entropy alike, and none is dropped."""


def entropy_change(logprob: Tensor, entropy: Tensor) -> Tensor:
    """Return ``S = p (H + log p)``: what raising a token's logit takes off the entropy.

    To first order in the step (arXiv:2602.03392, theorem 3.2).
    """
    return logprob.exp() * (entropy + logprob)


def expected_entropy_change(logits: Tensor) -> Tensor:
    """Return the mean of `entropy_change` over the policy's own choices, ``(..., V)`` to ``(...)``.

    The column ``necs`` of Clip-V.
    """
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).sum(-1, keepdim=True)
    return (probs * entropy_change(logprobs, entropy)).sum(-1)


def clipped_fractions(dropped: Tensor, advantages: Tensor, rows: Rows) -> dict[str, Tensor]:
    """Return the share of action tokens that were dropped: of all, of those with A > 0 and A < 0.

    Of all it is 1 where there are none, since nothing is left (as the reference says); of a kind
    that does not occur it is 0.
    """
    kinds = [rows.mask, rows.mask & (advantages > 0), rows.mask & (advantages < 0)]
    dropped_of = torch.stack([(dropped & kind).sum() for kind in kinds])
    size_of = torch.stack([kind.sum() for kind in kinds])
    # One exchange for all six counts.
    counts = rows.total(torch.stack([dropped_of, size_of]).to(torch.float32))
    every, positive, negative = counts[0] / counts[1].clamp(min=1.0)
    return {
        "frac_clipped": every.where(counts[1, 0] > 0, 1.0),
        "frac_clipped_pos": positive,
        "frac_clipped_neg": negative,
    }
