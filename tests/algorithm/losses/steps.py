"""One gradient step, cut in every way: padded, packed, in micro-batches, over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trinity_buffer.algorithm import BatchLayout

LENGTHS = (5, 3, 9, 4, 1, 7, 6, 2)
PROMPTS = (1, 2, 3, 1, 1, 2, 6, 1)  # row 4 and row 6 have no action token at all
NORMALIZER = 12.0

Batch = dict[str, Tensor]
Loss = Callable[[Batch, BatchLayout], Tensor]
Cut = Sequence[Sequence[Sequence[int]]]
"""Rows of every micro-batch of every rank."""

WHOLE: Cut = [[[0, 1, 2, 3, 4, 5, 6, 7]]]
CUTS: dict[str, Cut] = {
    "accumulated": [[[0, 1, 2, 3], [6, 7], [4, 5]]],
    "two ranks": [[[2, 3, 0, 1], [4, 5]], [[6, 7]]],
    "a rank without rows": [[[2, 3, 0, 1], [6, 7, 4, 5]], [[], []]],
}


@dataclass(frozen=True)
class Step:
    """The tensors of a step: per token ``[T]`` packed, per row ``[N]``."""

    tokens: Batch
    rows: Batch

    @property
    def bounds(self) -> list[int]:
        """Where each row begins, and where the last one ends."""
        return [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]

    def microbatch(self, rows: Sequence[int], *, packed: bool) -> tuple[Batch, Tensor | None]:
        """Return the tensors of ``rows``, and their boundaries if they are packed."""
        spans = [torch.arange(self.bounds[i], self.bounds[i + 1]) for i in rows]
        per_row = {name: tensor[list(rows)] for name, tensor in self.rows.items()}
        if packed:
            index = torch.cat([torch.empty(0, dtype=torch.int64), *spans])
            ends = torch.tensor([0, *(len(span) for span in spans)], dtype=torch.int32)
            per_token = {name: tensor[index] for name, tensor in self.tokens.items()}
            return per_token | per_row, ends.cumsum(0, dtype=torch.int32)
        index = torch.full((0, 1), -1)
        if spans:
            index = torch.nn.utils.rnn.pad_sequence(spans, batch_first=True, padding_value=-1)
        per_token = {
            name: torch.where(index >= 0, tensor[index], torch.zeros((), dtype=tensor.dtype))
            for name, tensor in self.tokens.items()
        }
        return per_token | per_row, None

    def layout(self) -> BatchLayout:
        """Return the denominators of the step."""
        batch, _ = self.microbatch(range(len(LENGTHS)), packed=False)
        return BatchLayout.of_step(
            batch["action_mask"],
            group_index=batch["group_index"],
            expert_mask=batch["expert_mask"],
            normalizer=NORMALIZER,
        )

    def gradient(self, loss: Loss, name: str, cut: Cut, *, packed: bool) -> tuple[Tensor, Tensor]:
        """Return the loss and its gradient in the packed tensor ``name``: means over the ranks."""
        losses, gradients = [], []
        for microbatches in cut:
            leaf = self.tokens[name].clone().requires_grad_()
            step = replace(self, tokens={**self.tokens, name: leaf})
            total = torch.zeros((), dtype=leaf.dtype)
            for rows in microbatches:
                batch, cu_seqlens = step.microbatch(rows, packed=packed)
                layout = replace(self.layout(), cu_seqlens=cu_seqlens, world_size=len(cut))
                total = total + loss(batch, layout)
            total.backward()
            losses.append(total.detach())
            gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        return torch.stack(losses).mean(), torch.stack(gradients).mean(0)


def make_step(dtype: torch.dtype, seed: int = 0) -> Step:
    """Return a step of eight rows: two of an expert, a multi-turn one, two without a token."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(total, generator=generator, dtype=dtype) * (high - low) + low

    position = torch.cat([torch.arange(n) for n in LENGTHS])
    prompt = torch.repeat_interleave(torch.tensor(PROMPTS), torch.tensor(LENGTHS))
    action_mask = (position >= prompt) & (position != 5)  # a hole, as an observation leaves
    logprob = uniform(-3.0, -0.05)
    tokens = {
        "logprob": logprob,
        "old_logprob": logprob + uniform(-0.6, 0.6),
        "ref_logprob": logprob + uniform(-0.6, 0.6),
        "advantages": uniform(-2.0, 2.0),
        "entropy": uniform(0.1, 2.0),
        "action_mask": action_mask,
    }
    rows: dict[str, Any] = {
        "expert_mask": torch.tensor([0, 0, 1, 0, 0, 1, 0, 0], dtype=torch.bool),
        "group_index": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
        "step": torch.full((len(LENGTHS),), 3, dtype=torch.int32),
    }
    return Step(tokens, rows)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Return if the largest difference is a rounding error of the largest entry."""
    allowed = 1e-12 if expected.dtype == torch.float64 else 1e-6
    scale = float(expected.abs().max())
    assert scale > 0.0
    assert float((actual - expected).abs().max()) <= allowed * scale
