"""Clip-V (arXiv:2602.03392): GRPO without the tokens of bad answers that move entropy most."""

from __future__ import annotations

import torch
from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn import token_scores
from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN
from trinity_buffer.algorithm.advantage_fn.grpo_advantage import GRPOAdvantageFn
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.arguments import configured


@ADVANTAGE_FN.register_module("clipv")
@configured
class ClipVAdvantageFn(GRPOAdvantageFn):
    """Drops tokens with A <= 0 and ``D > mu std(D)`` from the action mask.

    ``D = necs - S`` with ``S = p (H + log p)`` and `expected_entropy_change` as ``necs``. Needs
    ``old_logprob``, ``entropy`` and ``necs``. The deviation is the population's, over all action
    tokens.

    Args:
        epsilon: added to the deviation of the rewards.
        mu: how many deviations are tolerated.
        max_frac: if more than this share of the action tokens would go, only as many with A < 0 go,
            those of the largest D, at least one; tokens with A = 0 go in any case.
        kwargs: the options of `GRPOAdvantageFn`.
    """

    tensors = ("entropy", "necs")
    reads_old_logprob = True
    tuned = {"mu": 8.5}

    mu: float = 2.0
    max_frac: float = 1e-4

    @override
    def compute(self, rows: Rows) -> Result:
        """Return the advantages, and the mask without what is dropped."""
        advantages = super().compute(rows).advantages
        excess = rows["necs"] - token_scores.entropy_change(rows["old_logprob"], rows["entropy"])
        count, _, variance = rows.moments(excess)
        std = variance.sqrt()
        is_far = (excess.to(std.dtype) > self.mu * std) & (std >= token_scores.NEGLIGIBLE_STD)
        far = rows.mask & is_far
        dropped = far & (advantages <= 0)
        limit = max(int(self.max_frac * float(count)), 1)
        if float(rows.total(dropped.sum().to(torch.float64))) > self.max_frac * float(count):
            # Tokens without an advantage do not count against the limit: dropping them changes
            # nothing.
            negative = far & (advantages < 0)
            largest = torch.zeros_like(negative).flatten()
            here = token_scores.largest(excess[negative], limit, rows)
            number = min(limit, int(here.sum()))
            ranked = excess.where(negative, -torch.inf).flatten()
            largest[ranked.topk(number).indices] = True
            dropped = (far & (advantages == 0)) | largest.view_as(far)
        trained = (rows.raw("action_mask") != 0) & ~dropped
        metrics = token_scores.clipped_fractions(dropped, advantages, rows)
        return Result(advantages, advantages.clone(), metrics | {"stdD": std}, trained)
