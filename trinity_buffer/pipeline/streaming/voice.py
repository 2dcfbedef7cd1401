"""What a stream says of itself: that it is there, what it waits for, and what it left."""

from __future__ import annotations

import logging

from trinity_buffer.pipeline.diagnosis import counted
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.presence import Presence
from trinity_buffer.pipeline.spoken_wait import SpokenWait
from trinity_buffer.pipeline.streaming.step_sampler import StepSampler

_logger = logging.getLogger(__name__)


class StreamVoice:
    """Speaks for one trainer.

    Args:
        experiment: the trainer's own.
        trainer: its name.
        sampler: where its steps come from.
    """

    def __init__(self, experiment: Experiment, trainer: str, sampler: StepSampler) -> None:
        self._database = experiment.database
        self._trainer = trainer
        self._sampler = sampler
        self.presence = Presence(experiment.database, experiment.key, "trainer", trainer)

    def wait(self) -> SpokenWait:
        """Return a wait for the rows of the next step."""
        return SpokenWait(self._database.changes, self._waiting_for, self.presence)

    async def _waiting_for(self) -> str:
        lacking = await self._database.read(self._sampler.waiting_for)
        return f"trainer {self._trainer!r} waits for {lacking}"

    async def end(self, served: int) -> None:
        """Say what is left, if anything, and why, at the end of a stream.

        Args:
            served: how many steps this process was handed.
        """
        left = await self._database.read(self._sampler.left)
        if not (left or served):
            left = await self._database.read(self._sampler.found)
        if left:
            steps = f"after {counted(served, 'step')}" if served else "without a step"
            _logger.warning("trainer %r ended %s: %s", self._trainer, steps, left)
