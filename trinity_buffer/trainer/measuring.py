"""The numbers of a gradient step: what each row did to the policy, and what its ranks report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trinity_buffer.algorithm.functional import mask_of_rows, spread
from trinity_buffer.pipeline.train.microbatch import MicroBatch
from trinity_buffer.pipeline.train.step import StepMeasures, TrainStep
from trinity_buffer.trainer.parallel import Processes
from trinity_buffer.trainer.policy import TokenScores

_SUMS = ("tokens", "weight", "clipped", "entropy", "ratio", "gap", "kl")
_MEANS = ("clipped", "entropy", "ratio", "gap", "kl")
"""Also a number of the whole step: the mean over its action tokens."""

_TOKENS = ("logprob", "ratio", "entropy", "weight")


class StepMeter:
    """Collects what `StepMeasures` says of one step; made anew for each.

    Of each row, over its action tokens:

    ========================  =====================================================================
    ``loss_share``            its part in the sum of |d loss / d logprob| over the step, policy term
    ``ratio_mean`` ``_max``   exp(logprob - old_logprob)
    ``clipped``               share whose policy term has no gradient, though it has an advantage
    ``kl``                    mean of logprob - ref_logprob
    ``entropy``               mean, in nats
    ``gap_mean`` ``_max``     absolute difference of logprob and what the explorer recorded
    ========================  =====================================================================

    A number that needs a tensor which the step does not have is NaN.

    Args:
        rows: how many the manifest has.
        tokens: also keep numbers of every token: ``logprob``, ``ratio``, ``entropy`` and
            ``weight``, the derivative of the policy's term by the log-probability.
    """

    def __init__(self, step: TrainStep, *, tokens: bool = False) -> None:
        self._step = step.step
        rows, device = len(step.manifest.experiences), step.microbatches[0]["input_ids"].device
        self._sums = torch.zeros(len(_SUMS), rows, device=device)
        self._most = torch.zeros(2, rows, device=device)
        self._sizes = torch.zeros(rows, dtype=torch.int64, device=device)
        self._tokens: list[tuple[Tensor, Tensor]] | None = [] if tokens else None
        self._weight: Tensor | None = None

    def weigh(self, gradient: Tensor) -> None:
        """Take the gradient of the policy's term; called in the backward pass."""
        self._weight = gradient

    @torch.no_grad()
    def add(self, microbatch: MicroBatch, scores: TokenScores) -> None:
        """Take in a micro-batch, after its backward pass."""
        ids = microbatch["input_ids"]
        weight = torch.zeros_like(scores.logprob) if self._weight is None else self._weight
        self._weight = None
        if not ids.numel():
            return
        mask = microbatch["action_mask"]
        ratio = _difference(microbatch, "old_logprob", scores.logprob).where(mask, 0.0).exp()
        gap = _difference(microbatch, "rollout_logprob", scores.logprob).abs()
        per_token = {
            "tokens": mask,
            "weight": weight.abs(),
            # Which tokens have an advantage and no gradient; NaN where there are no advantages.
            "clipped": torch.full_like(weight, torch.nan)
            if "advantages" not in microbatch
            else ((weight == 0) & (microbatch["advantages"] != 0)).to(weight),
            "entropy": scores.entropy,
            "ratio": ratio,
            "gap": gap,
            "kl": _difference(microbatch, "ref_logprob", scores.logprob),
        }
        rows, slots = rows_of_tokens(microbatch), microbatch["sample_index"].long()
        stacked = torch.stack([per_token[name].float() for name in _SUMS])
        stacked = stacked.where(mask, 0.0).flatten(1)
        place = slots[rows]
        self._sums.index_add_(1, place, stacked)
        most = torch.stack([ratio, gap]).where(mask, 0.0).flatten(1)
        self._most.scatter_reduce_(1, place.expand(2, -1), most, "amax")
        if self._tokens is not None:
            of_tokens = torch.stack([scores.logprob, ratio, scores.entropy, weight])
            there = microbatch["attention_mask"].flatten()
            place = place[there]
            self._sizes.index_add_(0, place, torch.ones_like(place))
            self._tokens.append((place, of_tokens.flatten(1)[:, there].float()))

    def measures(self, metrics: Mapping[str, float], processes: Processes) -> StepMeasures:
        """Return what was measured; every rank must call it, all get the same."""
        # Rows of other ranks are 0 here.
        both = processes.sum(torch.cat([self._sums, self._most])).cpu()
        sums, most = dict(zip(_SUMS, both, strict=False)), both[len(_SUMS) :]
        count = sums["tokens"]
        unknown = torch.full_like(count, torch.nan)
        rows = {
            "loss_share": sums["weight"] / sums["weight"].sum(),
            "ratio_mean": sums["ratio"] / count,
            "ratio_max": torch.where(count > 0, most[0], unknown),
            "clipped": sums["clipped"] / count,
            "kl": sums["kl"] / count,
            "entropy": sums["entropy"] / count,
            "gap_mean": sums["gap"] / count,
            "gap_max": torch.where(count > 0, most[1], unknown),
        }
        known = {name: values.numpy() for name, values in rows.items()}
        # The mean over the action tokens of the rows that have the number.
        there = {name: ~sums[name].isnan() for name in _MEANS}
        whole = {
            name: float(sums[name][has].sum() / count[has].sum()) for name, has in there.items()
        }
        tokens = {} if self._tokens is None else self._of_tokens(processes)
        return StepMeasures(self._step, known, {**whole, **metrics}, tokens)

    def _of_tokens(self, processes: Processes) -> dict[str, list[Tensor]]:
        sizes = processes.sum(self._sizes)
        begins = sizes.cumsum(0) - sizes
        every = self._most.new_zeros(len(_TOKENS), int(sizes.sum()))
        for place, values in self._tokens or ():
            # A row's tokens follow each other: each is so far behind the first of its row.
            first = torch.ones_like(place, dtype=torch.bool)
            first[1:] = place[1:] != place[:-1]
            steps = torch.arange(len(place), device=place.device)
            behind = steps - steps.where(first, 0).cummax(0).values
            every[:, begins[place] + behind] = values
        parts = processes.sum(every).cpu().split_with_sizes(sizes.tolist(), dim=1)
        return {name: [part[at].clone() for part in parts] for at, name in enumerate(_TOKENS)}


def _difference(microbatch: MicroBatch, name: str, logprob: Tensor) -> Tensor:
    """Return ``logprob - name``, NaN where the row or the step has none."""
    other: Tensor | None = microbatch.get(name)
    if other is None:
        return torch.full_like(logprob, torch.nan)
    difference = logprob - other
    recorded = microbatch.get("logprob_mask")
    if recorded is None or name == "ref_logprob":
        return difference
    there = recorded.to(difference.device)[rows_of_tokens(microbatch)].view_as(difference)
    return difference.where(there, torch.nan)


def rows_of_tokens(microbatch: MicroBatch) -> Tensor:
    """Return of each token, padding included, the row of the micro-batch that it belongs to."""
    ids, rows = microbatch["input_ids"], len(microbatch["sample_index"])
    numbers = torch.arange(rows, device=ids.device)
    return spread(numbers, ids, microbatch.layout).reshape(-1)


class Number(NamedTuple):
    """A number of one rank, and how much it counts beside those of others."""

    value: Any
    weight: Any = 1.0


def numbers_of_step(
    processes: Processes, deciding: Sequence[Tensor], own_numbers: Mapping[str, Number]
) -> tuple[bool, dict[str, float]]:
    """Return whether all of ``deciding`` is finite, on all ranks, and what one process would say.

    ==================  ===========================================================================
    name ends in        over the micro-batches, then over the ranks
    ==================  ===========================================================================
    ``loss``            the sum; the mean over ranks, since a loss counts in their number
    ``_max``, ``_min``  the largest, the smallest; so with ``/`` in place of ``_``
    else                the mean, weighted by action tokens, or by rows for a metric of rows
    ==================  ===========================================================================

    A number that is NaN counts only where the sum is asked for. Every rank must call it, all get
    the same. There is one look at the device, and one exchange.
    """
    flags = torch.stack([torch.as_tensor(value).detach().isfinite() for value in deciding])
    parts = [part for number in own_numbers.values() for part in number]
    # All in one tensor: each copy from a GPU waits for what it computes.
    read = torch.stack([_double(part, flags.device) for part in (flags.all(), *parts)]).tolist()
    own = dict(zip(own_numbers, zip(read[1::2], read[2::2], strict=True), strict=True))
    every = processes.gather((read[0] > 0, own))
    numbers = {}
    for name in sorted({name for _, of_rank in every for name in of_rank}):
        pairs = [of_rank[name] for _, of_rank in every if name in of_rank]
        values, weights = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        numbers[name] = float(_joined(name, values, weights).value)
        if name.endswith("loss"):
            # Each rank's loss is scaled by the number of ranks, whose mean the optimizer takes.
            numbers[name] /= processes.world_size
    return all(finite for finite, _ in every), numbers


def combined(
    parts: Sequence[Mapping[str, Any]],
    microbatches: Sequence[MicroBatch],
    row_metrics: Collection[str] = (),
) -> dict[str, Number]:
    """Return this rank's numbers of a step, from those of its micro-batches.

    Args:
        parts: the metrics of each of ``microbatches``.
        row_metrics: names of those that are means over rows.
    """
    sizes = [_sizes(microbatch) for microbatch in microbatches]
    numbers = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        # A mixed loss names the kind of rows before its metrics.
        kind = name.removeprefix("actor/").split("/")[0]
        kind = kind if kind in ("usual", "expert") else "tokens"
        kind = "rows" if name in row_metrics else kind
        having = [
            (part[name], size[kind])
            for part, size in zip(parts, sizes, strict=True)
            if name in part
        ]
        device = sizes[0][kind].device
        values, weights = (
            torch.stack([_double(value, device) for value in column])
            for column in zip(*having, strict=True)
        )
        numbers[name] = _joined(name, values, weights)
    return numbers


def _sizes(microbatch: MicroBatch) -> dict[str, Tensor]:
    """Return how many rows a micro-batch has, and how many action tokens of each kind."""
    mask = microbatch["action_mask"] != 0
    expert = torch.zeros_like(mask)
    if "expert_mask" in microbatch:
        expert = mask_of_rows(microbatch["expert_mask"], mask, microbatch.layout)
    return {
        "rows": torch.tensor(len(microbatch["sample_index"]), device=mask.device),
        "tokens": mask.sum(),
        "usual": (mask & ~expert).sum(),
        "expert": (mask & expert).sum(),
    }


def _joined(name: str, values: Tensor, weights: Tensor) -> Number:
    """Return one number of several."""
    if name.endswith("loss"):
        return Number(values.sum())
    # A mean over no token at all counts for next to nothing, and is said where there is no other.
    known = weights.clamp(min=1e-30).where(~values.isnan(), 0.0)
    if name.endswith(("/max", "_max", "/min", "_min")):
        sign = 1.0 if name.endswith("max") else -1.0
        most = (sign * values).where((weights > 0) & (known > 0), -torch.inf).amax()
        return Number(sign * most.where(most > -torch.inf, torch.nan), known.sum())
    total = known.sum()
    return Number((values.where(known > 0, 0.0) * known).sum() / total, total)


def _double(value: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach().to(device)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What is said of one gradient step, in numbers: of all ranks, except ``seconds``.

    Attributes:
        reward: see `TrainStep.reward`, without penalties; 0 where no reward is known.
        staleness: see `TrainStep.staleness`; 0 where no version is known.
        seconds: from the arrival of the batch to the end of its commit, if there was one.
        skipped: the loss or the gradient norm was not finite, and the weights are what they were.
        unknown: which of ``reward`` and ``staleness`` are 0 because no row has them.
        measures: what each row did, which the commit records; None without `record_row_metrics`.
    """

    step: int
    loss: float
    reward: float
    gradient_norm: float
    staleness: float
    rows: int
    tokens: int
    seconds: float
    recorded: bool
    committed: bool
    skipped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    measures: StepMeasures | None = field(default=None, repr=False)
    unknown: tuple[str, ...] = ()
