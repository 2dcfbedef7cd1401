"""Tensor arithmetic that the losses share: masked reductions, aggregation, ratios, clipping.

Pure functions. Nothing here writes to its inputs, reads a number back from the device, or loops
over rows. What a mask leaves out is removed from the *inputs*, before any ``exp``: a NaN behind a
mask then reaches neither the value nor the gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trinity_buffer.algorithm.arguments import one_of
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import InvalidArgumentError

__all__ = ["aggregate_loss", "masked_mean", "masked_sum", "masked_var", "masked_whiten"]

Metrics = dict[str, Tensor]
"""What to log: detached tensors of shape ``[]``, by name."""

EPSILON = 1e-8
"""Keeps a mean over nothing at 0; the reference's value."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut to ± this before ``exp`` where a formula allows it (the reference's value)."""

AGGREGATION_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "seq-mean-token-sum-const",
    "active-seq-mean-token-sum",
    "active-seq-mean-token-mean",
    "active-seq-mean-token-sum-const",
)
"""How per-token losses become one number, see `aggregate_loss`. The first four: the reference's."""


def aggregation_mode(loss_agg_mode: str | None, default: str = "token-mean") -> str:
    """Return ``loss_agg_mode``, or ``default`` where it is None.

    Raises:
        InvalidArgumentError: it is not one of `AGGREGATION_MODES`.
    """
    mode = default if loss_agg_mode is None else loss_agg_mode
    one_of("loss_agg_mode", mode, AGGREGATION_MODES)
    return mode


# ------------------------------------------------------------------------------ masked reductions
def wide(values: Tensor) -> Tensor:
    """Return ``values`` in at least float32: 16-bit sums lose what a loss is about."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def keep(mask: Tensor, values: Tensor) -> Tensor:
    """Return ``values``, widened, with 0 where the mask is 0; no gradient flows back from there."""
    return torch.where(mask != 0, wide(values), 0.0)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the sum of ``values * mask``, of all or along ``axis``; masks may be weights."""
    # Masked before the product: 0 times NaN is NaN.
    values_inside = keep(mask, values)
    return (values_inside * mask.to(values_inside.dtype)).sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Return ``masked_sum / (sum(mask) + 1e-8)``: 0 where nothing is selected.

    As in the reference the count of a bool or int mask becomes a float32, so that the 1e-8 vanishes
    beside it even where the values are float64.
    """
    return masked_sum(values, mask, axis) / (mask.sum(dim=axis) + EPSILON)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the selected values, with divisor n - 1 unless ``unbiased`` is False.

    Raises:
        InvalidArgumentError: too few values are selected.
    """
    # Centred outside the mask too; the mean of the squares masks them again.
    centred = keep(mask, values) - masked_mean(values, mask)
    variance = masked_mean(centred * centred, mask)
    if not unbiased:
        return variance
    count = mask.sum()
    if bool(count == 0) or bool(count == 1):
        raise InvalidArgumentError(
            f"a variance needs at least two values, the mask selects {int(count)}"
        )
    # As in the reference, the factor of a bool or int mask is a float32, whatever the values are.
    return variance * (count / (count - 1))


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return ``(values - mean) / sqrt(var + 1e-8)``, mean and variance of the selected values.

    Values outside the mask are scaled by the same numbers (the reference does so).
    ``shift_mean=False`` leaves the mean where it was.
    """
    mean, variance = masked_mean(values, mask), masked_var(values, mask)
    whitened = (wide(values) - mean) * torch.rsqrt(variance + EPSILON)
    return whitened if shift_mean else whitened + mean


class Tokens(NamedTuple):
    """The inputs of a per-token loss, widened, and 0 where the mask is.

    Attributes:
        logprob: of the policy; the gradient flows through it alone.
        old_logprob: of the policy that sampled.
        advantages: of each token.
        mask: what counts.
        layout: boundaries and denominators of the step; None: the batch is all there is.
        unmasked_advantages: as they came.
    """

    logprob: Tensor
    old_logprob: Tensor
    advantages: Tensor
    mask: Tensor
    layout: BatchLayout | None
    unmasked_advantages: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over the mask: of a bool, the share that is True."""
        return masked_mean(
            values.to(self.logprob) if values.dtype == torch.bool else values, self.mask
        )


# ------------------------------------------------------------------------------ rows
def row_sums(values: Tensor, layout: BatchLayout | None = None) -> Tensor:
    """Return the sum of each sequence, shape ``[N]``, of a padded ``[B, T]`` or a packed ``[T]``.

    Summed in float64, so that both shapes give one number; and by segments rather than by
    scattering, which is not deterministic on a GPU.
    """
    # A float32 sum depends on the order of its terms, which padding changes.
    doubled = values.double()
    if layout is None or layout.cu_seqlens is None:
        return doubled.sum(-1).to(values.dtype)
    offsets = layout.cu_seqlens.to(torch.int64)
    summed = torch.segment_reduce(doubled, "sum", offsets=offsets, unsafe=True, initial=0.0)
    return summed.to(values.dtype)


def row_means(values: Tensor, mask: Tensor, layout: BatchLayout | None = None) -> Tensor:
    """Return the masked mean of each sequence, shape ``[N]``; 0 for a fully masked one."""
    values_inside = keep(mask, values)
    # float32 as in the reference, whose EPSILON then vanishes beside the count.
    weights = mask if mask.is_floating_point() else mask.float()
    return row_sums(values_inside * mask.to(values_inside.dtype), layout) / (
        row_sums(weights, layout) + EPSILON
    )


def spread(rows: Tensor, like: Tensor, layout: BatchLayout | None = None) -> Tensor:
    """Return one value per token from one per sequence: ``[N]`` to the shape of ``like``."""
    if layout is None or layout.cu_seqlens is None:
        return rows.unsqueeze(-1).expand_as(like)
    # output_size spares the device a wait for the sum of the lengths.
    lengths = layout.cu_seqlens.diff()
    return rows.repeat_interleave(lengths, output_size=like.shape[-1])


def mask_of_rows(rows: Tensor, like: Tensor, layout: BatchLayout | None = None) -> Tensor:
    """Return a bool per token, shaped as ``like``, from one per sequence (``[N]``) or per token."""
    if rows.shape == like.shape:
        return rows.bool()
    return spread(rows.bool(), like, layout)


# ------------------------------------------------------------------------------ aggregation
def aggregate_loss(
    values: Tensor,
    mask: Tensor,
    loss_agg_mode: str = "token-mean",
    normalizer: float | None = None,
    layout: BatchLayout | None = None,
) -> Tensor:
    """Return per-token losses as one number, shape ``[]``.

    ==================================  ===========================================================
    ``token-mean``                      every token weighs the same (DAPO, arXiv:2503.14476)
    ``seq-mean-token-sum``              mean over sequences of their sums
    ``seq-mean-token-mean``             mean over sequences of their means (GRPO, arXiv:2402.03300)
    ``seq-mean-token-sum-norm``         sum of all tokens / normalizer
    ``seq-mean-token-sum-const``        mean over sequences of sum / normalizer (Dr. GRPO,
                                        arXiv:2503.20783)
    ``active-seq-mean-...``             the mean is over the sequences that have an action token
    ==================================  ===========================================================

    Without ``layout`` it reduces over what it is given, exactly as the reference. With it the
    micro-batch is summed and divided by the counts of the whole step (times the ranks whose mean
    the trainer takes), so the results of a step's micro-batches add up to the loss of the step.

    Args:
        values: losses, ``[B, T]``, or ``[T]`` packed (with a layout).
        mask: what counts, bool or weights, same shape.
        loss_agg_mode: one of `AGGREGATION_MODES`.
        normalizer: a constant of the run for the ``-norm`` and ``-const`` modes; None: that of the
            layout; without either the width T.
        layout: boundaries and denominators.

    Raises:
        InvalidArgumentError: an unknown mode, or a denominator that was not given.
    """
    aggregation_mode(loss_agg_mode)
    losses = keep(mask, values)
    weights = mask.to(losses.dtype)
    if loss_agg_mode == "token-mean":
        # The step counts its tokens exactly, so that no epsilon is needed; max() guards an empty
        # step.
        tokens = mask.sum() + EPSILON if layout is None else max(layout.total.tokens, 1)
        # The trainer takes the mean over ranks; the product makes a sum of it.
        return _ranks(layout) * ((losses * weights).sum() / tokens)
    if loss_agg_mode.endswith("token-mean"):
        summed = row_means(losses, mask, layout).sum()
    else:
        summed = (losses * weights).sum()
    if loss_agg_mode.endswith(("-norm", "-const")):
        constant = normalizer
        if constant is None:
            # Only without a layout the padded width, as the reference does: nothing else is known.
            constant = values.shape[-1] if layout is None else layout.normalizer
        if constant is None:
            raise InvalidArgumentError(
                "a ...-norm or ...-const aggregation mode needs a constant of the run: pass "
                "normalizer=, or set layout.normalizer (the width of a micro-batch is no constant)"
            )
        summed = summed / (constant + EPSILON)
    if not loss_agg_mode.endswith("-norm"):
        summed = summed / _sequences(weights, layout, active=loss_agg_mode.startswith("active-"))
    return _ranks(layout) * summed


def aggregate_rows(
    values: Tensor, layout: BatchLayout | None = None, *, rows_per_value: int = 1
) -> Tensor:
    """Return the mean of per-sequence losses, shape ``[]``.

    Args:
        values: losses, ``[N]``, or ``[N / 2]`` of pairs.
        layout: denominators of the step.
        rows_per_value: 2 if each value stands for a pair of rows.
    """
    if layout is None:
        return wide(values).sum() / max(len(values), 1)
    return _ranks(layout) * wide(values).sum() / max(layout.total.sequences / rows_per_value, 1)


def _ranks(layout: BatchLayout | None) -> int:
    return 1 if layout is None else layout.world_size


def _sequences(weights: Tensor, layout: BatchLayout | None, *, active: bool) -> Tensor | int:
    """Return the number of sequences that a mean over sequences divides by, at least 1."""
    if layout is None:
        if active:
            return (weights != 0).any(-1).sum().clamp(min=1)
        return max(weights.shape[:-1].numel(), 1)  # tokens without boundaries are one sequence
    count = layout.total.active_sequences if active else layout.total.sequences
    if count is None:
        raise InvalidArgumentError(
            "an active-... aggregation mode needs layout.total.active_sequences, it is None"
        )
    return max(count, 1)


# ------------------------------------------------------------------------------ ratios and clipping
def log_ratio(logprob: Tensor, old_logprob: Tensor) -> Tensor:
    """Return ``logprob - old_logprob`` cut to ± `LOG_RATIO_LIMIT`; beyond it the gradient is 0."""
    return (wide(logprob) - wide(old_logprob)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def bounded_exp(values: Tensor) -> Tensor:
    """Return ``exp(values)``, held one percent below where it would overflow.

    For formulas that know no limit of their own. Where it holds the gradient is 0: an infinity
    would meet a 0 further up and become NaN.
    """
    # A clamp has gradient 0 beyond its bound, where exp would give infinity.
    return values.clamp(max=math.log(torch.finfo(values.dtype).max) - 0.01).exp()


def clip_limits(
    clip_range: float | None, clip_range_low: float | None, clip_range_high: float | None
) -> tuple[float, float]:
    """Return how far a ratio may fall below and rise above 1; the two-sided limits win.

    Raises:
        InvalidArgumentError: a side has no limit, or one below 0.
    """
    low = clip_range if clip_range_low is None else clip_range_low
    high = clip_range if clip_range_high is None else clip_range_high
    if low is None or high is None:
        missing = "clip_range_low" if low is None else "clip_range_high"
        raise InvalidArgumentError(
            f"set clip_range, or both clip_range_low and clip_range_high ({missing} is missing)"
        )
    if not (low >= 0 and high >= 0):
        raise InvalidArgumentError(f"clip ranges must not be negative, they are {low} and {high}")
    return low, high


def clipped_objective(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return ``-A clip(ratio, 1 - low, 1 + high)`` per token."""
    return -advantages * ratio.clamp(1.0 - low, 1.0 + high)


def inside(ratio: Tensor, low: float, high: float) -> Tensor:
    """Return where ``low <= ratio <= high``."""
    return (ratio >= low) & (ratio <= high)
