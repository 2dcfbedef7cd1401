"""What a run measured, given to an experiment tracker: each committed step once, in order.

The numbers are read from the log, beside the run or after it: a tracker that hangs or is
unreachable holds back no trainer, and one that begins later misses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.events import StepsCommitted, TrainerRewound, kinds_of
from trinity_buffer.inspector.source import now
from trinity_buffer.inspector.step_lines import StepLine, steps, trainer_of
from trinity_buffer.pipeline.coordination.waiting import ReportedWait
from trinity_buffer.pipeline.store import Experiment
from trinity_buffer.store import writer_queries

PAGE_STEPS = 256
OF_THE_LOG = (
    *("reward", "staleness", "oldest", "rows", "groups"),
    *("tokens", "trained_tokens", "seconds"),
)
"""What the log knows of each step, as `StepLine` names it."""


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
        follow: wait for the trainer and for more, until the experiment is finished.

    Raises:
        InvalidArgumentError: ``after`` is negative.
        UnknownNameError: no such trainer, and none is waited for.
    """
    if after < 0:
        raise InvalidArgumentError(f"after={after}: name a gradient step, or 0 for all")
    source = now(experiment)
    name = await (_awaited(experiment, trainer) if follow else trainer_of(source, trainer))
    last = after

    async def log(up_to: int) -> None:
        """Give the steps above ``last`` that were committed up to a position of the log."""
        # A reader that lags behind the log meets a rewind later than what was trained anew after
        # it: that is given when its own commit is read.
        nonlocal last
        while page := await steps(source, trainer=name, after=last, limit=PAGE_STEPS):
            for line in page:
                if line.committed_at is None or line.committed_at > up_to:
                    return
                tracker.log(numbers_of(line), line.step)
                last = line.step

    # Before the steps are read: commits that come meanwhile are met again as events.
    seen = await source.head()
    await log(seen)
    if not follow:
        return last
    kinds = kinds_of(StepsCommitted | TrainerRewound)
    async for event in experiment.events(seen, follow=True, kinds=kinds):
        match event.fact:
            # Steps above it will be trained anew, and are given to the tracker again.
            case TrainerRewound(consumer=consumer, step=step) if consumer == name:
                last = min(last, step)
            case StepsCommitted(consumer=consumer) if consumer == name:
                await log(event.position)
    return last


async def _awaited(experiment: Experiment, trainer: str | None) -> str:
    """Return the trainer as soon as there is one, or the experiment is finished."""
    changes = experiment.database.changes

    async def tell() -> str:
        named = "a trainer" if trainer is None else f"trainer {trainer!r}"
        consumers = await experiment.database.read(writer_queries.consumers, experiment.key)
        names = [repr(row.name) for row in consumers.values() if row.kind == "trainer"]
        there = f"there {'is' if len(names) < 2 else 'are'} {', '.join(names) or 'none'}"
        return (
            f"track waits for {named} in {experiment.name!r}, where {there}: start it "
            "(`trinity-buffer train`), or name another one"
        )

    wait = ReportedWait(experiment.database, None, tell)
    while True:
        # Read before the question, so that a change in between wakes the wait.
        state = await changes.state()
        is_finished = await experiment.is_finished()
        try:
            return await trainer_of(now(experiment), trainer)
        except UnknownNameError:
            if is_finished:
                raise
        await wait.changed(state)


def numbers_of(line: StepLine) -> dict[str, float]:
    """Return the finite numbers of a step: what its trainer measured, and what the log knows.

    ``batch/`` stands before what comes from the log, so that it takes no measure's place.
    """
    numbers = {**line.metrics, **{f"batch/{name}": getattr(line, name) for name in OF_THE_LOG}}
    return {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
