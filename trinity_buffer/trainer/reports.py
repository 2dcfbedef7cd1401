"""What a trainer says of each gradient step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from trinity_buffer.pipeline.step_measures import StepMeasures
from trinity_buffer.pipeline.streaming.train_step import TrainStep


@dataclass(frozen=True, slots=True)
class StepReport:
    """What is said of one gradient step, in numbers: of all ranks, except ``seconds``.

    Attributes:
        reward: see `TrainStep.reward`, without penalties; 0 where no reward is known.
        staleness: see `TrainStep.staleness`; 0 where no version is known.
        seconds: from the arrival of the batch to the end of its commit, if there was one.
        skipped: the loss or the gradient norm was not finite, and the weights are what they were.
        measures: what each row did, which the commit records; None where `record_facts` is off.
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


def report_of(
    step: TrainStep,
    metrics: dict[str, float],
    begin: float,
    *,
    committed: bool,
    skipped: bool,
) -> StepReport:
    """Return what is said of a step that began at ``begin`` (`time.perf_counter`)."""
    return StepReport(
        step=step.step,
        loss=metrics["loss"],
        reward=step.reward or 0.0,
        gradient_norm=metrics["gradient_norm"],
        staleness=step.staleness or 0.0,
        rows=len(step.manifest.experiences),
        tokens=step.microbatches[0].layout.global_tokens if step.microbatches else 0,
        seconds=time.perf_counter() - begin,
        recorded=step.recorded,
        committed=committed,
        skipped=skipped,
        metrics=metrics,
    )
