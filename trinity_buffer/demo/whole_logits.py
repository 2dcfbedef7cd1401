"""Scores from all logits at once, as runs were trained before the logits were made in slices.

The sums are the same, added in another order: the last bits differ, and so would the weights of a
replay. So the steps of those runs are replayed with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trinity_buffer.algorithm.advantage_fn.entropy_clip import expected_entropy_change
from trinity_buffer.trainer.policy import TokenScores
from trinity_buffer.trainer.token_scores import predicted


def scores_of_logits(logits: Tensor, microbatch: Mapping[str, Any]) -> TokenScores:
    """Return what `token_scores` returns, from the logits of a micro-batch."""
    ids = microbatch["input_ids"]
    time = ids.dim() - 1
    before = logits.narrow(time, 0, logits.shape[time] - 1)
    before = before if before.dtype == torch.float64 else before.float()
    heat = microbatch.get("temperature")
    if heat is not None:
        before = before / heat.narrow(time, 1, ids.shape[time] - 1).unsqueeze(-1)
    every = torch.log_softmax(before, -1)
    following = ids.narrow(time, 1, ids.shape[time] - 1).long()
    logprob = every.gather(-1, following.unsqueeze(-1)).squeeze(-1)
    entropy = -(every.exp() * every).sum(-1)
    real = predicted(microbatch)
    return TokenScores(*(functional.pad(x, (1, 0)).where(real, 0.0) for x in (logprob, entropy)))


def entropy_changes_of_logits(logits: Tensor, microbatch: Mapping[str, Any]) -> Tensor:
    """Return what `entropy_changes` returns, from the logits of a micro-batch."""
    heat = microbatch.get("temperature")
    if heat is not None:
        logits = logits / torch.roll(heat, -1, -1).unsqueeze(-1)
    return torch.roll(expected_entropy_change(logits), 1, -1).where(predicted(microbatch), 0.0)
