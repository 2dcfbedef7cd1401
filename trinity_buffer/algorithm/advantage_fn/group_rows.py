"""Rows of a batch, scored group by group: the arithmetic of lists at the trainer's door."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trinity_buffer.algorithm.advantage_fn.rows import Rows
from trinity_buffer.algorithm.group_scores import Rewards, as_rewards


def scored_rows(rows: Rows, score: Callable[[Rewards], Rewards]) -> Tensor:
    """Return ``score`` of the rewards of every group, in row order, float64, shape ``(B,)``.

    One transfer from the device: groups are few and small, and the same functions score lists of
    experiences.
    """
    sums = rows.scores()
    rewards = sums.tolist()
    found = torch.zeros(len(rewards), dtype=torch.float64)
    for members in rows.groups():
        found[members] = torch.from_numpy(score(as_rewards([rewards[row] for row in members])))
    return found.to(sums.device)


def broadcast(scores: Tensor, rows: Rows, like: Tensor) -> Tensor:
    """Return ``scores`` of shape ``(B,)`` on every action token, 0 elsewhere, shape ``(B, T)``."""
    spread = scores.to(like.dtype).unsqueeze(-1).expand_as(like)
    return spread.where(rows.mask, 0.0)
