"""What each row of a gradient step did to the policy: measured while the step is trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trinity_buffer.algorithm.functional import spread
from trinity_buffer.pipeline.train.commit import StepMeasures
from trinity_buffer.pipeline.train.microbatch import MicroBatch
from trinity_buffer.pipeline.train.step import TrainStep
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
