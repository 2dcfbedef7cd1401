"""The newest published weights: what an explorer generates with."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

import anyio.to_thread

from trinity_buffer.errors import CheckpointError
from trinity_buffer.events import PolicyPublished, kinds_of
from trinity_buffer.pipeline.experiment import Experiment, PublishedPolicy
from trinity_buffer.pipeline.proof.checkpoint import being_read, require_digest


@runtime_checkable
class Loadable(Protocol):
    """A model that can be had with other weights."""

    def load(self, uri: str) -> Self:
        """Return such a model with the weights that were published at ``uri``. Off the event loop.

        Raises:
            CheckpointError: they are not there any more.
        """
        ...


M = TypeVar("M", bound=Loadable)


class Weights(Generic[M]):
    """A model that keeps up with what the trainer publishes.

    Attributes:
        model: with the newest weights that were loaded.
        version: of these weights; as the model comes it is policy version 0.
    """

    def __init__(self, experiment: Experiment, model: M) -> None:
        self._experiment = experiment
        self._position = 0
        self.model = model
        self.version = 0

    async def load_newest(self) -> None:
        """Load what was published last, if anything is new.

        A run that was wound back publishes other weights under a version that was there before.
        """
        while True:
            found = await self._experiment.newest_policy()
            if found is None or found.position == self._position:
                return
            try:
                model = await anyio.to_thread.run_sync(self._load, found)
            except CheckpointError as error:
                # The trainer keeps only its newest checkpoints: between the event and the file, a
                # newer one came. Gone, half there or another's file: all mean to ask again.
                if (
                    newer := await self._experiment.newest_policy()
                ) and newer.position > found.position:
                    continue
                error.add_note(
                    f"the trainer published it as policy version {found.version}: its commit can "
                    "name another path of the same weights that this model loads (policy=PATH), or "
                    "publish nothing (policy=False)"
                )
                raise
            self.model, self.version, self._position = model, found.version, found.position

    async def follow(self) -> None:
        """Load whatever is published, until the experiment is finished."""
        async for _ in self._experiment.events(
            self._position, follow=True, kinds=kinds_of(PolicyPublished)
        ):
            await self.load_newest()

    def _load(self, policy: PublishedPolicy) -> M:
        """Return the model with these weights, which stay while they are loaded."""
        with being_read(Path(policy.uri)):
            if policy.digest and Path(policy.uri).exists():
                require_digest(Path(policy.uri), policy.digest)
            return self.model.load(policy.uri)
