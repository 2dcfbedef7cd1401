"""The stream of a rank above 0: it serves what rank 0 has leased, read from the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from trinity_buffer.pipeline.streaming.manifest import FIRST_LINK, chain
from trinity_buffer.pipeline.streaming.resuming import has_set, last_commit, wait_for_set
from trinity_buffer.pipeline.streaming.train_step import TrainStep
from trinity_buffer.pipeline.streaming.train_stream import TrainStream
from trinity_buffer.store import trainer_queries


class RankStream(TrainStream):
    """Looks like rank 0's stream to its trainer; it leases nothing, its commit is a word."""

    @override
    async def prepare(self) -> None:
        """Join the other ranks, find the last commit and what was handed out after it."""
        if not await has_set(self.experiment, self.options):
            await wait_for_set(self.experiment, self.options)
        await self._ranks.join()
        steps = await self._database.read(
            trainer_queries.steps, self.experiment.key, self.options.consumer
        )
        self._committed = self._ranks.committed
        self._chain = FIRST_LINK
        for done in steps[: self._committed]:
            self._chain = chain(self._chain, done.manifest_digest)
        if self._committed:
            self.resume = await last_commit(self.experiment, steps[: self._committed], self._chain)
        self._again = len(steps)
        self._next_step = self._committed + 1

    @override
    async def run(self) -> None:
        """Serve what rank 0 leases until it says that there is no more."""
        try:
            await self._feed()
        except Exception as error:  # noqa: BLE001 - re-raised where the stream is read
            self._failure = error
        finally:
            self._ready.end()
            if self._ranks.presence is not None:
                await self._ranks.presence.gone()

    @override
    async def _feed(self) -> None:
        while True:
            state = await self._database.changes.state()
            leased = await self._database.read(
                trainer_queries.steps,
                self.experiment.key,
                self.options.consumer,
                after=self._next_step - 1,
            )
            if leased:
                self._ranks.wait.over()
            for row in leased:
                await self._ready.room()
                step = await self._serve_again(row)
                step.recorded = row.step <= self._again
                self._next_step = row.step + 1
                self._ready.put(step)
            if self._ranks.ended is not None and self._next_step > self._ranks.ended:
                return
            if not leased:
                await self._ranks.wait_for_news(state)

    @override
    async def commit(
        self,
        step: TrainStep,
        checkpoint: str | Path | None = None,
        policy: str | Path | None = None,
        environment: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        skipped: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        """Tell rank 0 that this rank went through every step up to ``step``; rank 0 commits them.

        Call it when this rank's files of the checkpoint, if it has any, are written. The other
        arguments are rank 0's affair.

        Raises:
            LeaseLostError: the ranks assembled anew without this one.
            InvalidArgumentError: a step up to ``step`` was not delivered by this stream.
        """
        del checkpoint, policy, environment, metrics, skipped
        if step.step <= self._committed:
            return
        steps = self._delivered.between(self._committed, step.step)
        await self._ranks.part_done(step.step, self._delivered.rows(steps))
        self._committed = step.step
        self._delivered.forget(steps)
