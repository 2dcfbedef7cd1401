"""What is computed of a chunk of the vocabulary: in torch here, in Triton in `head_kernels`.

`token_scores` makes the products of a chunk and asks for three things: that the chunk be added to
the sums, that the gradient take the place of its products, and how much the entropy will change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TORCH", "Chunk", "ChunkMath", "Known", "Sums"]


class Chunk(NamedTuple):
    """A chunk's products, and what makes logits z of them.

    z = softcap tanh((products + bias) scale / softcap) / temperature, in float32 (or float64).

    Attributes:
        products: ``hidden @ weight.T``, ``[T, columns]``; they are overwritten.
        places: the column of each token's target, ``[T]``; outside the chunk if it is not in it.
        bias: ``[columns]``, or None.
        scale: what the sum is multiplied by.
        softcap: None: nothing is bent.
        temperature: ``[T]``; None: 1.
    """

    products: Tensor
    places: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    temperature: Tensor | None


class Sums(NamedTuple):
    """What is known of every token's logits z so far, each ``[T]``.

    Attributes:
        peak: the largest z.
        total: sum of exp(z - peak).
        moment: sum of exp(z - peak) (z - peak), so that entropies near 0 lose no digits.
        chosen: the logit of the token itself, once its chunk was seen.
    """

    peak: Tensor
    total: Tensor
    moment: Tensor
    chosen: Tensor

    @classmethod
    def none(cls, hidden: Tensor) -> Sums:
        """Return the sums before the first chunk, of the tokens of ``hidden`` ``[T, D]``."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # Tensors of their own: Triton compiles anew for those that begin at an odd address.
        zeros = [hidden.new_zeros(len(hidden), dtype=dtype) for _ in range(3)]
        return cls(torch.full_like(zeros[0], torch.finfo(dtype).min), *zeros)

    def normalizer(self) -> Tensor:
        """Return the logarithm of the sum of exp(z)."""
        return self.peak + self.total.log()

    def entropy(self) -> Tensor:
        """Return the entropy of the distribution of z."""
        return self.total.log() - self.moment / self.total


class Known(NamedTuple):
    """What is known of every token once all chunks were summed, each ``[T]``.

    Attributes:
        normalizer: see `Sums`.
        entropy: see `Sums`.
        of_logprob: the gradient with respect to the log-probability; None: there is none.
        of_entropy: the gradient with respect to the entropy; None: there is none.
    """

    normalizer: Tensor
    entropy: Tensor
    of_logprob: Tensor | None = None
    of_entropy: Tensor | None = None


class ChunkMath(NamedTuple):
    """One way to compute what is needed of a chunk.

    Attributes:
        add: return the sums with a chunk's logits added.
        to_gradient: replace a chunk's products by the gradient with respect to them, and fill in
            that of the bias, ``[columns]``, where there is one.
        entropy_change: return the sum over a chunk of p^2 (H + log p), ``[T]``.
        fused: whether nothing of a chunk's size is allocated.
    """

    add: Callable[[Sums, Chunk], Sums]
    to_gradient: Callable[[Chunk, Known, Tensor | None], None]
    entropy_change: Callable[[Chunk, Known], Tensor]
    fused: bool


def _add(sums: Sums, chunk: Chunk) -> Sums:
    logits = _logits(chunk)[0]
    place, inside = _within(chunk.places, logits.shape[1])
    chosen = logits.gather(1, place.unsqueeze(1)).squeeze(1).where(inside, sums.chosen)
    peak = torch.maximum(sums.peak, logits.amax(1))
    moved = sums.peak - peak
    below = logits.sub_(peak.unsqueeze(1))
    weights = below.exp()
    total = sums.total * moved.exp() + weights.sum(1)
    moment = (sums.moment + sums.total * moved) * moved.exp() + weights.mul_(below).sum(1)
    return Sums(peak, total, moment, chosen)


def _to_gradient(chunk: Chunk, known: Known, of_bias: Tensor | None) -> None:
    logits, slope = _logits(chunk)
    gradient = _of_logits(logits, chunk.places, known)
    if chunk.temperature is not None:
        gradient = gradient.div_(chunk.temperature.unsqueeze(1))
    if slope is not None:
        gradient = gradient.mul_(slope)
    chunk.products.copy_(gradient.mul_(chunk.scale))
    if of_bias is not None:
        of_bias.copy_(gradient.sum(0))


def _entropy_change(chunk: Chunk, known: Known) -> Tensor:
    below = _logits(chunk)[0].sub_(known.normalizer.unsqueeze(1))
    squares = (below * 2).exp_()
    return below.add_(known.entropy.unsqueeze(1)).mul_(squares).sum(1)


def _logits(chunk: Chunk) -> tuple[Tensor, Tensor | None]:
    """Return the logits, and the slope of a cap; they may lie where the products were.

    The logits are divided by the temperature, the slope is not.
    """
    raw = chunk.products
    logits = raw if raw.dtype == torch.float64 else raw.float()
    if chunk.bias is not None:
        logits = logits + chunk.bias
    if chunk.scale != 1:
        logits = logits * chunk.scale
    slope = None
    if chunk.softcap is not None:
        bent = torch.tanh(logits / chunk.softcap)
        logits, slope = bent * chunk.softcap, 1 - bent.square()
    heat = chunk.temperature
    return logits if heat is None else logits.div_(heat.unsqueeze(1)), slope


def _of_logits(logits: Tensor, places: Tensor, known: Known) -> Tensor:
    """Return the gradient with respect to ``logits``, which are overwritten.

    With p = exp(l), l = z - normalizer: d logprob / dz = 1[target] - p, dH / dz = -p (l + H).
    """
    below = logits.sub_(known.normalizer.unsqueeze(1))
    of_logprob = known.of_logprob
    if of_logprob is None:
        of_logprob = torch.zeros_like(known.normalizer)
    if known.of_entropy is None:
        gradient = below.exp_().mul_(of_logprob.neg().unsqueeze(1))
    else:
        share = below.exp()
        gradient = below.add_(known.entropy.unsqueeze(1)).mul_(known.of_entropy.unsqueeze(1))
        gradient = gradient.add_(of_logprob.unsqueeze(1)).mul_(share).neg_()
    place, inside = _within(places, logits.shape[1])
    # Not scatter_add_: that of a GPU has no fixed order, and each row has one place only.
    here = gradient.gather(1, place.unsqueeze(1)) + of_logprob.where(inside, 0.0).unsqueeze(1)
    return gradient.scatter_(1, place.unsqueeze(1), here)


def _within(places: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return a column of the chunk for every target, and whether it is the target's."""
    return places.clamp(0, columns - 1), (places >= 0) & (places < columns)


TORCH = ChunkMath(_add, _to_gradient, _entropy_change, fused=False)
"""Any device, and float64: the reference."""
