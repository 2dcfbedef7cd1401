"""A rank above 0 of a trainer: it serves what rank 0 has leased, read from the log."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trinity_buffer.pipeline.background import running
from trinity_buffer.pipeline.coordination.presence import Work
from trinity_buffer.pipeline.coordination.waiting import wait_report_s
from trinity_buffer.pipeline.handle import ExperimentHandle
from trinity_buffer.pipeline.load.columns import RowLoader
from trinity_buffer.pipeline.train.commit import Commit, DeliveredSteps
from trinity_buffer.pipeline.train.options import Resume, StreamOptions
from trinity_buffer.pipeline.train.ranks import RankSession
from trinity_buffer.pipeline.train.resume import has_set, last_commit, steps_at_start, wait_for_set
from trinity_buffer.pipeline.train.step import StepMaker, StepQueue, TrainStep
from trinity_buffer.store import trainer_queries


class FollowingRank:
    """Leases nothing; its commit tells rank 0 how far it is.

    Args:
        experiment: the trainer's own.
        options: of the stream.
        loader: of the trainer's rows.

    Attributes:
        presence: of this rank, to be kept as long as it is there.
    """

    incomplete_groups = 0
    lost = None

    def __init__(
        self, experiment: ExperimentHandle, options: StreamOptions, loader: RowLoader
    ) -> None:
        self._experiment = experiment
        self._options = options
        self._database = experiment.database
        self._maker = StepMaker(experiment, options, loader)
        self._ranks = RankSession(experiment, options)
        assert self._ranks.presence is not None
        self.presence = self._ranks.presence
        self._leased_before = 0
        self._next_step = 1
        self.resume: Resume | None = None
        self.committed = 0
        self.queue = StepQueue(options.prefetch)

    async def leads(self) -> bool:
        """Return False: the lease is rank 0's."""
        return False

    async def prepare(self) -> None:
        """Join the other ranks, find the last commit and what was handed out after it."""
        if not await has_set(self._experiment, self._options):
            await wait_for_set(self._experiment, self._options, self.presence)
        await self._ranks.join()
        self._ranks.wait.is_waited_for = self.queue.is_waited_for
        self.committed, name = self._ranks.committed, self._options.consumer
        done, leased = await steps_at_start(self._experiment, name, self.committed)
        chain = self._maker.go_on_after(done)
        if done:
            self.resume = await last_commit(self._experiment, name, done[-1], chain)
        self._leased_before = self.committed + len(leased)
        self._next_step = self.committed + 1

    async def run(self) -> None:
        """Serve what rank 0 leases until it says that there is no more."""
        try:
            work = Work(self.presence, lambda: not self.queue.is_waited_for())
            async with running(partial(work.keep, wait_report_s())):
                await self._feed()
        except Exception as error:  # noqa: BLE001 - re-raised where the stream is read
            self.queue.fail(error)
        finally:
            self.queue.end()

    async def _feed(self) -> None:
        while True:
            state = await self._database.changes.state()
            leased = await self._database.read(
                trainer_queries.steps,
                self._experiment.key,
                self._options.consumer,
                after=self._next_step - 1,
            )
            if leased:
                self._ranks.wait.over()
            for row in leased:
                await self.queue.room()
                step = await self._maker.leased(row)
                step.recorded = row.step <= self._leased_before
                self._next_step = row.step + 1
                self.queue.put(step)
            if self._ranks.ended is not None and self._next_step > self._ranks.ended:
                return
            if not leased:
                await self._ranks.wait_for_news(state)

    async def commit(
        self, step: TrainStep, steps: Sequence[int], delivered: DeliveredSteps, request: Commit
    ) -> None:
        """Tell rank 0 that this rank went through ``steps``; rank 0 commits them.

        The ``request`` is rank 0's to carry out.

        Raises:
            LeaseLostError: the ranks assembled anew without this one.
        """
        del request
        await self._ranks.part_done(step.step, delivered.rows(steps))
