"""A tiny model, four rows, and the gradient of one loss over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import trinity_buffer as tb
from tests.trainer.qwen import qwen3
from trinity_buffer.trainer.parallel import whole

LENGTHS = (5, 9, 12, 3)


def model_of(*, tied: bool) -> Any:
    """Return a model whose head is its embedding, or is not."""
    return qwen3(tie_word_embeddings=tied, attn_implementation="sdpa")


def rows_of(*numbers: int) -> list[Tensor]:
    """Return some of the rows."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 37, (length,), generator=generator) for length in LENGTHS]
    return [rows[number] for number in numbers]


def batch_of(rows: Sequence[Tensor], layout: str) -> dict[str, Any]:
    """Return the rows as a micro-batch."""
    if layout == "padded":
        there = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], True)
        return {"input_ids": pad_sequence(list(rows), True), "attention_mask": there}
    return {
        "input_ids": torch.cat(list(rows)),
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows]),
        "cu_seqlens": torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32),
        "max_seqlen": max(map(len, rows)),
    }


def loss(model: Any, rows: Sequence[Tensor], layout: str) -> Tensor:
    """Return a number that reads log-probs and entropies, over the tokens of all four rows."""
    scores = tb.token_scores(model, batch_of(rows, layout))
    return (scores.logprob.square() + 0.1 * scores.entropy).sum() / sum(LENGTHS)


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradient of every weight that has one, whole."""
    found = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return {name: whole(gradient).clone() for name, gradient in found}
