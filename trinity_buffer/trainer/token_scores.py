"""Log-probability and entropy of given tokens, without ever holding the logits of a batch.

Logits of 16k tokens over a vocabulary of 152k take 10 GB in float32, and several times that with
their gradients. Here the output head is applied to slices of the vocabulary, one after another, in
the forward pass and once more in the backward pass; only sums over the vocabulary are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.microbatch import MicroBatch
from trinity_buffer.trainer.last_hidden import OutputHead, last_hidden
from trinity_buffer.trainer.policy import TokenScores

CHUNK_LOGITS = 2**24
"""So many logits are held at a time: 64 MiB in float32, of which there are two or three."""


def token_scores(
    model: Any, microbatch: Mapping[str, Any], *, chunk_logits: int = CHUNK_LOGITS
) -> TokenScores:
    """Return log-probability and entropy of every token of a micro-batch.

    They are those at the temperature that each token was sampled at, which is 1 unless the
    micro-batch says otherwise. Element t describes token t and comes from what precedes it; it is 0
    at the first token of a sequence and at padding. float32, or float64 of a model in float64.

    Args:
        model: a causal language model of transformers, or one that has ``last_hidden``.
        microbatch: ``input_ids`` ``[N, T]`` right-padded, with ``attention_mask`` if there is
            padding; or ``[T]`` packed, with ``cu_seqlens`` ``[N + 1]``, ``position_ids`` and
            ``max_seqlen``; with ``temperature``, like ``input_ids``, if some is not 1.
        chunk_logits: how many logits are held at a time; less memory, more passes.

    Raises:
        InvalidArgumentError: the logits of the model are not those of a linear output head.
        TrainingError: the step has recorded log-probabilities that no model's can be compared with.
    """
    ids = microbatch["input_ids"]
    if not ids.numel():
        one = token_scores(model, stand_in(microbatch), chunk_logits=chunk_logits)
        return TokenScores(
            *(part.flatten()[:0].view(ids.shape) for part in (one.logprob, one.entropy))
        )
    hidden, head, places, heat = _predictions(model, microbatch)
    targets = ids.flatten()[places].long()
    found = head_scores(hidden, head, targets, chunk_logits, temperature=heat)
    return TokenScores(*(_placed(one, places, ids) for one in found))


@torch.no_grad()
def entropy_changes(
    model: Any, microbatch: Mapping[str, Any], *, chunk_logits: int = CHUNK_LOGITS
) -> Tensor:
    """Return `expected_entropy_change` at every token: the column ``necs`` of Clip-V.

    Aligned as `token_scores`, whose arguments it takes; it has no gradient.
    """
    ids = microbatch["input_ids"]
    if not ids.numel():
        one = entropy_changes(model, stand_in(microbatch), chunk_logits=chunk_logits)
        return one.flatten()[:0].view(ids.shape)
    hidden, head, places, heat = _predictions(model, microbatch)
    return _placed(head_entropy_changes(hidden, head, chunk_logits, heat), places, ids)


def _predictions(
    model: Any, microbatch: Mapping[str, Any]
) -> tuple[Tensor, OutputHead, Tensor, Tensor | None]:
    """Return the hidden state ``[T, D]`` before each predicted token, the head, their places.

    Last, ``[T]``, what the logits are divided by; None: by nothing.
    """
    if isinstance(microbatch, MicroBatch):
        microbatch.require_scorable()
    hidden, head = last_hidden(model, microbatch)
    places = predicted(microbatch).flatten().nonzero().squeeze(-1)
    heat = microbatch.get("temperature")
    heat = None if heat is None else heat.flatten()[places]
    return hidden.flatten(0, -2)[places - 1], head, places, heat


def _placed(values: Tensor, places: Tensor, ids: Tensor) -> Tensor:
    """Return the shape of ``ids`` with ``values`` at ``places``, and 0 elsewhere."""
    return values.new_zeros(ids.numel()).index_copy(0, places, values).view(ids.shape)


def stand_in(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Return two tokens in the layout of a micro-batch without rows.

    Few models take no rows. One that is given these, of which nothing is kept, takes part in what
    data-parallel ranks do together, forward and backward, and its gradient is 0.
    """
    ids = microbatch["input_ids"]
    shape = (1, 2) if ids.dim() == 2 else (2,)
    zeros = ids.new_zeros(shape)
    found: dict[str, Any] = {"input_ids": zeros, "position_ids": torch.arange(2).to(zeros)}
    found["position_ids"] = found["position_ids"].expand(shape)
    limits = microbatch.get("cu_seqlens")
    if limits is not None:
        found |= {"cu_seqlens": limits.new_tensor([0, 2]), "max_seqlen": 2}
    return found


def head_scores(
    hidden: Tensor,
    head: OutputHead,
    targets: Tensor,
    chunk_logits: int,
    *,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy ``[T]`` of ``targets`` under ``hidden`` ``[T, D]``.

    Args:
        temperature: ``[T]``, what the logits are divided by; None: by nothing.
    """
    how = (head, _columns(hidden, chunk_logits), temperature)
    return _HeadScores.apply(hidden, head.weight, head.bias, targets, how)  # type: ignore[no-any-return,no-untyped-call]  # autograd.Function has no types


@torch.no_grad()
def head_entropy_changes(
    hidden: Tensor, head: OutputHead, chunk_logits: int, temperature: Tensor | None = None
) -> Tensor:
    """Return the sum over the vocabulary of ``p^2 (H + log p)``, ``[T]``; see `head_scores`."""
    columns = _columns(hidden, chunk_logits)
    sums = _Sums.over(hidden, head, columns, temperature=temperature)
    normalizer, entropy = sums.normalizer(), sums.entropy()
    change = torch.zeros_like(entropy)
    for part in _parts(head.weight, columns):
        below = _logits(hidden, head, part, temperature)[0].sub_(normalizer.unsqueeze(1))
        squares = (below * 2).exp_()
        change += below.add_(entropy.unsqueeze(1)).mul_(squares).sum(1)
    return change


def _columns(hidden: Tensor, chunk_logits: int) -> int:
    """Return how much of the vocabulary is looked at in one go.

    Raises:
        InvalidArgumentError: ``chunk_logits`` is below 1.
    """
    if chunk_logits < 1:
        raise InvalidArgumentError(f"chunk_logits={chunk_logits}: it must be at least 1")
    return max(1, chunk_logits // max(1, len(hidden)))


class _HeadScores(torch.autograd.Function):
    """Sums over the vocabulary, slice by slice; see `head_scores`."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        how: tuple[OutputHead, int, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        head, ctx.columns, ctx.temperature = how
        head = head._replace(weight=weight, bias=bias)
        sums = _Sums.over(hidden, head, ctx.columns, targets, temperature=ctx.temperature)
        normalizer, entropy = sums.normalizer(), sums.entropy()
        ctx.scale, ctx.softcap = head.scale, head.softcap
        ctx.set_materialize_grads(False)  # entropy is often only looked at: half the work is left
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        return sums.chosen - normalizer, entropy

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        head = OutputHead(weight, bias, ctx.scale, ctx.softcap)
        known = _Known(normalizer, entropy, *gradients)
        of_hidden = torch.zeros_like(hidden, dtype=normalizer.dtype)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = None if bias is None else torch.empty_like(bias)
        for part in _parts(weight, ctx.columns):
            found = _of_part(hidden, head, part, targets, known, ctx.temperature)
            if of_bias is not None:
                of_bias[part] = found.sum(0)
            found = found.to(hidden.dtype)
            _add_product(of_hidden, found, weight[part].to(hidden.dtype))
            if of_weight is not None:
                of_weight[part] = found.T @ hidden
        return of_hidden.to(hidden.dtype), of_weight, of_bias, None, None


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add ``one @ other`` to ``total``.

    Products of bfloat16 are not rounded to it before they are added, where the device can do so:
    what a hundred slices lose by that has a direction.
    """
    if total.dtype != one.dtype and total.is_cuda and torch.__version__ >= "2.8":
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
    else:
        total += one @ other


def _parts(weight: Tensor, columns: int) -> Iterator[slice]:
    size = len(weight)
    return (slice(begin, min(begin + columns, size)) for begin in range(0, size, columns))


def _logits(
    hidden: Tensor, head: OutputHead, part: slice, temperature: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the logits ``[T, columns]`` of a part of the vocabulary, and the slope of a cap.

    The logits are divided by the ``temperature`` ``[T]``, the slope is not.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        raw = hidden @ head.weight[part].to(hidden.dtype).T
        logits = raw if raw.dtype == torch.float64 else raw.float()
        if head.bias is not None:
            logits = logits + head.bias[part]
        if head.scale != 1:
            logits = logits * head.scale
        slope = None
        if head.softcap is not None:
            bent = torch.tanh(logits / head.softcap)
            logits, slope = bent * head.softcap, 1 - bent.square()
        return logits if temperature is None else logits.div_(temperature.unsqueeze(1)), slope


class _Sums(NamedTuple):
    """What is known of every token's logits z so far, each ``[T]``.

    Attributes:
        peak: the largest z.
        total: sum of exp(z - peak).
        moment: sum of exp(z - peak) (z - peak), so that entropies near 0 lose no digits.
        chosen: the logit of the token itself, once its part of the vocabulary was seen.
    """

    peak: Tensor
    total: Tensor
    moment: Tensor
    chosen: Tensor

    @classmethod
    def over(
        cls,
        hidden: Tensor,
        head: OutputHead,
        columns: int,
        targets: Tensor | None = None,
        *,
        temperature: Tensor | None,
    ) -> _Sums:
        """Return the sums over the whole vocabulary, ``columns`` of it at a time."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        zero = hidden.new_zeros(len(hidden), dtype=dtype)
        sums = cls(torch.full_like(zero, torch.finfo(dtype).min), zero, zero, zero)
        places = torch.zeros_like(zero, dtype=torch.long) if targets is None else targets
        for part in _parts(head.weight, columns):
            sums = sums.add(_logits(hidden, head, part, temperature)[0], places - part.start)
        return sums

    def add(self, logits: Tensor, targets: Tensor) -> _Sums:
        """Return the sums with further logits, which are overwritten."""
        place, inside = _within(targets, logits.shape[1])
        chosen = logits.gather(1, place.unsqueeze(1)).squeeze(1).where(inside, self.chosen)
        peak = torch.maximum(self.peak, logits.amax(1))
        moved = self.peak - peak
        below = logits.sub_(peak.unsqueeze(1))
        weights = below.exp()
        total = self.total * moved.exp() + weights.sum(1)
        moment = (self.moment + self.total * moved) * moved.exp() + weights.mul_(below).sum(1)
        return _Sums(peak, total, moment, chosen)

    def normalizer(self) -> Tensor:
        return self.peak + self.total.log()

    def entropy(self) -> Tensor:
        return self.total.log() - self.moment / self.total


class _Known(NamedTuple):
    """What the backward pass knows of every token, each ``[T]``; None: no such gradient."""

    normalizer: Tensor
    entropy: Tensor
    of_logprob: Tensor | None
    of_entropy: Tensor | None


def _of_part(
    hidden: Tensor,
    head: OutputHead,
    part: slice,
    targets: Tensor,
    known: _Known,
    temperature: Tensor | None,
) -> Tensor:
    """Return the gradient with respect to ``hidden @ weight[part].T``."""
    logits, slope = _logits(hidden, head, part, temperature)
    found = _of_logits(logits, targets - part.start, known)
    if temperature is not None:
        found = found.div_(temperature.unsqueeze(1))
    return (found if slope is None else found.mul_(slope)).mul_(head.scale)


def _of_logits(logits: Tensor, targets: Tensor, known: _Known) -> Tensor:
    """Return the gradient with respect to ``logits``, which are overwritten.

    With p = exp(l), l = z - normalizer: d logprob / dz = 1[target] - p, dH / dz = -p (l + H).
    """
    below = logits.sub_(known.normalizer.unsqueeze(1))
    of_logprob = known.of_logprob
    if of_logprob is None:
        of_logprob = torch.zeros_like(known.normalizer)
    if known.of_entropy is None:
        found = below.exp_().mul_(of_logprob.neg().unsqueeze(1))
    else:
        share = below.exp()
        found = below.add_(known.entropy.unsqueeze(1)).mul_(known.of_entropy.unsqueeze(1))
        found = found.add_(of_logprob.unsqueeze(1)).mul_(share).neg_()
    place, inside = _within(targets, logits.shape[1])
    # Not scatter_add_: that of a GPU has no fixed order, and each row has one place only.
    here = found.gather(1, place.unsqueeze(1)) + of_logprob.where(inside, 0.0).unsqueeze(1)
    return found.scatter_(1, place.unsqueeze(1), here)


def _within(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return a place in the part for every target, and whether it is the target's."""
    return targets.clamp(0, columns - 1), (targets >= 0) & (targets < columns)


def predicted(microbatch: Mapping[str, Any]) -> Tensor:
    """Return which tokens the model predicted: all but the first of a sequence and padding."""
    ids, limits = microbatch["input_ids"], microbatch.get("cu_seqlens")
    there = microbatch.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if there is None else there.bool().clone()
    if limits is None:
        real[:, 0] = False
    else:
        real[limits[:-1].long()] = False
    return real
