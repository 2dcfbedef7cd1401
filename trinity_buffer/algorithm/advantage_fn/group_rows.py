"""Rows of a batch, scored group by group: the arithmetic of lists at the trainer's door."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trinity_buffer.algorithm.advantage_fn.rows import Rows
from trinity_buffer.algorithm.group_scores import Over, Rewards, as_rewards, by_run, numbered

Score = Callable[..., Rewards]
"""From the rewards of one group, and the weights of its rows where they have some, to scores."""


def scored_rows(rows: Rows, score: Score, over: Over) -> Tensor:
    """Return ``score`` of the rewards of every group, in row order, float64, shape ``(B,)``.

    Over runs, ``score`` gets one reward for each run whose rows have equal ones; where they have
    rewards of their own it gets all rows, with their weights.

    One transfer from the device: groups are few and small, and the same functions score lists of
    experiences.
    """
    sums = rows.scores()
    rewards = sums.tolist()
    found = torch.zeros(len(rewards), dtype=torch.float64)
    names = rows.runs() if over == "runs" else None
    for members in rows.groups():
        runs = None if names is None else numbered([names[row] for row in members])
        values, weights = by_run(as_rewards([rewards[row] for row in members]), runs)
        scores = score(values) if weights is None else score(values, weights)
        spread = scores if runs is None or weights is not None else scores[runs]
        found[members] = torch.from_numpy(spread)
    return found.to(sums.device)


def broadcast(scores: Tensor, rows: Rows, like: Tensor) -> Tensor:
    """Return ``scores`` of shape ``(B,)`` on every action token, 0 elsewhere, shape ``(B, T)``."""
    spread = scores.to(like.dtype).unsqueeze(-1).expand_as(like)
    return spread.where(rows.mask, 0.0)
