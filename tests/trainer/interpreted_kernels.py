"""The kernels of the output head in Triton's interpreter, beside torch: a process of its own.

Triton decides at its import whether kernels are interpreted, with the environment that it sees
then. Writes a JSON object: case -> what was compared -> the largest difference, relative to the
largest number.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import Tensor

from trinity_buffer.trainer.last_hidden import OutputHead
from trinity_buffer.trainer.token_scores import (
    TORCH,
    Chunk,
    ChunkMath,
    Known,
    Sums,
    head_entropy_changes,
    head_scores,
)


@dataclass(frozen=True)
class Case:
    """A head, what it is given, and what a loss reads of it."""

    tokens: int = 7
    words: int = 700
    width: int = 16
    dtype: torch.dtype = torch.float32
    head_dtype: torch.dtype = torch.float32
    biased: bool = False
    scale: float = 1.0
    softcap: float | None = None
    hot: bool = False
    reads: tuple[str, ...] = ("logprob", "entropy")
    chunk_logits: int | None = 1  # chunks of 256 columns, and a last one


ALL = Case(biased=True, scale=0.3, softcap=2.5, hot=True)
CASES = {
    "plain": Case(),
    "one chunk": Case(words=37, chunk_logits=None),
    "a block of columns and a part of one": Case(words=2507, chunk_logits=None),
    "chunks of a block and a part of one": Case(tokens=3, words=5001, chunk_logits=3 * 2304),
    "one token": Case(tokens=1),
    "no token": Case(tokens=0),
    "a softcap": Case(softcap=2.5),
    "a softcap far away": Case(softcap=50.0),
    "a scale": Case(scale=3.0),
    "a bias": Case(biased=True),
    "temperatures": Case(hot=True),
    "all": ALL,
    "all, one token": replace(ALL, tokens=1),
    "all, no token": replace(ALL, tokens=0),
    "log-probabilities alone": replace(ALL, reads=("logprob",)),
    "entropies alone": replace(ALL, reads=("entropy",)),
    "bfloat16": Case(dtype=torch.bfloat16, head_dtype=torch.bfloat16),
    "bfloat16, all": replace(ALL, dtype=torch.bfloat16, head_dtype=torch.bfloat16),
    "bfloat16, head in float32": replace(ALL, dtype=torch.bfloat16),
    "float32, head in bfloat16": replace(ALL, head_dtype=torch.bfloat16),
    "float16": replace(ALL, dtype=torch.float16, head_dtype=torch.float16),
}
FAR = "rows beyond 2^31 numbers"


def computed(case: Case, how: ChunkMath) -> dict[str, Tensor]:
    """Return scores, gradients and changes of entropy of made-up numbers."""
    torch.manual_seed(0)
    hidden = torch.randn(case.tokens, case.width)
    # Logits grow along the vocabulary: peaks move from chunk to chunk.
    growing = torch.linspace(0.1, 0.5, case.words).unsqueeze(1)
    weight = torch.randn(case.words, case.width) * growing
    bias = torch.randn(case.words) if case.biased else None
    targets = torch.randint(case.words, (case.tokens,))
    heat = torch.rand(case.tokens) + 0.5 if case.hot else None
    hidden = hidden.to(case.dtype).requires_grad_()
    weight = weight.to(case.head_dtype).requires_grad_()
    bias = None if bias is None else bias.to(case.head_dtype).requires_grad_()
    head = OutputHead(weight, bias, case.scale, case.softcap)
    scores = head_scores(hidden, head, targets, case.chunk_logits, temperature=heat, chunk_math=how)
    results = dict(zip(("logprob", "entropy"), scores, strict=True))
    loss = [(results[name] * torch.linspace(-1, 2, case.tokens)).sum() for name in case.reads]
    torch.stack(loss).sum().backward()
    results["change"] = head_entropy_changes(
        hidden, head, case.chunk_logits, temperature=heat, chunk_math=how
    )
    for name, tensor in (("of hidden", hidden), ("of weight", weight), ("of bias", bias)):
        if tensor is not None:
            assert tensor.grad is not None
            results[name] = tensor.grad
    return {name: result.detach().float() for name, result in results.items()}


def differences(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each, relative to the largest number."""
    return {
        name: float((ours[name] - one).abs().max() / one.abs().max().clamp_min(1e-30))
        if one.numel()
        else 0.0
        for name, one in wanted.items()
    }


def far(how: ChunkMath) -> dict[str, Tensor]:
    """Return what is computed of rows that lie beyond what 32 bits count; little is touched."""
    products = torch.linspace(-3, 3, 900).view(3, 300).bfloat16()
    if how.fused:
        apart = 2**30 + 128
        memory = torch.empty(2 * apart + 300, dtype=torch.bfloat16)
        products = memory.as_strided((3, 300), (apart, 1)).copy_(products)
    chunk = Chunk(products, torch.tensor([1, 150, 299]), None, 1.0, None, None)
    sums = how.add(Sums.none(products), chunk)
    known = Known(sums.normalizer(), sums.entropy(), torch.ones(3), torch.ones(3))
    results = dict(zip(("peak", "total", "moment", "chosen"), sums, strict=True))
    how.to_gradient(chunk, known, None)
    return {**results, "gradient": products.float()}


def rounding(how: ChunkMath) -> ChunkMath:
    """Return the kernels, but that torch rounds gradients to 16 bits.

    The interpreter cuts the rest off, where a GPU rounds.
    """

    def to_gradient(chunk: Chunk, known: Known, of_bias: Tensor | None) -> None:
        if chunk.products.dtype == torch.float32:
            return how.to_gradient(chunk, known, of_bias)
        exact = chunk.products.float()
        how.to_gradient(chunk._replace(products=exact), known, of_bias)
        how.to_gradient(chunk, known, None)
        torch.testing.assert_close(chunk.products.float(), exact, rtol=2**-7, atol=1e-6)
        chunk.products.copy_(exact)
        return None

    return how._replace(to_gradient=to_gradient)


def main() -> None:
    """Compare every case."""
    kernels = import_module("trinity_buffer.trainer.head_kernels")  # needs Triton; CASES does not
    ours = rounding(kernels.checked(torch.device("cpu"), torch.float32))
    apart = {
        name: differences(computed(case, ours), computed(case, TORCH))
        for name, case in CASES.items()
    }
    json.dump({**apart, FAR: differences(far(ours), far(TORCH))}, sys.stdout)


if __name__ == "__main__":
    main()
