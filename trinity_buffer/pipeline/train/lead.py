"""The ranks of a trainer: rank 0 leases steps and records commits, the others read its log."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from typing_extensions import override

from trinity_buffer.events import PolicyPublished, StepsCommitted, TrainerRewound
from trinity_buffer.faultpoints import reached
from trinity_buffer.pipeline.annotate.consumer import StrategyConsumer, recorder
from trinity_buffer.pipeline.background import running, task_group
from trinity_buffer.pipeline.coordination.diagnosis import (
    counted,
    is_being_decided,
    left_of,
    outcome_of,
)
from trinity_buffer.pipeline.coordination.lease import TrainerLease
from trinity_buffer.pipeline.coordination.presence import Presence, Work
from trinity_buffer.pipeline.coordination.waiting import (
    ReportedWait,
    Stall,
    one_line,
    wait_report_s,
)
from trinity_buffer.pipeline.environment import environment_of_run
from trinity_buffer.pipeline.handle import ExperimentHandle, new_event
from trinity_buffer.pipeline.load.columns import RowLoader
from trinity_buffer.pipeline.train import checkpoint as checkpoints
from trinity_buffer.pipeline.train.commit import (
    NON_FINITE,
    Commit,
    Delivered,
    finite,
    measured_event,
    require_rows,
)
from trinity_buffer.pipeline.train.options import Resume, StreamOptions
from trinity_buffer.pipeline.train.ranks import RankSession
from trinity_buffer.pipeline.train.resume import (
    Repartitioner,
    has_set,
    last_commit,
    register,
    require_checkpoint_of,
    rows_to_drop,
    steps_at_start,
    wait_for_set,
)
from trinity_buffer.pipeline.train.sampler import StepSampler
from trinity_buffer.pipeline.train.step import StepMaker, StepQueue, TrainStep
from trinity_buffer.pipeline.write.planning import Admission
from trinity_buffer.store import trainer_queries, writer_queries
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.rows import ConsumerRow, StepRow
from trinity_buffer.store.segments import SegmentRow
from trinity_buffer.store.transaction import Session, Transaction

IN_ONE_GO_S = 0.05
"""Steps are made in one session for so long while the trainer asks for more: other writers of this
process have to wait meanwhile."""

LOOK_AGAIN_S = 1.0
"""Interval of checks whether the strategy of a finished experiment is still alive."""

_logger = logging.getLogger(__name__)


class Rank(ABC):
    """The source of one rank's steps, which also commits them.

    Args:
        experiment: the trainer's own experiment.
        options: options of the stream.
        loader: loads the trainer's rows.
        presence: heartbeats of rank 0.

    Attributes:
        queue: the steps that are ready.
        resume: the last commit, or None at the very beginning; known after `prepare`.
        committed: step of the last commit, or 0.
        incomplete_groups: number of groups left incomplete when the steps ended.
        lease: the trainer's lease, of rank 0 alone.
        presence: heartbeats of this rank.
    """

    lease: TrainerLease | None = None

    def __init__(
        self,
        experiment: ExperimentHandle,
        options: StreamOptions,
        loader: RowLoader,
        presence: Presence | None = None,
    ) -> None:
        self._experiment = experiment
        self._options = options
        self._database = experiment.database
        self._loader = loader
        self._maker = StepMaker(experiment, options, loader)
        self._ranks = RankSession(experiment, options)
        self._next_step = 1
        own = presence or self._ranks.presence
        assert own is not None  # rank 0 has that of its lease
        self.presence = own
        self.resume: Resume | None = None
        self.committed = 0
        self.incomplete_groups = 0
        self.queue = StepQueue(options.prefetch)

    @abstractmethod
    async def prepare(self) -> None:
        """Begin, if the annotation set exists.

        Raises:
            UnknownNameError: the set does not exist, and ``wait_for_set`` is False.
        """

    @abstractmethod
    async def commit(
        self, step: TrainStep, delivered: Sequence[Delivered], request: Commit
    ) -> None:
        """Record that the ``delivered`` steps, the last one ``step``, were trained."""

    async def run(self) -> None:
        """Put steps into the queue until there are no more; errors are raised to its reader."""
        try:
            await self._serve()
        except Exception as error:  # noqa: BLE001 - re-raised where the stream is read
            self.queue.fail(error)
        finally:
            self.queue.end()

    @abstractmethod
    async def _serve(self) -> None:
        """Put steps into the queue until there are no more."""

    async def _find_last_commit(self, committed: int) -> list[StepRow]:
        """Continue after the steps up to ``committed``; return the steps leased since."""
        name, self.committed = self._options.consumer, committed
        done, leased = await steps_at_start(self._experiment, name, committed)
        chain = self._maker.go_on_after(done)
        if done:
            self.resume = await last_commit(self._experiment, name, done[-1], chain)
        return leased

    @asynccontextmanager
    async def _at_work(
        self, *tasks: Callable[[], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[None]:
        """Run ``tasks`` in the context, and tell other processes while no step is waited for."""
        work = Work(self.presence, lambda: not self.queue.is_waited_for())
        async with running(partial(work.keep, wait_report_s()), *tasks):
            yield


class LeadingRank(Rank):
    """Makes the steps of a trainer, for the other ranks too, and commits them.

    Args:
        experiment, options, loader: see `Rank`.
        lease: the trainer's lease, held by this process.
        expert: the experiment of the expert's rows, if the stream mixes.
    """

    def __init__(
        self,
        experiment: ExperimentHandle,
        options: StreamOptions,
        loader: RowLoader,
        lease: TrainerLease,
        expert: ExperimentHandle | None = None,
    ) -> None:
        super().__init__(experiment, options, loader, lease.presence)
        self.lease: TrainerLease = lease
        self._expert = expert
        self._sampler = StepSampler(experiment, options, lease, loader, expert)
        self._recorded: list[StepRow] = []
        recorded = (None if options.strategy else experiment, expert)
        self._recorders = {e.key: recorder(e) for e in recorded if e}
        self._begun = False
        self._without_expert = self._passed_over = False  # already warned of

    # -- opening

    @override
    async def prepare(self) -> None:
        """Begin, if the annotation set exists; otherwise `run` waits for it.

        Raises:
            UnknownNameError: the set does not exist, and ``wait_for_set`` is False.
        """
        if await has_set(self._experiment, self._options):
            await self._begin()

    async def _begin(self) -> None:
        """Register, rewind if asked to, and find the last commit and the steps leased after it."""
        options = self._options
        row = await register(self._experiment, options.consumer, options.annotation_set)
        if options.resume_from is not None:
            row = await self._rewind(row, options.resume_from)
        leased = await self._find_last_commit(row.committed_step)
        self._next_step = row.leased_step + 1
        if self.resume is not None and self.resume.checkpoint is None:
            _logger.warning(
                "trainer %r goes on after step %d, whose commit names no checkpoint: its weights "
                "are yours to load; resume_from= goes back to a step with a checkpoint, or to 0",
                options.consumer,
                self.resume.step,
            )
        dropped = await rows_to_drop(self._experiment, self._expert, options)
        repartitioner = Repartitioner(self._experiment, self.lease, self._loader, options, dropped)
        self._recorded = await repartitioner.repartition(leased)
        await self._database.read(self._sampler.start, dropped)
        await self._ranks.assemble(self.lease, row.committed_step)
        self._begun = True

    async def _rewind(self, row: ConsumerRow, step: int) -> ConsumerRow:
        name, key = self._options.consumer, self._experiment.key
        await require_checkpoint_of(self._database, key, row, step)
        if step == row.committed_step:
            return row
        back = TrainerRewound(consumer=name, step=step, from_step=row.committed_step)
        event = new_event(back)

        def rewind(tx: Transaction) -> ConsumerRow | None:
            self.lease.append(tx, [event])
            return writer_queries.consumer_row(tx, key, name)

        rewound = await self._database.write(rewind)
        assert rewound is not None
        return rewound

    # -- serving

    @override
    async def _serve(self) -> None:
        if not self._begun:
            await wait_for_set(self._experiment, self._options, self.presence)
            await self._begin()
        async with self._at_work(self._gather):
            for row in self._recorded:
                await self.queue.room()
                self.queue.put(await self._maker.leased(row))
            await self.queue.room()
            while await self._next():
                await self.queue.room()
        await self._report_untrained(self.queue.num_put)
        await self._ranks.end(self._next_step - 1)

    async def _gather(self) -> None:
        """Group recorded rows in the background, for sets that no strategy annotates."""
        async with task_group() as tasks:
            for key, consumer in list(self._recorders.items()):
                tasks.start_soon(self._record, key, consumer)

    async def _record(self, key: int, consumer: StrategyConsumer) -> None:
        report = await consumer.run(follow=self._options.follow)
        if key == self._experiment.key:
            self.incomplete_groups = report.waiting_groups
        del self._recorders[key]
        self._database.changes.notify()

    async def _next(self) -> bool:
        """Make the next step, and more while they are asked for; return False at the end."""
        session, key, wait = self._database.session, self._experiment.key, None
        while True:
            await self.presence.seen()
            state = await self._database.changes.state()
            recorders = dict(self._recorders)
            ending = not recorders and not self._options.follow
            made, finished = await session(partial(self._make, partial_ok=ending))
            if finished and not ending:  # one more pass: rows may precede the end
                ending = key not in recorders and not await self._more_is_to_come()
                if ending:
                    made, _ = await session(partial(self._make, partial_ok=True))
            if made or ending:
                if wait is not None:
                    wait.over()
                return made
            expert = None if self._expert is None else self._expert.key
            goes_on = self._options.follow and not finished
            if goes_on and expert not in recorders:  # there is one, and it is finished
                self._sampler.require_expert()
            if wait is None:
                stall = Stall(self._database, key, self.presence)
                changes = self._database.changes
                wait = ReportedWait(changes, self._waiting_for, self.presence, stall=stall)
                wait.is_waited_for = self.queue.is_waited_for
            # A killed strategy commits nothing that would wake this wait.
            await wait.changed(state, LOOK_AGAIN_S if finished else None)

    async def _more_is_to_come(self) -> bool:
        if not all(consumer.has_read_all for consumer in self._recorders.values()):
            return True
        key, annotation_set = self._experiment.key, self._options.annotation_set
        return await self._database.read(is_being_decided, key, annotation_set)

    def _make(self, s: Session, *, partial_ok: bool) -> tuple[bool, bool]:
        """Make steps while there is room and there are rows.

        Returns:
            Whether a step was made; if not, whether the experiment is finished.
        """
        until, made = time.monotonic() + IN_ONE_GO_S, False
        while self._make_one(s, partial_ok=partial_ok):
            made = True
            # The reader of the step gets the interpreter lock only once this thread is idle.
            more = self.queue.has_room() and not self._sampler.is_through
            if not more or time.monotonic() > until:
                break
        return made, not made and s.read(writer_queries.is_finished, self._experiment.key)

    def _make_one(self, s: Session, *, partial_ok: bool) -> bool:
        """Lease the next step if there are rows for it; return whether there were.

        Its segments are released on return: the next step is read into the same memory, and the
        trainer's step does not keep the bytes of the next one alive.
        """
        taken = self._sampler.take(s, self._next_step, partial_ok=partial_ok)
        if taken is None:
            return False
        if self._sampler.lacks_expert and not self._without_expert:
            self._without_expert = True
            _logger.warning(
                "trainer %r: from step %d on fewer of the expert's groups are mixed in, or none: "
                "experiment %r has no more",
                self._options.consumer,
                self._next_step,
                self._options.expert_experiment,
            )
        self._next_step += 1
        step, event = s.compute(lambda: (self._maker.make(*taken), new_event(taken[0])))
        reached("before-lease")
        head = s.write(self._append_lease, event)
        reached("after-lease")
        self.queue.put(self._maker.chained(step, head))
        return True

    def _append_lease(self, tx: Transaction, event: NewEvent) -> bytes:
        (place,) = self.lease.append(tx, [event])
        reached("inside-lease")
        return place.head

    # -- reporting

    async def _waiting_for(self) -> str:
        lacking = await self._database.read(self._sampler.waiting_for)
        return f"trainer {self._options.consumer!r} waits for {lacking}{self._not_committed()}"

    def _not_committed(self) -> str:
        """Return the uncommitted steps that keep explorers waiting, as text; "" if none do."""
        rules, steps = Admission.of(self._experiment.config), self._next_step - 1 - self.committed
        most = rules.most_uncommitted_steps
        if most is None or steps < most or self._options.consumer != rules.trainer:
            return ""
        return (
            f"; {counted(steps, 'step')} are handed out and not committed, and with max_staleness="
            f"{rules.max_staleness} explorers wait for their commit: commit at least once in "
            f"{counted(most, 'step')}"
        )

    async def _report_untrained(self, served: int) -> None:
        """Report untrained rows, and why they are left, at the end of a stream."""
        options, key, read = self._options, self._experiment.key, self._database.read
        left = await read(left_of, key, options.annotation_set)
        if not (left or served):
            left = await read(outcome_of, key, options.consumer)
        if left:
            steps = f"after {counted(served, 'step')}" if served else "without a step"
            _logger.warning(
                "trainer %r ended %s: %s", self._options.consumer, steps, one_line(left)
            )

    # -- committing

    @override
    async def commit(
        self, step: TrainStep, delivered: Sequence[Delivered], request: Commit
    ) -> None:
        """Record, in one transaction, that the ``delivered`` steps were trained.

        The published policy and what was measured go into it too. Files are flushed to disk and
        digested before it, since a transaction has to be short.

        Raises:
            LeaseLostError: another process took over; nothing was recorded.
            CheckpointError: no file at the checkpoint or the policy.
        """
        name, steps = self._options.consumer, [of.manifest.step for of in delivered]
        rows = await self._ranks.all_parts(steps, [of.rows for of in delivered], self.lease)
        require_rows(delivered, rows)
        checkpoint, published = request.paths
        known = dict(request.digests or {})  # checkpoint and policy may share files
        digests = [
            None if path is None else await run_sync(checkpoints.make_durable, path, known)
            for path in (checkpoint, published)
        ]
        skipped = request.skipped or {}
        committed = StepsCommitted(
            consumer=name,
            token=self.lease.token,
            steps=steps,
            manifests=[of.manifest.digest for of in delivered],
            rows_by_rank=rows,
            chain=step.chain,
            checkpoint=None if checkpoint is None else str(checkpoint),
            checkpoint_digest=digests[0],
            metrics=finite(request.metrics or {}),
            environment=dict(request.environment or environment_of_run(self._options.device)),
            skipped=NON_FINITE if skipped else None,
            skipped_steps=list(skipped),
            largest_rows=[list(uids) for uids in skipped.values()],
        )
        events, segments = [new_event(committed)], self._database.segments
        if published is not None and digests[1] is not None:
            policy = PolicyPublished(number=step.step, uri=str(published), digest=digests[1])
            events.append(new_event(policy))
        segment_rows: list[SegmentRow] = []
        for measures in (of.measures for of in delivered if of.measures is not None):
            event, own_rows = await run_sync(measured_event, name, measures, segments)
            events.append(event)
            segment_rows += own_rows

        def append(tx: Transaction) -> None:
            segments.attach(tx, segment_rows)
            self.lease.append(tx, events, committed=steps[0] - 1)
            reached("inside-commit")

        reached("before-commit")
        await self._database.write(append)
        reached("after-commit")
        if published is not None and not self._passed_over:
            await self._warn_if_passed_over(published)

    async def _warn_if_passed_over(self, published: Path) -> None:
        """Warn once if explorers load another trainer's weights."""
        own, followed = self._options.consumer, self._experiment.config.get("trainer", "trainer")
        read = self._database.read
        newest = await read(writer_queries.newest_policy, self._experiment.key, str(followed))
        if own != followed and (newest is None or newest[1] != str(published)):
            self._passed_over = True
            _logger.warning(
                "trainer %r: explorers follow trainer %r, and pass over the weights that this one "
                "publishes: to have it followed, set trainer=%r in the experiment's configuration",
                own,
                followed,
                own,
            )


class FollowingRank(Rank):
    """Serves leased steps; its commit only reports its progress to rank 0.

    The caller keeps its heartbeats going.
    """

    def __init__(
        self, experiment: ExperimentHandle, options: StreamOptions, loader: RowLoader
    ) -> None:
        super().__init__(experiment, options, loader)
        self._leased_before = 0

    @override
    async def prepare(self) -> None:
        """Join the other ranks, and find the last commit and the steps leased after it."""
        if not await has_set(self._experiment, self._options):
            await wait_for_set(self._experiment, self._options, self.presence)
        await self._ranks.join()
        self._ranks.wait.is_waited_for = self.queue.is_waited_for
        leased = await self._find_last_commit(self._ranks.committed)
        self._leased_before = self.committed + len(leased)
        self._next_step = self.committed + 1

    @override
    async def _serve(self) -> None:
        """Serve the steps that rank 0 leases until it records the end."""
        async with self._at_work():
            while self._ranks.ended is None or self._next_step <= self._ranks.ended:
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
                if not leased:
                    await self._ranks.wait_for_news(state)

    @override
    async def commit(
        self, step: TrainStep, delivered: Sequence[Delivered], request: Commit
    ) -> None:
        """Tell rank 0 that this rank went through the steps; rank 0 carries out the ``request``.

        Raises:
            LeaseLostError: the ranks assembled anew without this one.
        """
        del request
        await self._ranks.part_done(step.step, [of.rows for of in delivered])
