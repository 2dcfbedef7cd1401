"""Log-probability and entropy of given tokens, without ever holding the logits of a batch.

Logits of 16k tokens over a vocabulary of 152k take 10 GB in float32, and several times that with
their gradients. Here the output head is applied to slices of the vocabulary, one after another, in
the forward pass and once more in the backward pass; only sums over the vocabulary are kept.

Three things are asked of a chunk's products, of torch here or of Triton in `head_kernels`: that the
chunk be added to the sums, that the gradient take the place of its products, and how much the
entropy will change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from subprocess import SubprocessError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.train.microbatch import MicroBatch
from trinity_buffer.trainer.last_hidden import Batch, OutputHead, last_hidden
from trinity_buffer.trainer.policy import TokenScores


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


_logger = logging.getLogger(__name__)

CHUNK_LOGITS = 2**24
"""So many logits are held at a time: 64 MiB in float32, of which there are two or three."""
CHUNK_BYTES = 2**29
"""So much a chunk's logits take on a GPU with Triton, where there is nothing else of their size."""


def token_scores(model: Any, microbatch: Batch, *, chunk_logits: int | None = None) -> TokenScores:
    """Return log-probability and entropy of every token of a micro-batch.

    They are those at the temperature that each token was sampled at, which is 1 unless the
    micro-batch says otherwise. Element t describes token t and comes from what precedes it; it is 0
    at the first token of a sequence and at padding. float32, or float64 of a model in float64.

    Args:
        model: a causal language model of transformers, or one that has ``last_hidden``.
        microbatch: ``input_ids`` ``[N, T]`` right-padded, with ``attention_mask`` if there is
            padding; or ``[T]`` packed, with ``cu_seqlens`` ``[N + 1]``, ``position_ids`` and
            ``max_seqlen``; with ``temperature``, like ``input_ids``, if some is not 1.
        chunk_logits: how many logits are held at a time, but at least those of 256 words; less
            memory, more passes. None: what suits the device, see `chunk_columns`.

    Raises:
        InvalidArgumentError: the logits of the model are not those of a linear output head, or rows
            are padded on the left.
        TrainingError: the step has recorded log-probabilities that no model's can be compared with.
    """
    hidden, head, targets, places, heat = _predictions(model, microbatch)
    values = head_scores(hidden, head, targets, chunk_logits, temperature=heat)
    return TokenScores(*(_placed(scores, places, microbatch["input_ids"]) for scores in values))


@torch.no_grad()
def entropy_changes(model: Any, microbatch: Batch, *, chunk_logits: int | None = None) -> Tensor:
    """Return `expected_entropy_change` at every token: the column ``necs`` of Clip-V.

    Aligned as `token_scores`, whose arguments it takes; it has no gradient.
    """
    hidden, head, _, places, heat = _predictions(model, microbatch)
    changes = head_entropy_changes(hidden, head, chunk_logits, temperature=heat)
    return _placed(changes, places, microbatch["input_ids"])


def _predictions(
    model: Any, microbatch: Batch
) -> tuple[Tensor, OutputHead, Tensor, Tensor, Tensor | None]:
    """Return the hidden state ``[T, D]`` before each predicted token, the head, tokens, places.

    Last, ``[T]``, what the logits are divided by; None: by nothing. Of a micro-batch without rows
    they are those of a stand-in.
    """
    read = microbatch if microbatch["input_ids"].numel() else stand_in(microbatch)
    if isinstance(read, MicroBatch):
        read.require_scorable()
    elif not torch.compiler.is_compiling():  # a look at the device, for batches of a user's own
        _require_padded_on_the_right(read)
    hidden, head = last_hidden(model, read)
    places = predicted(read).flatten().nonzero().squeeze(-1)
    targets, heat = read["input_ids"].flatten()[places].long(), read.get("temperature")
    heat = None if heat is None else heat.flatten()[places]
    return hidden.flatten(0, -2)[places - 1], head, targets, places, heat


def _require_padded_on_the_right(microbatch: Batch) -> None:
    """Raise if a token follows padding: its position and its place in the row would be others."""
    there, limits = microbatch.get("attention_mask"), microbatch.get("cu_seqlens")
    if limits is None and there is not None and bool((there != 0).int().diff(dim=-1).gt(0).any()):
        raise InvalidArgumentError(
            "attention_mask: a token follows padding, and rows must be padded on the right alone: "
            "move the tokens of each row to its begin, or pack the rows (cu_seqlens)"
        )


def _placed(values: Tensor, places: Tensor, ids: Tensor) -> Tensor:
    """Return the shape of ``ids`` with ``values`` at ``places``, and 0 elsewhere."""
    if not ids.numel():  # nothing is kept of what stood in, but the way back through the model
        return values[:0].view(ids.shape)
    return values.new_zeros(ids.numel()).index_copy(0, places, values).view(ids.shape)


def stand_in(microbatch: Batch) -> dict[str, Any]:
    """Return two tokens in the layout of a micro-batch without rows.

    Few models take no rows. One that is given these, of which nothing is kept, takes part in what
    data-parallel ranks do together, forward and backward, and its gradient is 0.
    """
    ids = microbatch["input_ids"]
    shape = (1, 2) if ids.dim() == 2 else (2,)
    zeros = ids.new_zeros(shape)
    tokens: dict[str, Any] = {"input_ids": zeros, "position_ids": torch.arange(2).to(zeros)}
    tokens["position_ids"] = tokens["position_ids"].expand(shape)
    limits = microbatch.get("cu_seqlens")
    if limits is not None:
        tokens |= {"cu_seqlens": limits.new_tensor([0, 2]), "max_seqlen": 2}
    return tokens


def head_scores(
    hidden: Tensor,
    head: OutputHead,
    targets: Tensor,
    chunk_logits: int | None = None,
    *,
    temperature: Tensor | None = None,
    chunk_math: ChunkMath | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy ``[T]`` of ``targets`` under ``hidden`` ``[T, D]``.

    Args:
        hidden: the last hidden state before each target.
        head: what makes logits of them.
        targets: token ids.
        chunk_logits: see `token_scores`.
        temperature: ``[T]``, what the logits are divided by; None: by nothing.
        chunk_math: how a chunk is computed; None: the fastest way that the device has.
    """
    how = _how(hidden, head, chunk_logits, temperature, chunk_math)
    return _HeadScores.apply(hidden, head.weight, head.bias, targets, how)  # type: ignore[no-any-return,no-untyped-call]  # autograd.Function has no types


@torch.no_grad()
def head_entropy_changes(
    hidden: Tensor,
    head: OutputHead,
    chunk_logits: int | None = None,
    *,
    temperature: Tensor | None = None,
    chunk_math: ChunkMath | None = None,
) -> Tensor:
    """Return the sum over the vocabulary of ``p^2 (H + log p)``, ``[T]``; see `head_scores`."""
    how = _how(hidden, head, chunk_logits, temperature, chunk_math)
    nowhere = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    sums = _sums(hidden, head.weight, head.bias, nowhere, how)
    known = Known(sums.normalizer(), sums.entropy())
    change = torch.zeros_like(known.entropy)
    for _, _, chunk in _chunks(hidden, head.weight, head.bias, nowhere, how):
        change += how.math.entropy_change(chunk, known)
    return change


def chunk_columns(hidden: Tensor, words: int, chunk_logits: int | None, *, fused: bool) -> int:
    """Return how much of a vocabulary of ``words`` is looked at in one go.

    All of it, or a multiple of 256: matrix products of odd widths take a GPU several times as long.
    By default the logits of a chunk are 512 MiB with kernels, 2**26 by torch on a GPU, and 2**24
    elsewhere. It depends on nothing that changes from run to run, such as memory that is free,
    since other chunks have other last bits.

    Raises:
        InvalidArgumentError: ``chunk_logits`` is below 1.
    """
    if chunk_logits is None:
        chunk_logits = CHUNK_BYTES // hidden.dtype.itemsize if fused else CHUNK_LOGITS
        if hidden.is_cuda and not fused:
            chunk_logits *= 4  # below that, the products wait for each other
    if chunk_logits < 1:
        raise InvalidArgumentError(f"chunk_logits={chunk_logits}: it must be at least 1")
    columns = chunk_logits // max(1, len(hidden))
    return words if columns >= words else min(words, max(256, columns // 256 * 256))


@cache
def math_of_gpu(device: torch.device, dtype: torch.dtype) -> ChunkMath:
    """Return the kernels if they run on the device; else say why not, and what it costs."""
    try:
        kernels = import_module("trinity_buffer.trainer.head_kernels")
        return kernels.checked(device, dtype)  # type: ignore[no-any-return]  # a module, by its name
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernels, and torch's bits are others
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        warn_of_torch(f"{device}: {error}")
        return TORCH


@cache
def warn_of_torch(reason: str) -> None:
    """Say, once for each reason, that the kernels do not run."""
    _logger.warning(
        "log-probabilities are computed by torch alone, which takes about twice the time of the "
        "Triton kernels, since these do not run on %s",
        reason,
    )


class _How(NamedTuple):
    """How logits are made, and how many at a time."""

    scale: float
    softcap: float | None
    temperature: Tensor | None
    columns: int
    math: ChunkMath


def _how(
    hidden: Tensor,
    head: OutputHead,
    most: int | None,
    temperature: Tensor | None,
    math: ChunkMath | None,
) -> _How:
    """Return how ``most`` logits at a time are made of ``hidden``; see `head_scores`."""
    if math is None:
        fits = hidden.is_cuda and hidden.dtype != torch.float64
        math = math_of_gpu(hidden.device, hidden.dtype) if fits else TORCH
    columns = chunk_columns(hidden, len(head.weight), most, fused=math.fused)
    return _How(head.scale, head.softcap, temperature, columns, math)


class _HeadScores(torch.autograd.Function):
    """Sums over the vocabulary, chunk by chunk; see `head_scores`."""

    @staticmethod
    @override
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
    ) -> tuple[Tensor, Tensor]:
        sums = _sums(hidden, weight, bias, targets, how)
        normalizer, entropy = sums.normalizer(), sums.entropy()
        ctx.how = how
        ctx.set_materialize_grads(False)  # entropy is often only looked at: half the work is left
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        return sums.chosen - normalizer, entropy

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        known = Known(normalizer, entropy, *(g if g is None else g.contiguous() for g in gradients))
        wanted = ctx.needs_input_grad
        of_hidden = torch.zeros_like(hidden, dtype=normalizer.dtype) if wanted[0] else None
        of_weight = torch.empty_like(weight) if wanted[1] else None
        of_bias = torch.empty_like(bias) if wanted[2] else None
        for part, rows, chunk in _chunks(hidden, weight, bias, targets, ctx.how):
            ctx.how.math.to_gradient(chunk, known, None if of_bias is None else of_bias[part])
            if of_hidden is not None:
                _add_product(of_hidden, chunk.products, rows)
            if of_weight is not None and of_weight.dtype == hidden.dtype:
                torch.mm(chunk.products.T, hidden, out=of_weight[part])
            elif of_weight is not None:
                of_weight[part].copy_(_product(chunk.products.T, hidden))
        of_hidden = None if of_hidden is None else of_hidden.to(hidden.dtype)
        return of_hidden, of_weight, of_bias, None, None


def _sums(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How) -> Sums:
    """Return the sums over the whole vocabulary."""
    sums = Sums.none(hidden)
    for _, _, chunk in _chunks(hidden, weight, bias, targets, how):
        sums = how.math.add(sums, chunk)
    return sums


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
) -> Iterator[tuple[slice, Tensor, Chunk]]:
    """Yield each part of the vocabulary, its weights, and its chunk: all lie in one buffer."""
    buffer = _buffer(hidden, how.columns)
    columns = buffer.shape[1]
    scale, softcap, heat = how[:3]
    heat = None if heat is None else heat.contiguous()
    for begin in range(0, len(weight), columns):
        part = slice(begin, min(begin + columns, len(weight)))
        rows = weight[part].to(hidden.dtype)
        # The last chunk keeps the stride of all others.
        products = torch.mm(hidden, rows.T, out=buffer[:, : part.stop - begin])
        of_bias = None if bias is None else bias[part].contiguous()
        yield part, rows, Chunk(products, targets - begin, of_bias, scale, softcap, heat)


def _buffer(hidden: Tensor, columns: int) -> Tensor:
    """Return room for the products of a chunk: with fewer columns where memory is short."""
    # Rows begin where a GPU's tiles do; a CPU's last bits would be others with them.
    width = columns if hidden.device.type == "cpu" else (columns + 255) // 256 * 256
    try:
        return hidden.new_empty(len(hidden), width)[:, :columns]
    except torch.OutOfMemoryError:
        if columns <= 256:
            raise
    fewer = max(256, columns // 512 * 256)
    _logger.warning(
        "%s has no memory for the logits of %d tokens x %d columns, which log-probabilities take "
        "at a time: it is %d columns now, which is slower and has other last bits",
        hidden.device,
        len(hidden),
        columns,
        fewer,
    )
    return _buffer(hidden, fewer)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``one @ other`` to ``total``.

    Products of bfloat16 are not rounded to it before they are added, where the device can do so:
    what a hundred chunks lose by that has a direction.
    """
    if total.is_cuda and total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.__version__ >= "2.10":  # before, of two types it refuses to add
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += _product(left, right)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``one @ other`` in their own type, as products do that are given a place."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def predicted(microbatch: Batch) -> Tensor:
    """Return which tokens the model predicted: all but the first of a sequence and padding."""
    ids, limits = microbatch["input_ids"], microbatch.get("cu_seqlens")
    there = microbatch.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if there is None else there.bool().clone()
    if limits is None:
        real[:, 0] = False
    else:
        real[limits[:-1].long()] = False
    return real
