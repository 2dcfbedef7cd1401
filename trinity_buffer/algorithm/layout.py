"""Denominators that travel: what a loss must know of the whole gradient step.

A loss sees one micro-batch of one rank. If it divided by what it sees, the gradient would depend on
how the step was cut. With a `BatchLayout` it sums over its micro-batch and divides by the counts of
the step, so that padded, packed, accumulated and data-parallel runs of a step give one gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from trinity_buffer.errors import InvalidArgumentError

Part = Literal["usual", "expert"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole gradient step, over all its micro-batches and ranks.

    Attributes:
        tokens: tokens with an action mask.
        sequences: rows, fully masked ones included (a pair is two rows).
        groups: distinct groups of these rows.
        active_sequences: rows with at least one action token; None: not counted.
    """

    tokens: int
    sequences: int
    groups: int
    active_sequences: int | None = None

    @classmethod
    def count(
        cls,
        action_mask: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        group_index: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Totals:
        """Return the counts of one batch that is the step, of all its rows or of ``rows`` alone.

        Reads numbers back from the device: count once per step, never in a loss.

        Args:
            action_mask: ``[B, T]``, or ``[T]`` with ``cu_seqlens``.
            cu_seqlens: ``[N + 1]`` boundaries of packed sequences.
            group_index: ``[N]`` group of each row; None: every row is a group of its own.
            rows: ``[N]`` bool, the rows that count.
        """
        tokens = tokens_per_row(action_mask, cu_seqlens)
        counted = torch.ones_like(tokens, dtype=torch.bool) if rows is None else rows.bool()
        # On the processor: distinct groups are counted by a set.
        groups = torch.arange(len(tokens)) if group_index is None else group_index.cpu()
        return cls(
            tokens=int(tokens[counted].sum()),
            sequences=int(counted.sum()),
            groups=len(set(groups[counted.cpu()].tolist())),
            active_sequences=int((tokens[counted] > 0).sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Boundaries of a micro-batch's sequences, and the denominators of the step it belongs to.

    Attributes:
        total: counts over all rows of the step.
        usual: counts over the rows that the policy itself generated.
        expert: counts over the rows of an expert.
        cu_seqlens: ``[N + 1]`` boundaries of packed sequences; None: rows of a padded ``[B, T]``.
        normalizer: the constant that ``...-norm`` modes divide by, the same for a whole run
            (by default the run's ``max_tokens``).
        world_size: ranks whose gradients the trainer averages; a loss multiplies by it, so that the
            *mean* over ranks is the gradient of the step.
    """

    total: Totals
    usual: Totals
    expert: Totals
    cu_seqlens: Tensor | None = None
    normalizer: float | None = None
    world_size: int = 1

    @property
    def global_tokens(self) -> int:
        """Action tokens of the step."""
        return self.total.tokens

    @property
    def global_sequences(self) -> int:
        """Rows of the step."""
        return self.total.sequences

    @property
    def global_groups(self) -> int:
        """Groups of the step."""
        return self.total.groups

    def part(self, kind: Part) -> BatchLayout:
        """Return this layout with the denominators of the usual, or of the expert, rows alone."""
        return replace(self, total=self.usual if kind == "usual" else self.expert)

    @classmethod
    def of_step(
        cls,
        action_mask: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        group_index: Tensor | None = None,
        expert_mask: Tensor | None = None,
        normalizer: float | None = None,
    ) -> BatchLayout:
        """Return the layout of a batch that is a whole step on one rank.

        Args:
            action_mask: ``[B, T]``, or ``[T]`` with ``cu_seqlens``.
            cu_seqlens: ``[N + 1]`` boundaries of packed sequences.
            group_index: ``[N]`` group of each row; None: every row is a group of its own.
            expert_mask: ``[N]`` bool; None: all rows are usual ones.
            normalizer: the run's constant.
        """
        rows = len(action_mask) if cu_seqlens is None else len(cu_seqlens) - 1
        expert = torch.zeros(rows, dtype=torch.bool) if expert_mask is None else expert_mask.bool()
        if expert.shape != (rows,):
            raise InvalidArgumentError(
                f"expert_mask must have one entry per row ({rows}), "
                f"its shape is {tuple(expert.shape)}"
            )
        expert = expert.to(action_mask.device)
        total, usual, ours = (
            Totals.count(action_mask, cu_seqlens=cu_seqlens, group_index=group_index, rows=chosen)
            for chosen in (None, ~expert, expert)
        )
        return cls(
            total=total, usual=usual, expert=ours, cu_seqlens=cu_seqlens, normalizer=normalizer
        )


def tokens_per_row(action_mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return how many action tokens each row has, shape ``[N]``."""
    counted = (action_mask != 0).long()
    if cu_seqlens is None:
        return counted.sum(-1)
    # Differences of a running sum: no loop over rows, and no scatter.
    running = torch.nn.functional.pad(counted.cumsum(0), (1, 0))
    return running[cu_seqlens[1:].long()] - running[cu_seqlens[:-1].long()]
