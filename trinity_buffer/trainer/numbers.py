"""The numbers of a gradient step, of all its micro-batches and ranks, and the report of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trinity_buffer.algorithm.functional import mask_of_rows
from trinity_buffer.pipeline.train.commit import StepMeasures
from trinity_buffer.pipeline.train.microbatch import MicroBatch
from trinity_buffer.trainer.parallel import Processes, gather_texts


class Number(NamedTuple):
    """A number of one rank, and how much it counts beside those of others."""

    value: Any
    weight: Any = 1.0


class StepNumbers:
    """Tells every rank what one process would say of a step.

    ==================  ===========================================================================
    name ends in        over the micro-batches, then over the ranks
    ==================  ===========================================================================
    ``loss``            the sum; the mean over ranks, since a loss counts in their number
    ``_max``, ``_min``  the largest, the smallest; so with ``/`` in place of ``_``
    else                the mean, weighted by action tokens, or by rows for a metric of rows
    ==================  ===========================================================================

    A number that is NaN counts only where the sum is asked for.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._names: list[str] = []  # the same on all ranks

    def read(
        self, deciding: Sequence[Tensor], own_numbers: Mapping[str, Number]
    ) -> tuple[bool, dict[str, float]]:
        """Return whether all of ``deciding`` is finite, on all ranks, and the numbers of the step.

        Every rank must call it, all get the same. One look at the device, and one exchange, but
        where a rank has a name for the first time.
        """
        flags = torch.stack([torch.as_tensor(value).detach().isfinite() for value in deciding])
        pairs = [
            torch.stack([_double(part, flags.device) for part in number])
            for number in own_numbers.values()
        ]
        # All in one tensor: each copy from a GPU waits for what it computes.
        broken, *own = torch.stack([(~flags.all()).double().repeat(2), *pairs]).cpu().unbind()
        columns = dict(zip(own_numbers, own, strict=True))
        every = self._exchanged(broken[0], columns)
        # A rank had a name for the first time: the columns must mean the same everywhere.
        if every[:, 0, 1].any():
            names = gather_texts(self._processes, "\n".join(columns))
            self._names = sorted({*self._names, *"\n".join(names).split("\n")} - {""})
            every = self._exchanged(broken[0], columns)
        numbers = {}
        for name, (values, weights, there) in zip(
            self._names, every[:, 1:].permute(1, 2, 0), strict=True
        ):
            if there.any():
                numbers[name] = float(_joined(name, values[there > 0], weights[there > 0]).value)
                if name.endswith("loss"):
                    # Each rank's loss is scaled by the number of ranks, whose mean the optimizer
                    # takes.
                    numbers[name] /= self._processes.world_size
        return not bool(every[:, 0, 0].any()), numbers

    def _exchanged(self, broken: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Return ``[ranks, 1 + names, 3]``: value, weight and whether the rank has it.

        Before the names come whether the rank is broken, and whether it has other names.
        """
        own = torch.zeros(1 + len(self._names), 3, dtype=torch.float64)
        own[0, 0], own[0, 1] = broken, float(not columns.keys() <= set(self._names))
        for place, name in enumerate(self._names, 1):
            if name in columns:
                own[place, :2], own[place, 2] = columns[name], 1.0
        return torch.stack(self._processes.gather(own))


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
