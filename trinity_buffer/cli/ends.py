"""The two ends of a run: what makes its rollouts, and the policy that is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trinity_buffer.algorithm import Algorithm
from trinity_buffer.cli.demo_ends import DemoEnds
from trinity_buffer.cli.own_ends import OwnEnds
from trinity_buffer.cli.run_config import RunConfig
from trinity_buffer.explorer.explorer import BatchReport
from trinity_buffer.pipeline.experiment import Experiment


class Ends(Protocol):
    """What a run explores with and trains, from its configuration alone."""

    @property
    def policy_file(self) -> str:
        """Return what the policy is called in a checkpoint."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Return how long an experience may be; None: no bound."""
        ...

    def policy(self) -> Any:
        """Return the policy of version 0.

        Raises:
            InvalidArgumentError: it cannot be loaded.
        """
        ...

    def load(self, path: str | Path) -> Any:
        """Return the policy that was saved at ``path``.

        Raises:
            CheckpointError, InvalidArgumentError: there is none.
        """
        ...

    async def explore(
        self,
        experiment: Experiment,
        algorithm: Algorithm,
        *,
        actor: str,
        acknowledgements: Path | None,
        max_batches: int | None,
        report: Callable[[BatchReport], None],
    ) -> None:
        """Make rollouts until there is nothing more to do, or the experiment is finished."""
        ...

    def accuracy(self, policy: Any, *, problems: int, seed: int) -> float | None:
        """Return the share of problems that the policy solves; None: nobody said how to tell."""
        ...


def ends_of(config: RunConfig) -> Ends:
    """Return the ends of a run: one's own where the configuration names the folder of a model."""
    return OwnEnds(config) if isinstance(config.model, str) else DemoEnds(config)
