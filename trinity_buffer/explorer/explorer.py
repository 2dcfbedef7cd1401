"""The explorer: plan, generate, write, seal, again; and after a crash, first what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio.to_thread

from trinity_buffer.experience import Experience
from trinity_buffer.explorer.acknowledgements import Acknowledgements
from trinity_buffer.explorer.under_way import UnderWay
from trinity_buffer.explorer.weights import Loadable, Weights
from trinity_buffer.identity import EID, Key
from trinity_buffer.pipeline.background import running
from trinity_buffer.pipeline.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerSettings:
    """What one explorer generates.

    Attributes:
        actor: its name; its batches are ``<actor>-0``, ``<actor>-1``, ...
        groups_per_batch: problems that are planned at once.
        rollouts_per_group: attempts at each.
        groups_per_write: how many groups are written in one call.
        acknowledgements: file that notes what the store has acknowledged; None: no proof is kept.
        max_batches: end after so many; None: when the experiment is finished.
        take_over: finish batches of explorers that are gone, too.
    """

    actor: str
    groups_per_batch: int = 8
    rollouts_per_group: int = 8
    groups_per_write: int = 8
    acknowledgements: Path | None = None
    max_batches: int | None = None
    take_over: bool = False


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What is said of one batch that was sealed.

    Attributes:
        reward: mean of the rewards of its runs' last steps; None: they have none.
        policy_version: of the weights; None: the model cannot be loaded anew.
        repaired: True if it was planned before a crash and finished now.
        left_out: planned runs that came to nothing; the batch is sealed without them.
    """

    batch: Key
    policy_version: int | None
    rollouts: int
    experiences: int
    reward: float | None
    repaired: bool
    left_out: int = 0


class Sampler(Loadable, Protocol):
    """A policy that makes rollouts of its own."""

    def rollout(
        self, pairs: Sequence[tuple[Key, int]], *, batch: Key, policy_version: int
    ) -> list[Experience]:
        """Return the experiences of the runs ``pairs``, (task, run), of ``batch``."""
        ...


class Explorer:
    """Has rollouts made with the newest published policy, and writes them.

    Args:
        experiment: where they go, and where new policies are announced.
        sampler: makes the rollouts; as it comes it is policy version 0.
        settings: everything else.
    """

    def __init__(
        self,
        experiment: Experiment,
        sampler: Sampler,
        settings: ExplorerSettings,
    ) -> None:
        self._experiment = experiment
        self._settings = settings
        self._writer = experiment.writer(settings.actor)
        self._weights = Weights(experiment, sampler)
        self._under_way = UnderWay(self._writer, None)
        path = settings.acknowledgements
        self._acknowledgements = None if path is None else Acknowledgements(path)

    async def run(self, report: Callable[[BatchReport], None]) -> None:
        """Explore until the experiment is finished or ``max_batches`` are planned."""
        try:
            await self._writer.begin_exploring()
            await self._weights.load_newest()
            number, unfinished = await self._writer.unsealed()
            for batch in unfinished:
                report(await self._finish(batch, repaired=True))
            beside = (self._weights.follow, self._writer.stay_present, self._under_way.stay_known)
            async with running(*beside):
                while self._settings.max_batches is None or number < self._settings.max_batches:
                    for left in await self._left_behind():
                        report(await self._finish(left, repaired=True))
                    batch = f"{self._settings.actor}-{number}"
                    tasks = list(range(self._settings.groups_per_batch))
                    planned = await self._writer.plan(
                        batch,
                        tasks,
                        self._settings.rollouts_per_group,
                        policy_version=lambda: self._weights.version,
                    )
                    if not planned:
                        return
                    report(await self._finish(batch, repaired=False))
                    number += 1
        finally:
            if self._acknowledgements is not None:
                self._acknowledgements.close()

    async def _left_behind(self) -> list[str]:
        """Return the batches of explorers that are gone, which are this one's to finish now."""
        return await self._writer.take_over() if self._settings.take_over else []

    async def _finish(self, batch: Key, *, repaired: bool) -> BatchReport:
        """Generate and write what is missing of a planned batch, then seal it."""
        missing = await self._writer.missing(batch)
        version, sampler = self._weights.version, self._weights.model
        experiences, rewards = 0, []
        for pairs in _by_group(missing, self._settings.groups_per_write):
            rollout = partial(sampler.rollout, pairs, batch=batch, policy_version=version)
            with self._under_way.making(EID(batch, *pairs[0])):
                made = await anyio.to_thread.run_sync(rollout)
            receipt = await self._writer.write(made)
            if self._acknowledgements is not None:
                self._acknowledgements.note(receipt)
            experiences += len(made)
            last = {e.eid.rid: e.reward for e in made}
            rewards += [reward for reward in last.values() if reward is not None]
        await self._writer.seal(batch, await self._writer.stored(batch))
        mean = sum(rewards) / len(rewards) if rewards else None
        return BatchReport(batch, version, len(missing), experiences, mean, repaired)


def _by_group(pairs: Sequence[tuple[Key, int]], groups: int) -> list[list[tuple[Key, int]]]:
    """Return ``pairs`` in pieces of whole groups."""
    by_task: dict[Key, list[tuple[Key, int]]] = {}
    for pair in pairs:
        by_task.setdefault(pair[0], []).append(pair)
    tasks = list(by_task.values())
    pieces = (tasks[start : start + groups] for start in range(0, len(tasks), groups))
    return [[pair for task in piece for pair in task] for piece in pieces]
