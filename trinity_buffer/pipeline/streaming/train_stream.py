"""The stream of gradient steps: lease, decode, collate, hand over; commit; resume."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity_buffer.crash_points import reached
from trinity_buffer.errors import StoreError
from trinity_buffer.events import StepsCommitted, TrainerRewound
from trinity_buffer.pipeline.annotating.recorded_strategy import recorder
from trinity_buffer.pipeline.background import running, task_group
from trinity_buffer.pipeline.events import new_event
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.loading.event_cache import EventCache
from trinity_buffer.pipeline.streaming.collate import MicroBatch, collate_step, rows_in
from trinity_buffer.pipeline.streaming.collate_buffers import StepMemory
from trinity_buffer.pipeline.streaming.committing import (
    DeliveredSteps,
    commit_events,
    environment_of_run,
    finite,
    skips,
)
from trinity_buffer.pipeline.streaming.manifest import FIRST_LINK, Manifest, chain
from trinity_buffer.pipeline.streaming.ranks import RankSession
from trinity_buffer.pipeline.streaming.resuming import (
    Dealer,
    has_set,
    last_commit,
    leased_step,
    register,
    require_checkpoint_of,
    wait_for_set,
)
from trinity_buffer.pipeline.streaming.row_loader import LoadedRows, RowLoader
from trinity_buffer.pipeline.streaming.step_queue import StepQueue
from trinity_buffer.pipeline.streaming.step_sampler import StepSampler
from trinity_buffer.pipeline.streaming.stream_options import Resume, StreamOptions
from trinity_buffer.pipeline.streaming.train_step import TrainStep
from trinity_buffer.pipeline.streaming.trainer_lease import TrainerLease
from trinity_buffer.pipeline.streaming.voice import StreamVoice
from trinity_buffer.store import log, queries, trainer_queries
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.rows import ConsumerRow, StepRow
from trinity_buffer.store.transaction import ReadSession, Session, Transaction

TOGETHER_S = 0.05
"""For so long steps are made in one go, while the trainer asks for more of them: others of this
process cannot write meanwhile."""


class TrainStream:
    """An open stream; iterate over it asynchronously. Made by `open_async_train_stream`.

    Attributes:
        resume: the last commit, or None at the very beginning.
        incomplete_groups: with ``strategy=None``, groups left waiting when the stream ended.
    """

    def __init__(
        self,
        experiment: Experiment,
        options: StreamOptions,
        lease: TrainerLease,
        expert: Experiment | None = None,
    ) -> None:
        self.experiment = experiment
        self.options = options
        self.resume: Resume | None = None
        self.incomplete_groups = 0
        self._database = experiment.database
        self._lease = lease
        self._memory = StepMemory()
        self._loader = RowLoader(EventCache(experiment.key, experiment.name))
        self._expert = expert
        self._sampler = StepSampler(experiment, options, lease, self._loader, expert)
        self._ranks = RankSession(experiment, options)
        self._committed = 0
        self._delivered = DeliveredSteps()
        self._recorded: deque[StepRow] = deque()
        self._next_step = 1
        self._chain = FIRST_LINK
        self._recorders = [e for e in (None if options.strategy else experiment, expert) if e]
        self._voice = StreamVoice(experiment, options.consumer, self._sampler)
        self._begun = False
        self._failure: Exception | None = None
        self._ready = StepQueue(options.prefetch)

    # -- opening

    async def prepare(self) -> None:
        """Begin, if the set that is trained on is there; otherwise `run` waits for it.

        Raises:
            UnknownNameError: there is no such set, and it is not waited for.
        """
        if await has_set(self.experiment, self.options):
            await self._begin()

    async def _begin(self) -> None:
        """Register, rewind if asked to, find the last commit and what was handed out after it."""
        row = await register(self.experiment, self.options.consumer, self.options.annotation_set)
        if self.options.resume_from is not None:
            row = await self._rewind(row, self.options.resume_from)
        self._committed = row.committed_step
        steps = await self._database.read(
            trainer_queries.steps, self.experiment.key, self.options.consumer
        )
        for done in steps[: row.committed_step]:
            self._chain = chain(self._chain, done.manifest_digest)
        if row.committed_step:
            self.resume = await last_commit(
                self.experiment, steps[: row.committed_step], self._chain
            )
        dealer = Dealer(self.experiment, self._lease, self._loader, self.options.world_size)
        self._recorded = deque(await dealer.dealt(steps[row.committed_step :]))
        self._next_step = row.leased_step + 1
        await self._database.read(self._sampler.start)
        await self._ranks.assemble(self._lease, row.committed_step)
        self._begun = True

    async def _rewind(self, row: ConsumerRow, step: int) -> ConsumerRow:
        name, key = self.options.consumer, self.experiment.key
        await require_checkpoint_of(self._database, key, row, step)
        if step == row.committed_step:
            return row
        back = TrainerRewound(consumer=name, step=step, from_step=row.committed_step)
        event = new_event(back)

        def rewind(tx: Transaction) -> ConsumerRow | None:
            self._lease.append(tx, [event])
            return queries.consumer_row(tx, key, name)

        rewound = await self._database.write(rewind)
        assert rewound is not None
        return rewound

    # -- serving

    async def run(self) -> None:
        """Make and serve steps until there are no more; errors come out where it is read."""
        try:
            if not self._begun:
                await wait_for_set(self.experiment, self.options)
                await self._begin()
            async with running(self._gather):
                await self._feed()
            await self._voice.end(self._ready.num_put)
            await self._ranks.end(self._next_step - 1)
        except Exception as error:  # noqa: BLE001 - re-raised where the stream is read
            self._failure = error
        finally:
            self._ready.end()
            await self._voice.presence.gone()

    async def _gather(self) -> None:
        """Make the groups of what is trained as it was recorded, while the stream is read."""
        async with task_group() as tasks:
            for experiment in list(self._recorders):
                tasks.start_soon(self._record, experiment)

    async def _record(self, experiment: Experiment) -> None:
        report = await recorder(experiment).run(follow=self.options.follow)
        if experiment is self.experiment:
            self.incomplete_groups = report.waiting_groups
        self._recorders.remove(experiment)
        self._database.changes.notify()

    async def _feed(self) -> None:
        while self._recorded:
            await self._ready.room()
            self._ready.put(await self._serve_again(self._recorded.popleft()))
        await self._ready.room()
        while await self._next():
            await self._ready.room()

    async def _serve_again(self, row: StepRow) -> TrainStep:
        def load(s: ReadSession) -> TrainStep:
            found = leased_step(s, self.experiment, row)
            rows = self._loader.load(s, found.manifest)
            microbatches = s.compute(self._collate, found.manifest, rows)
            return self._step(found.manifest, rows, microbatches, found.log_head, recorded=True)

        return await self._database.read_session(load)

    async def _next(self) -> bool:
        """Make the next step, and more if they are asked for; return False if there is none."""
        wait = self._voice.wait()
        while True:
            await self._voice.presence.seen()
            state = await self._database.changes.state()
            recorders = list(self._recorders)
            ending = not recorders and not self.options.follow
            made = await self._make(partial_ok=ending)
            if not made and not ending and self.experiment not in recorders:
                # Asked only now: it would cost each step a transaction. What came before the end
                # is read once more.
                ending = await self.experiment.is_finished()
                if ending:
                    made = await self._make(partial_ok=True)
            if made or ending:
                wait.over()
                return made
            if self._expert not in recorders:  # there is one, and it is finished
                self._sampler.require_expert()
            await wait.changed(state)

    async def _make(self, *, partial_ok: bool) -> bool:
        """Make steps while there is room and there are rows; return whether there was one."""

        def work(s: Session) -> bool:
            until, made = time.monotonic() + TOGETHER_S, False
            while self._make_one(s, partial_ok=partial_ok):
                made = True
                if not self._ready.has_room() or time.monotonic() > until:
                    break
            return made

        return await self._database.session(work)

    def _make_one(self, s: Session, *, partial_ok: bool) -> bool:
        """Make the next step, if there are rows for it; return whether there were.

        What it was read from is let go of on return: the next step is read into the same memory,
        and a trainer's step does not hold the bytes of the one after it.
        """
        taken = self._sampler.take(s, self._next_step, partial_ok=partial_ok)
        if taken is not None:
            self._next_step += 1
            self._ready.put(self._lease_step(s, *taken))
        return taken is not None

    def _lease_step(self, s: Session, manifest: Manifest, rows: LoadedRows) -> TrainStep:
        """Return the step of these rows, leased."""
        name, token = self.options.consumer, self._lease.token

        def collate() -> tuple[list[MicroBatch], NewEvent]:
            microbatches = self._collate(manifest, rows)
            return microbatches, new_event(manifest.leased_by(name, token))

        def append(tx: Transaction) -> bytes:
            self._lease.append(tx, [event])
            reached("inside-lease")
            return log.end(tx, self.experiment.key).head

        microbatches, event = s.compute(collate)
        reached("before-lease")
        head = s.write(append)
        reached("after-lease")
        return self._step(manifest, rows, microbatches, head, recorded=False)

    def _collate(self, manifest: Manifest, rows: LoadedRows) -> list[MicroBatch]:
        return collate_step(
            manifest,
            rows,
            rank=self.options.rank,
            world=self.options.world_size,
            device=self.options.device,
            memory=self._memory,
        )

    def _step(
        self,
        manifest: Manifest,
        rows: LoadedRows,
        microbatches: list[MicroBatch],
        head: bytes | None,
        *,
        recorded: bool,
    ) -> TrainStep:
        if self.options.recompute_old_logprob:
            for microbatch in microbatches:
                microbatch.tensors.pop("old_logprob", None)
        self._chain = chain(self._chain, manifest.digest)
        versions = [version for version in rows.facts.policy_versions if version is not None]
        step = TrainStep(manifest.step, microbatches, manifest, self._chain, recorded, versions)
        proof = "" if head is None else head.hex()
        return replace(step, rows=rows_in(microbatches, rows), log_head=proof)

    def close(self) -> None:
        """Let go of the steps that were made ready and not asked for."""
        self._ready.discard()

    def __aiter__(self) -> AsyncIterator[TrainStep]:
        return self

    async def __anext__(self) -> TrainStep:
        step = self._delivery(await self._ready.receive())
        if step is None:
            raise StopAsyncIteration
        return step

    def wait_for_step(self) -> TrainStep | None:
        """Return the next step, or None at the end; for a thread that may wait."""
        return self._delivery(self._ready.get())

    def _delivery(self, step: TrainStep | None) -> TrainStep | None:
        """Note that ``step`` is in the trainer's hands."""
        if step is None:
            if self._failure is not None:
                raise self._failure from None
            return None
        if self._lease.lost is not None:
            raise self._lease.lost
        self._delivered.add(step)
        return step

    # -- committing

    async def commit(
        self,
        step: TrainStep,
        checkpoint: str | Path | None = None,
        policy: str | Path | None = None,
        environment: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        skipped: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        """Record, in one transaction, that the steps up to ``step`` are in ``checkpoint``.

        The checkpoint's files are written through to the disk first. The same commit again is a
        no-op.

        Args:
            checkpoint: file or folder that holds the weights after ``step``; None where there is
                none to tie to.
            policy: file with the weights that explorers shall load; publishes policy version
                ``step.step``.
            environment: what replay must restore; by default that of `environment_of_run`.
            metrics: numbers to remember with the step; those that are not finite are left out.
            skipped: steps that the weights did not go through -> uids of the rows to look at.

        Raises:
            LeaseLostError: another process took over; nothing was recorded.
            CheckpointError: no file at ``checkpoint`` or ``policy``.
        """
        if step.step <= self._committed:
            return
        steps = self._delivered.between(self._committed, step.step)
        rows = await self._rows_taken(steps)
        commit = StepsCommitted(
            consumer=self.options.consumer,
            token=self._lease.token,
            steps=steps,
            manifests=self._delivered.digests(steps),
            rows_by_rank=rows,
            chain=step.chain,
            checkpoint=None,
            checkpoint_digest=None,
            metrics=finite(metrics or {}),
            environment=dict(environment or environment_of_run(self.options.device)),
            **skips(skipped or {}),
        )
        events = await commit_events(commit, checkpoint, policy)
        reached("before-commit")
        await self._append_commit(events, step)
        reached("after-commit")
        self._committed = step.step
        self._delivered.forget(steps)

    async def _rows_taken(self, steps: Sequence[int]) -> list[list[int]]:
        """Return how many rows of each step each rank took, once all have gone through them."""
        own = self._delivered.rows(steps)
        found = await self._ranks.all_parts(steps, own, self._lease)
        self._delivered.require_rows(steps, found)
        return found

    async def uids(self, step: TrainStep, rows: Sequence[int]) -> list[str]:
        """Return the uids of rows of a step, by their places in its manifest."""
        return await self._database.read_session(
            lambda s: self._loader.uids(s, step.manifest, rows)
        )

    async def _append_commit(self, events: list[NewEvent], step: TrainStep) -> None:
        name, key = self.options.consumer, self.experiment.key

        def append(tx: Transaction) -> None:
            self._lease.append(tx, events)
            reached("inside-commit")

        try:
            await self._database.write(append)
        except StoreError:
            # The connection may have been lost after the commit: read its key back, never send it
            # again blindly.
            row = await self._database.read(queries.consumer_row, key, name)
            if row is None or row.committed_step < step.step or row.token != self._lease.token:
                raise
