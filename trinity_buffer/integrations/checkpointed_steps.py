"""Steps of a train stream for a trainer that counts its own steps and keeps its own checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trinity_buffer.errors import CheckpointError
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.streaming.train_step import TrainStep
from trinity_buffer.pipeline.streaming.train_stream import TrainStream


@dataclass(slots=True)
class CheckpointedSteps:
    """A train stream after the steps that the weights of a checkpoint went through.

    What the weights have seen is committed with the checkpoint that holds it, once the trainer says
    that this is whole; what they have not seen comes again after a crash.
    """

    stream: TrainStream
    _committed: int
    _handed: dict[int, TrainStep] = field(default_factory=dict)

    async def take(self) -> TrainStep:
        """Return the next step.

        Raises:
            StopAsyncIteration: the stream has ended.
        """
        step = await anext(self.stream)
        self._handed[step.step] = replace(step, microbatches=[])
        return step

    @property
    def newest(self) -> int:
        """The last step that was handed out and is not committed, 0 if there is none."""
        return max(self._handed, default=0)

    async def commit(self, step: int, checkpoint: Path | None) -> None:
        """Commit what is in ``checkpoint``: everything up to ``step``; again is a no-op."""
        if step <= self._committed or step not in self._handed:
            return
        await self.stream.commit(self._handed[step], checkpoint)
        self._committed = step
        self._handed = {n: taken for n, taken in self._handed.items() if n > step}


@asynccontextmanager
async def checkpointed_steps(
    experiment: Experiment, trained: int, **options: Any
) -> AsyncIterator[CheckpointedSteps]:
    """Yield the steps after the first ``trained``, which the weights went through.

    Raises:
        CheckpointError: the weights have seen nothing of what was committed.
    """
    last = await experiment.committed_step(str(options.get("consumer", "trainer")))
    if last > trained:
        if not trained:
            raise CheckpointError(
                f"the trainer starts with step 1, and experiment {experiment.name!r} has committed "
                f"step {last}: give it the checkpoint, or this trainer another consumer="
            )
        options["resume_from"] = trained
    async with experiment.train_stream(**options) as stream:
        steps = CheckpointedSteps(stream, min(last, trained))
        seen = min(last, trained)
        while seen < trained:
            seen = (await steps.take()).step
        yield steps


def last_saved(folder: Path) -> int:
    """Return the step that ``latest_checkpointed_iteration.txt`` names, 0 where it names none.

    Trinity-RFT and verl write it in place once a checkpoint is whole: it may be empty for a moment.
    """
    latest = folder / "latest_checkpointed_iteration.txt"
    return int((latest.read_text() if latest.exists() else "") or 0)
