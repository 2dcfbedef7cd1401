"""The ranks of a trainer: rank 0 leases steps and records commits, the others read its log."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trinity_buffer.errors import LeaseLostError
from trinity_buffer.events import StepsCommitted, TrainerRewound
from trinity_buffer.faultpoints import reached
from trinity_buffer.pipeline.annotate.consumer import StrategyConsumer
from trinity_buffer.pipeline.annotate.recorded import recorder
from trinity_buffer.pipeline.background import running, task_group
from trinity_buffer.pipeline.coordination.diagnosis import counted, is_being_decided
from trinity_buffer.pipeline.coordination.lease import TrainerLease
from trinity_buffer.pipeline.coordination.presence import Work
from trinity_buffer.pipeline.coordination.waiting import (
    ReportedWait,
    Stall,
    one_line,
    wait_report_s,
)
from trinity_buffer.pipeline.environment import environment_of_run
from trinity_buffer.pipeline.handle import ExperimentHandle, new_event
from trinity_buffer.pipeline.load.columns import LoadedRows, RowLoader
from trinity_buffer.pipeline.manifest import Manifest
from trinity_buffer.pipeline.train.commit import (
    Commit,
    CommitRecords,
    DeliveredSteps,
    commit_records,
    finite,
    skips,
)
from trinity_buffer.pipeline.train.microbatch import MicroBatch
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
from trinity_buffer.store.transaction import Session, Transaction

IN_ONE_GO_S = 0.05
"""Steps are made in one session for so long while the trainer asks for more: other writers of this
process have to wait meanwhile."""

LOOK_AGAIN_S = 1.0
"""Interval of checks whether the strategy of a finished experiment is still alive."""

_logger = logging.getLogger(__name__)


class LeadingRank:
    """Makes the steps of a trainer, for the other ranks too, and commits them.

    Args:
        experiment: the trainer's own experiment.
        options: options of the stream.
        loader: loads the trainer's rows.
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
        self._experiment = experiment
        self._options = options
        self._database = experiment.database
        self._lease = lease
        self._loader = loader
        self._expert = expert
        self._sampler = StepSampler(experiment, options, lease, loader, expert)
        self._maker = StepMaker(experiment, options, loader)
        self._ranks = RankSession(experiment, options)
        self._recorded: deque[StepRow] = deque()
        self._next_step = 1
        recorded = (None if options.strategy else experiment, expert)
        self._recorders = {e.key: recorder(e) for e in recorded if e}
        self._begun = False
        self._without_expert = self._passed_over = False  # already warned of
        self.resume: Resume | None = None
        self.committed = 0
        self.incomplete_groups = 0
        self.queue = StepQueue(options.prefetch)

    @property
    def lost(self) -> LeaseLostError | None:
        """Why the lease was lost, or None."""
        return self._lease.lost

    async def leads(self) -> bool:
        """Return whether this process still holds the lease, by the current store."""
        return await self._lease.is_held()

    # -- opening

    async def prepare(self) -> None:
        """Begin, if the annotation set exists; otherwise `run` waits for it.

        Raises:
            UnknownNameError: the set does not exist, and ``wait_for_set`` is False.
        """
        if await has_set(self._experiment, self._options):
            await self._begin()

    async def _begin(self) -> None:
        """Register, rewind if asked to, and find the last commit and the steps leased after it."""
        row = await register(self._experiment, self._options.consumer, self._options.annotation_set)
        if self._options.resume_from is not None:
            row = await self._rewind(row, self._options.resume_from)
        self.committed = row.committed_step
        done, leased = await steps_at_start(self._experiment, row.name, row.committed_step)
        chain = self._maker.go_on_after(done)
        if done:
            self.resume = await last_commit(self._experiment, row.name, done[-1], chain)
            self._warn_without_checkpoint(self.resume)
        dropped = await rows_to_drop(self._experiment, self._expert, self._options)
        repartitioner = Repartitioner(
            self._experiment, self._lease, self._loader, self._options, dropped
        )
        self._recorded = deque(await repartitioner.repartition(leased))
        self._next_step = row.leased_step + 1
        await self._database.read(self._sampler.start, dropped)
        await self._ranks.assemble(self._lease, row.committed_step)
        self._begun = True

    async def _rewind(self, row: ConsumerRow, step: int) -> ConsumerRow:
        name, key = self._options.consumer, self._experiment.key
        await require_checkpoint_of(self._database, key, row, step)
        if step == row.committed_step:
            return row
        back = TrainerRewound(consumer=name, step=step, from_step=row.committed_step)
        event = new_event(back)

        def rewind(tx: Transaction) -> ConsumerRow | None:
            self._lease.append(tx, [event])
            return writer_queries.consumer_row(tx, key, name)

        rewound = await self._database.write(rewind)
        assert rewound is not None
        return rewound

    # -- serving

    async def run(self) -> None:
        """Make and serve steps until the end; errors are raised to the reader of the stream."""
        try:
            if not self._begun:
                await wait_for_set(self._experiment, self._options, self._lease.presence)
                await self._begin()
            work = Work(self._lease.presence, lambda: not self.queue.is_waited_for())
            async with running(self._gather, partial(work.keep, wait_report_s())):
                await self._feed()
            await self._report_untrained(self.queue.num_put)
            await self._ranks.end(self._next_step - 1)
        except Exception as error:  # noqa: BLE001 - re-raised where the stream is read
            self.queue.fail(error)
        finally:
            self.queue.end()

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

    async def _feed(self) -> None:
        while self._recorded:
            await self.queue.room()
            self.queue.put(await self._maker.leased(self._recorded.popleft()))
        await self.queue.room()
        while await self._next():
            await self.queue.room()

    async def _next(self) -> bool:
        """Make the next step, and more while they are asked for; return False at the end."""
        presence = self._lease.presence
        stall = Stall(self._database, self._experiment.key, presence)
        wait = ReportedWait(self._database.changes, self._waiting_for, presence, stall=stall)
        wait.is_waited_for = self.queue.is_waited_for
        while True:
            await self._lease.presence.seen()
            state = await self._database.changes.state()
            recorders = dict(self._recorders)
            ending = not recorders and not self._options.follow
            made, finished = await self._make(partial_ok=ending)
            if finished and not ending:  # one more pass: rows may precede the end
                through = self._experiment.key not in recorders
                ending = through and not await self._more_is_to_come()
                if ending:
                    made, _ = await self._make(partial_ok=True)
            if made or ending:
                wait.over()
                return made
            expert = None if self._expert is None else self._expert.key
            goes_on = self._options.follow and not finished
            if goes_on and expert not in recorders:  # there is one, and it is finished
                self._sampler.require_expert()
            # A killed strategy commits nothing that would wake this wait.
            await wait.changed(state, LOOK_AGAIN_S if finished else None)

    async def _more_is_to_come(self) -> bool:
        if not all(consumer.has_read_all for consumer in self._recorders.values()):
            return True
        key, annotation_set = self._experiment.key, self._options.annotation_set
        return await self._database.read(is_being_decided, key, annotation_set)

    async def _make(self, *, partial_ok: bool) -> tuple[bool, bool]:
        """Make steps while there is room and there are rows.

        Returns:
            Whether a step was made; if not, whether the experiment is finished.
        """

        def work(s: Session) -> tuple[bool, bool]:
            until, made = time.monotonic() + IN_ONE_GO_S, False
            while self._make_one(s, partial_ok=partial_ok):
                made = True
                # The reader of the step gets the interpreter lock only once this thread is idle.
                more = self.queue.has_room() and not self._sampler.is_through
                if not more or time.monotonic() > until:
                    break
            return made, not made and s.read(writer_queries.is_finished, self._experiment.key)

        return await self._database.session(work)

    def _make_one(self, s: Session, *, partial_ok: bool) -> bool:
        """Make the next step if there are rows for it; return whether there were.

        Its segments are released on return: the next step is read into the same memory, and the
        trainer's step does not keep the bytes of the next one alive.
        """
        taken = self._sampler.take(s, self._next_step, partial_ok=partial_ok)
        if taken is not None:
            self._warn_without_expert()
            self._next_step += 1
            self.queue.put(self._lease_step(s, *taken))
        return taken is not None

    def _lease_step(self, s: Session, manifest: Manifest, rows: LoadedRows) -> TrainStep:
        """Lease these rows as a step and return it."""
        name, token = self._options.consumer, self._lease.token

        def collate() -> tuple[list[MicroBatch], NewEvent]:
            microbatches = self._maker.collate(manifest, rows)
            return microbatches, new_event(manifest.leased_by(name, token))

        def append(tx: Transaction) -> bytes:
            (place,) = self._lease.append(tx, [event])
            reached("inside-lease")
            return place.head

        microbatches, event = s.compute(collate)
        reached("before-lease")
        head = s.write(append)
        reached("after-lease")
        return self._maker.step(manifest, rows, microbatches, head)

    # -- reporting

    def _warn_without_checkpoint(self, resume: Resume) -> None:
        if resume.checkpoint is None:
            _logger.warning(
                "trainer %r goes on after step %d, whose commit names no checkpoint: its weights "
                "are yours to load; resume_from= goes back to a step with a checkpoint, or to 0",
                self._options.consumer,
                resume.step,
            )

    def _warn_without_expert(self) -> None:
        """Warn once that steps from here on mix in fewer of the expert's groups, or none."""
        if self._sampler.lacks_expert and not self._without_expert:
            self._without_expert = True
            _logger.warning(
                "trainer %r: from step %d on fewer of the expert's groups are mixed in, or none: "
                "experiment %r has no more",
                self._options.consumer,
                self._next_step,
                self._options.expert_experiment,
            )

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
        left = await self._database.read(self._sampler.left)
        if not (left or served):
            left = await self._database.read(self._sampler.outcome)
        if left:
            steps = f"after {counted(served, 'step')}" if served else "without a step"
            _logger.warning(
                "trainer %r ended %s: %s", self._options.consumer, steps, one_line(left)
            )

    # -- committing

    async def commit(
        self, step: TrainStep, steps: Sequence[int], delivered: DeliveredSteps, request: Commit
    ) -> None:
        """Record, in one transaction, that ``steps``, the last one ``step``, were trained.

        Raises:
            LeaseLostError: another process took over; nothing was recorded.
            CheckpointError: no file at the checkpoint or the policy.
        """
        rows = await self._ranks.all_parts(steps, delivered.rows(steps), self._lease)
        delivered.require_rows(steps, rows)
        commit = StepsCommitted(
            consumer=self._options.consumer,
            token=self._lease.token,
            steps=steps,
            manifests=delivered.digests(steps),
            rows_by_rank=rows,
            chain=step.chain,
            checkpoint=None,
            checkpoint_digest=None,
            metrics=finite(request.metrics or {}),
            environment=dict(request.environment or environment_of_run(self._options.device)),
            **skips(request.skipped or {}),
        )
        measured = delivered.measured(steps)
        records = await commit_records(commit, request, self._database.segments, measured)
        reached("before-commit")
        await self._append_commit(records, steps)
        reached("after-commit")
        if request.published is not None and not self._passed_over:
            key, read = self._experiment.key, writer_queries.newest_policy
            newest = await self._database.read(read, key, self._followed)
            self._warn_if_passed_over(request.published, newest[1] if newest else "")

    def _warn_if_passed_over(self, published: str | Path, newest: str) -> None:
        """Warn once that explorers load another trainer's weights, those at ``newest``."""
        own = self._options.consumer
        if own != self._followed and newest != str(Path(published).absolute()):
            self._passed_over = True
            _logger.warning(
                "trainer %r: explorers follow trainer %r, and pass over the weights that this one "
                "publishes: to have it followed, set trainer=%r in the experiment's configuration",
                own,
                self._followed,
                own,
            )

    @property
    def _followed(self) -> str:
        """The trainer whose weights explorers load."""
        return str(self._experiment.config.get("trainer", "trainer"))

    async def _append_commit(self, records: CommitRecords, steps: Sequence[int]) -> None:
        def append(tx: Transaction) -> None:
            self._database.segments.attach(tx, records.segment_rows)
            self._lease.append(tx, records.events, committed=steps[0] - 1)
            reached("inside-commit")

        await self._database.write(append)


class FollowingRank:
    """Serves leased steps; its commit only reports its progress to rank 0.

    Args:
        experiment: the trainer's own experiment.
        options: options of the stream.
        loader: loads the trainer's rows.

    Attributes:
        presence: heartbeats of this rank; the caller keeps them going.
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
        """Return False: only rank 0 holds the lease."""
        return False

    async def prepare(self) -> None:
        """Join the other ranks, and find the last commit and the steps leased after it."""
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
        """Serve the steps that rank 0 leases until it records the end."""
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
        """Tell rank 0 that this rank went through ``steps``; rank 0 carries out the ``request``.

        Raises:
            LeaseLostError: the ranks assembled anew without this one.
        """
        del request
        await self._ranks.part_done(step.step, delivered.rows(steps))
