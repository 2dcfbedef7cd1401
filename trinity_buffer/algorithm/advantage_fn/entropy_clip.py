"""What Clip-B and Clip-V share: how much a token's update would change the policy's entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_buffer.algorithm.advantage_fn.rows import Rows

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
