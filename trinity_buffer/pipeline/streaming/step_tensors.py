"""One gradient step as one batch: its micro-batches joined, and what was computed scattered back.

Advantages that compare rows, and penalties whose coefficient adapts, are of the step and not of the
pieces into which memory forces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.streaming.collate import MicroBatch

Tensors = dict[str, Any]

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over data-parallel ranks."""


def joined(microbatches: Sequence[MicroBatch]) -> tuple[Tensors, BatchLayout]:
    """Return all micro-batches as one: padded to the widest, or packed one after another.

    Only tensors that every micro-batch holds are in it.
    """
    first = microbatches[0]
    packed = "cu_seqlens" in first
    names = [n for n in first if all(n in m for m in microbatches)]
    batch: Tensors = {}
    for name in names:
        values = [m[name] for m in microbatches]
        if name == "cu_seqlens":
            batch[name] = _boundaries(values)
        elif isinstance(values[0], Tensor):
            batch[name] = torch.cat(values if packed else _of_one_width(values))
        elif name == "max_seqlen":
            batch[name] = max(values)
    return batch, replace(first.layout, cu_seqlens=batch.get("cu_seqlens"))


def scatter(
    batch: Mapping[str, Any], microbatches: Sequence[MicroBatch], names: Sequence[str]
) -> None:
    """Put the tensors ``names`` of a joined batch back into the micro-batches they belong to."""
    start = 0
    for microbatch in microbatches:
        ids = microbatch["input_ids"]
        place = slice(start, start + len(ids))
        for name in names:
            value: Tensor = batch[name][place]
            microbatch[name] = value if ids.dim() == 1 else value[:, : ids.shape[1]]
        start = place.stop


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of the per-token tensors that were put into a batch, or replaced.

    Raises:
        InvalidArgumentError: one has another shape than the tokens.
    """
    found = [name for name, value in after.items() if before.get(name) is not value]
    for name in found:
        if after[name].shape != after["input_ids"].shape:
            raise InvalidArgumentError(
                f"{name} has the shape {tuple(after[name].shape)}; what is computed over a step "
                f"has one value per token, {tuple(after['input_ids'].shape)}"
            )
    return found


def recount(
    batch: Mapping[str, Any], microbatches: Sequence[MicroBatch], reduce: Reduce | None
) -> None:
    """Give the micro-batches the denominators of the action mask that a joined batch has now."""
    boundaries, groups = batch.get("cu_seqlens"), batch["group_index"]
    expert = batch.get("expert_mask", torch.zeros_like(groups, dtype=torch.bool))
    mask = batch["action_mask"]
    old = microbatches[0].layout
    found = []
    for before, rows in ((old.total, None), (old.usual, ~expert), (old.expert, expert)):
        mine = Totals.count(mask, cu_seqlens=boundaries, group_index=groups, rows=rows)
        counts = torch.tensor([mine.tokens, mine.active_sequences or 0], dtype=torch.float64)
        tokens, active = (counts if reduce is None else reduce(counts)).tolist()
        # Rows and groups are what they were.
        found.append(replace(before, tokens=int(tokens), active_sequences=int(active)))
    for microbatch in microbatches:
        microbatch.layout = replace(
            microbatch.layout, total=found[0], usual=found[1], expert=found[2]
        )


def _boundaries(pieces: Sequence[Tensor]) -> Tensor:
    ends = [pieces[0]]
    for piece in pieces[1:]:
        ends.append(piece[1:] + ends[-1][-1])
    return torch.cat(ends)


def _of_one_width(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return ``[N, T]`` tensors padded on the right; ``[N]`` tensors as they are."""
    if pieces[0].dim() == 1:
        return list(pieces)
    width = max(piece.shape[1] for piece in pieces)
    pad = torch.nn.functional.pad
    return [pad(piece, (0, width - piece.shape[1])) for piece in pieces]
