"""What a run measured, given to an experiment tracker: each committed step once, in order.

The numbers are read from the log, beside the run or after it: a tracker that hangs, or that nobody
reaches, holds back no trainer, and whoever begins later misses nothing.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import StepsCommitted, TrainerRewound, kinds_of
from trinity_buffer.inspect.source import now
from trinity_buffer.inspect.steps import StepLine, steps, trainer_of
from trinity_buffer.pipeline.experiment import Experiment

PAGE_STEPS = 256


class Tracker(Protocol):
    """Takes the numbers of gradient steps: TensorBoard, trackio, W&B, or one's own."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take what is known of a gradient step."""

    def close(self) -> None:
        """Write what is left."""


async def track(
    experiment: Experiment,
    tracker: Tracker,
    *,
    trainer: str | None = None,
    after: int = 0,
    follow: bool = False,
) -> int:
    """Give each committed step of a trainer to ``tracker``, in order, and return the last one.

    A trainer that is rewound while it is followed takes its steps anew: they are given again, with
    their numbers. The tracker is not closed.

    Args:
        trainer: its name; None: the only one, or the busiest.
        after: go on after this gradient step, as who was interrupted does.
        follow: wait for more, until the experiment is finished.

    Raises:
        InvalidArgumentError: ``after`` is negative.
        UnknownNameError: no such trainer.
    """
    if after < 0:
        raise InvalidArgumentError(f"after={after}: name a gradient step, or 0 for all")
    source = now(experiment)
    name = await trainer_of(source, trainer)
    seen, last = await source.head(), after
    last = await _given(experiment, tracker, name, last)
    if not follow:
        return last
    kinds = kinds_of(StepsCommitted | TrainerRewound)
    async for event in experiment.events(seen, follow=True, kinds=kinds):
        match event.fact:
            case TrainerRewound(consumer=consumer, step=step) if consumer == name:
                last = min(last, step)
            case StepsCommitted(consumer=consumer) if consumer == name:
                last = await _given(experiment, tracker, name, last)
    return last


async def _given(experiment: Experiment, tracker: Tracker, trainer: str, last: int) -> int:
    async for line in _committed_after(experiment, trainer, last):
        tracker.log(numbers_of(line), line.step)
        last = line.step
    return last


async def _committed_after(
    experiment: Experiment, trainer: str, last: int
) -> AsyncIterator[StepLine]:
    while page := await steps(now(experiment), trainer=trainer, after=last, limit=PAGE_STEPS):
        for line in page:
            if line.state != "committed":
                return
            yield line
        last = page[-1].step


def numbers_of(line: StepLine) -> dict[str, float]:
    """Return the finite numbers of a step: what its trainer measured, and what the log knows.

    ``batch/`` stands before what comes from the log, so that it takes no measure's place.
    """
    known = {
        "batch/reward": line.reward,
        "batch/staleness": line.staleness,
        "batch/oldest": line.oldest,
        "batch/rows": line.rows,
        "batch/groups": line.groups,
        "batch/tokens": line.tokens,
        "batch/trained_tokens": line.trained_tokens,
        "batch/seconds": line.seconds,
    }
    found: dict[str, Any] = {**line.metrics, **known}
    return {name: float(value) for name, value in found.items() if _is_finite(value)}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
