"""What Clip-B and Clip-V share: how much a token's update would change the policy's entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_buffer.algorithm.advantage_fn.rows import Rows

NEGLIGIBLE_STD = 1e-12
"""Below this all tokens change the entropy alike, and none is dropped."""


def entropy_change(logprob: Tensor, entropy: Tensor) -> Tensor:
    """Return ``S = p (H + log p)``: to first order, what raising a token's probability takes off the entropy."""
    return logprob.exp() * (entropy + logprob)


def clipped_fractions(dropped: Tensor, advantages: Tensor, rows: Rows) -> dict[str, Tensor]:
    """Return the share of action tokens that were dropped: of all, of A > 0 and of A < 0; 0 of none."""
    kinds = {
        "frac_clipped": rows.mask,
        "frac_clipped_pos": rows.mask & (advantages > 0),
        "frac_clipped_neg": rows.mask & (advantages < 0),
    }
    return {name: _share(dropped, kind, rows) for name, kind in kinds.items()}


def _share(dropped: Tensor, kind: Tensor, rows: Rows) -> Tensor:
    counts = rows.total(torch.stack([(dropped & kind).sum(), kind.sum()]).to(torch.float32))
    return counts[0] / counts[1].clamp(min=1.0)
