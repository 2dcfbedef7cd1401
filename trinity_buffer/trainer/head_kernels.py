"""The work on a chunk of the vocabulary as Triton kernels: see `token_scores`, the reference.

A chunk's products are read once, or read and written once, and nothing of their size is allocated.
Sums are in float32. A program sums a row from left to right, and no two programs write to one
place, so the same input gives the same bits.

Imported where Triton is needed, by `token_scores`: many machines have none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from trinity_buffer.trainer.token_scores import TORCH, Chunk, ChunkMath, Known, Sums

BLOCK = 2048
"""Columns that a program has in its registers at a time: 16 for each thread of four warps."""


@triton.jit
def _tanh(x):
    # 1 - exp(-2 |x|) has few digits where x is small: there it is the Taylor series.
    square = x * x
    series = 0.13333333 + square * (-0.053968254 + square * (0.021869488 - square * 0.0088632355))
    near = x * (1.0 + square * (-0.33333333 + square * series))
    shrunk = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(square < 0.09, near, tl.where(x < 0, -far, far))


@triton.jit
def _logits(products, bias, heat, scale, softcap, column, inside):
    """Return the logits of columns, in float32, and the slope of the cap."""
    logits = tl.load(products + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        logits += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    logits *= scale
    slope = 1.0
    if softcap is not None:
        bent = _tanh(logits / softcap)
        logits = bent * softcap
        slope = 1.0 - bent * bent
    if heat is not None:
        logits /= heat
    return logits, slope


@triton.jit
def _heat(temperature, row):
    heat = None
    if temperature is not None:
        heat = tl.load(temperature + row).to(tl.float32)
    return heat


@triton.jit
def add_kernel(
    products,
    stride,
    columns,
    bias,
    scale,
    softcap,
    temperature,
    places,
    peaks,
    totals,
    moments,
    chosen,
    block: tl.constexpr,
) -> None:
    """Add the logits of a row to its sums, block after block."""
    row = tl.program_id(0).to(tl.int64)  # rows times columns may pass 2**31
    products += row * stride
    heat = _heat(temperature, row)
    peak = tl.load(peaks + row)
    total = tl.load(totals + row)
    moment = tl.load(moments + row)
    for begin in range(0, columns, block):
        column = begin + tl.arange(0, block)
        inside = column < columns
        logits, _ = _logits(products, bias, heat, scale, softcap, column, inside)
        highest = tl.maximum(peak, tl.max(tl.where(inside, logits, float("-inf")), 0))
        moved = peak - highest
        below = tl.where(inside, logits - highest, 0.0)
        weights = tl.where(inside, tl.exp(below), 0.0)
        moment = (moment + total * moved) * tl.exp(moved) + tl.sum(weights * below, 0)
        total = total * tl.exp(moved) + tl.sum(weights, 0)
        peak = highest
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    tl.store(moments + row, moment)
    place = tl.load(places + row)
    inside = (place >= 0) & (place < columns)
    logit, _ = _logits(products, bias, heat, scale, softcap, place, inside)
    tl.store(chosen + row, logit, mask=inside)


@triton.jit
def gradient_kernel(
    products,
    stride,
    columns,
    bias,
    scale,
    softcap,
    temperature,
    places,
    normalizers,
    entropies,
    of_logprob,
    of_entropy,
    block: tl.constexpr,
) -> None:
    """Replace a block of a row's products by the gradient with respect to them.

    With p = exp(l), l = z - normalizer: d logprob / dz = 1[target] - p, dH / dz = -p (l + H).
    """
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    heat = _heat(temperature, row)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    logits, slope = _logits(products, bias, heat, scale, softcap, column, inside)
    below = logits - tl.load(normalizers + row)
    share = tl.exp(below)
    outer = tl.load(of_logprob + row)
    if of_entropy is None:
        gradient = -outer * share
    else:
        slant = (below + tl.load(entropies + row)) * tl.load(of_entropy + row)
        gradient = -(slant + outer) * share
    gradient = tl.where(column == tl.load(places + row), gradient + outer, gradient)
    if heat is not None:
        gradient /= heat
    gradient = gradient * slope * scale
    tl.store(products + column, gradient.to(products.dtype.element_ty), mask=inside)


@triton.jit
def entropy_kernel(
    products,
    stride,
    columns,
    bias,
    scale,
    softcap,
    temperature,
    normalizers,
    entropies,
    changes,
    block: tl.constexpr,
) -> None:
    """Sum p^2 (H + log p) over a row."""
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    heat = _heat(temperature, row)
    normalizer = tl.load(normalizers + row)
    entropy = tl.load(entropies + row)
    change = normalizer * 0.0
    for begin in range(0, columns, block):
        column = begin + tl.arange(0, block)
        inside = column < columns
        logits, _ = _logits(products, bias, heat, scale, softcap, column, inside)
        below = logits - normalizer
        change += tl.sum(tl.where(inside, tl.exp(2.0 * below) * (below + entropy), 0.0), 0)
    tl.store(changes + row, change)


def _launch(kernel: Any, chunk: Chunk, *rest: Tensor | None, blocks: int = 1) -> None:
    """Run a kernel for each row of a chunk, and each block of it."""
    (rows, columns), stride = chunk.products.shape, chunk.products.stride(0)
    if rows:
        with torch.cuda.device_of(chunk.products):
            # All of a chunk but its places, which not every kernel takes.
            kernel[rows, blocks](chunk.products, stride, columns, *chunk[2:], *rest, block=BLOCK)


def _add(sums: Sums, chunk: Chunk) -> Sums:
    _launch(add_kernel, chunk, chunk.places, *sums)
    return sums


def _to_gradient(chunk: Chunk, known: Known, of_bias: Tensor | None) -> None:
    outer = known.of_logprob
    outer = torch.zeros_like(known.normalizer) if outer is None else outer
    blocks = triton.cdiv(chunk.products.shape[1], BLOCK)
    rest = (chunk.places, known.normalizer, known.entropy, outer, known.of_entropy)
    _launch(gradient_kernel, chunk, *rest, blocks=blocks)
    if of_bias is not None:
        of_bias.copy_(chunk.products.sum(0, dtype=torch.float32))


def _entropy_change(chunk: Chunk, known: Known) -> Tensor:
    change = torch.zeros_like(known.entropy)
    _launch(entropy_kernel, chunk, known.normalizer, known.entropy, change)
    return change


FUSED = ChunkMath(_add, _to_gradient, _entropy_change, fused=True)
"""Kernels: of products in float32, bfloat16 or float16."""


def checked(device: torch.device, dtype: torch.dtype) -> ChunkMath:
    """Return `FUSED`, after each kernel was compiled, was run and said what torch says.

    So that one that cannot be compiled is known of before anything is computed with it.

    Raises:
        RuntimeError: a kernel cannot be compiled or run on the device, or says something else.
    """
    try:
        pairs = zip(_sample(FUSED, device, dtype), _sample(TORCH, device, dtype), strict=True)
        apart = [not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3) for ours, theirs in pairs]
    except TritonError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if any(apart):
        raise RuntimeError(f"Triton {triton.__version__} computes other numbers than torch")
    return FUSED


def _sample(how: ChunkMath, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return the kernels' results for made-up products, with every option of a head in use."""
    rows, columns = 3, BLOCK + 16  # a full block, and a part of one

    def numbers(*shape: int) -> Tensor:  # not random: torch's generators must not advance
        size = math.prod(shape)
        return torch.linspace(0.5, 2, size, device=device).view(shape)

    places = torch.tensor([-1, 5, columns - 1], device=device)
    bias, heat = numbers(columns).sin().to(dtype), numbers(rows)

    def chunk() -> Chunk:
        products = (numbers(rows, columns) * 40).sin().mul(4).to(dtype)
        return Chunk(products, places, bias, 1.5, 3.0, heat)

    sums = how.add(Sums.none(numbers(rows, 1).to(dtype)), chunk())
    known = Known(sums.normalizer(), sums.entropy(), numbers(rows), numbers(rows).flip(0))
    results = [how.entropy_change(chunk(), known)]
    for each in (known, known._replace(of_entropy=None)):
        changed = chunk()
        how.to_gradient(changed, each, None)
        results.append(changed.products.float())
    return [*sums, *(result * columns for result in results)]  # a share is about 1 / columns
