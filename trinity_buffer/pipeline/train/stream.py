"""The stream of gradient steps: rank 0 leases and commits them, other ranks read its log.

A lease is one transaction, a commit another. After a crash between them the step is served again,
as its `BatchLeased` or last `StepDealt` says, to the next process of that name.
"""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio.to_thread import run_sync
from typing_extensions import override

from trinity_buffer.algorithm.arguments import refuse_unknown
from trinity_buffer.codec.objects import new_event
from trinity_buffer.errors import InvalidArgumentError, StoreError, UnknownExperimentError
from trinity_buffer.events import BatchLeased, PolicyPublished, StepsCommitted, TrainerRewound
from trinity_buffer.options import option_types
from trinity_buffer.pipeline.annotate.consumer import RECORDED, StrategyConsumer, recorder
from trinity_buffer.pipeline.coordination import diagnosis, waiting
from trinity_buffer.pipeline.coordination.lease import TrainerLease, hold_lease
from trinity_buffer.pipeline.coordination.waiting import settle_imports, task_group
from trinity_buffer.pipeline.handle import ExperimentHandle, experiment_called
from trinity_buffer.pipeline.load.columns import LoadedRows, RowLoader
from trinity_buffer.pipeline.load.reading import EventCache
from trinity_buffer.pipeline.manifest import FIRST_LINK, chain, leased_step
from trinity_buffer.pipeline.train import checkpoint as checkpoints
from trinity_buffer.pipeline.train.collate import collate_step
from trinity_buffer.pipeline.train.microbatch import Mover, StepMemory
from trinity_buffer.pipeline.train.options import (
    Resume,
    StreamOptions,
    has_set,
    last_commit,
    register,
    require_checkpoint_of,
    rows_to_drop,
    wait_for_set,
)
from trinity_buffer.pipeline.train.ranks import RankSession, require_one_process
from trinity_buffer.pipeline.train.sampler import DROP_DAMAGED, StepSampler
from trinity_buffer.pipeline.train.step import (
    NON_FINITE,
    Commit,
    CommitDoor,
    Delivered,
    LastCommits,
    StepMeasures,
    StepQueue,
    TrainStep,
    ZeroAdvantages,
    finite,
    measured_event,
)
from trinity_buffer.pipeline.write.planning import Admission
from trinity_buffer.store import log, trainer_queries, writer_queries
from trinity_buffer.store.rows import StepRow
from trinity_buffer.store.segments import SegmentRow
from trinity_buffer.store.transaction import ReadSession, Session, Transaction

IN_ONE_GO_S = 0.05
"""Steps are made in one session for so long while the trainer asks for more: other writers of this
process wait meanwhile, those of others only while SQLite is written to; tasks of this process that
wait for a commit hear of all of them at the end."""

LOOK_AGAIN_S = 1.0
"""Interval of checks whether the strategy of a finished experiment is still alive."""

_logger = logging.getLogger(__name__)


class TrainStream(CommitDoor[Coroutine[Any, Any, None]]):
    """An open stream; iterate over it asynchronously. Made by `open_async_train_stream`.

    `CommitDoor.commit` in ``train/step.py`` is what trainers call: it checks its arguments, and
    returns the coroutine of `record`, which carries it out.

    Args:
        experiment: the trainer's own experiment.
        options: options of the stream.
        presence: heartbeats of this rank.

    Attributes:
        resume: the last commit, or None at the very beginning; known after `prepare`.
        incomplete_groups: with ``strategy=None``, the number of groups left incomplete when the
            stream ended.
        presence: heartbeats of this rank.
        queue: the steps that are ready.
        lease: the trainer's lease, of rank 0 alone.
        closed: its reader has left it.
        failed: an error ended the loop that reads it.
    """

    lease: TrainerLease | None = None

    def __init__(
        self, experiment: ExperimentHandle, options: StreamOptions, presence: waiting.Presence
    ) -> None:
        self.experiment = experiment
        self.options = options
        self.device = options.device
        self.resume: Resume | None = None
        self.incomplete_groups = 0
        self.closed = self.failed = False
        self.queue = StepQueue(options.prefetch)
        self._database = experiment.database
        self._loader = RowLoader(EventCache(experiment.key, experiment.name))
        self._memory = StepMemory()
        self._mover = Mover(options.device)
        # Recorded rows need no advantages, and a loss that does has said so.
        computed = not options.needs and options.annotation_set != RECORDED
        zeros = ZeroAdvantages(options.consumer, options.annotation_set)
        self._read_zeros = zeros.warn if computed else None
        self._chain = FIRST_LINK  # the link after the last step made
        self._ranks = RankSession(experiment, options, presence)
        self.presence = presence
        self._next_step = 1
        self._committed = 0  # the last committed step
        self._delivered: dict[int, Delivered] = {}
        self._commits = LastCommits(options.consumer)
        self._committing = anyio.Lock()

    @abstractmethod
    async def prepare(self) -> None:
        """Begin, if the annotation set exists; otherwise wait for it, here or in `run`.

        Raises:
            UnknownNameError: the set does not exist, and ``wait_for_set`` is False.
        """

    async def run(self) -> None:
        """Put steps into the queue until there are no more; errors are raised to its reader."""
        # What goes on beside it may fail and cancel it: that is not the end of the steps.
        failure: Exception | None = StoreError(
            f"the stream of trainer {self.options.consumer!r} was cancelled before its end: "
            "where it is closed, it raises why"
        )
        try:
            await self._serve()
            failure = None
        except Exception as error:  # noqa: BLE001 - re-raised where the stream is read
            failure = error
        finally:
            self.queue.end(None if self.closed else failure)

    @abstractmethod
    async def _serve(self) -> None:
        """Put steps into the queue until there are no more."""

    async def find_last_commit(self, committed: int) -> list[StepRow]:
        """Continue after the steps up to ``committed``; return the steps leased since."""
        name, self._committed = self.options.consumer, committed
        # From the first step on, or from the last whose commit recorded the link of the chain. That
        # is believed: `verify` computes it again.
        read, key = self._database.read, self.experiment.key
        steps = await read(trainer_queries.steps_from_link, key, name, committed)
        done = [row for row in steps if row.step <= committed]
        self._chain = FIRST_LINK
        for row in done:
            self._chain = row.chain or chain(self._chain, row.manifest_digest)
        if done:
            self.resume = await last_commit(self.experiment, name, done[-1], self._chain)
        return steps[len(done) :]

    # -- making steps, in order: each is a link of the manifest chain

    async def _leased_step(self, row: StepRow) -> TrainStep:
        """Return a step that was leased before, by the log.

        Raises:
            ArchivedSegmentError, CodecError, DamagedSegmentError: as `RowLoader.load_leased`.
        """

        def load(s: ReadSession) -> TrainStep:
            leased = leased_step(s, self.experiment, row)
            rows = self._loader.load_leased(s, leased.manifest, DROP_DAMAGED)
            step = self._next_link(leased.manifest, rows)
            step.recorded, step.log_head = True, (leased.head or b"").hex()
            return step

        return await self._database.read_session(load)

    def _next_link(self, lease: BatchLeased, rows: LoadedRows) -> TrainStep:
        """Return the next step of the chain, with this rank's micro-batches."""
        options = self.options
        rank, world = options.rank, options.world_size
        step = collate_step(lease, rows, self._mover, self._memory, rank=rank, world=world)
        for microbatch in step.microbatches:
            if not rows.fields["advantages"].blocks:
                microbatch.read_zeros = self._read_zeros
            if options.recompute_old_logprob:
                microbatch.drop("old_logprob")
        step.chain = self._chain = chain(self._chain, lease.digest)
        return step

    @asynccontextmanager
    async def _works(self, *tasks: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
        """Run ``tasks`` in the context, and tell other processes while no step is waited for."""
        keep = self.presence.keep_at_work
        works = partial(keep, lambda: not self.queue.is_waited_for(), waiting.wait_report_s())
        async with task_group(works, *tasks):
            yield

    # -- the trainer's side

    def __aiter__(self) -> AsyncIterator[TrainStep]:
        return self

    async def __anext__(self) -> TrainStep:
        if (step := await self.queue.receive()) is None:
            raise StopAsyncIteration
        self.note_delivered(step)
        return step

    def fail(self, error: Exception) -> None:
        """Raise ``error``, from elsewhere, in the current or next wait for a step."""
        self.queue.end(error)

    def note_delivered(self, step: TrainStep) -> None:
        """Note that the trainer has ``step``.

        Raises:
            LeaseLostError: another process took over.
        """
        # As the last heartbeat knew, to spare the trainer a step in vain; a commit asks the store.
        if self.lease is not None and self.lease.lost is not None:
            raise self.lease.lost
        self._delivered[step.step] = Delivered(step.manifest, step.rows)

    @override
    async def record(self, step: TrainStep, request: Commit) -> None:
        """Carry out a `commit`; calls are serialized."""
        # Two concurrent commits of the same steps would both find them uncommitted.
        async with self._committing:
            if step.step <= self._committed:
                # Said again, as after an answer that was lost. A checkpoint and a policy that it
                # names must be those of this stream's commit; of another's, nothing is known here.
                self._commits.require_same(step.step, request)
                return
            steps = range(self._committed + 1, step.step + 1)
            missing = [number for number in steps if number not in self._delivered]
            # A step of another stream has another manifest.
            if not missing and self._delivered[step.step].manifest.digest != step.manifest.digest:
                missing = [step.step]
            if missing:
                raise InvalidArgumentError(
                    f"commit of step {step.step}: step {missing[0]} was not delivered by this "
                    "stream"
                )
            await self._commit(step, [self._delivered[number] for number in steps], request)
            # Only after the commit is durable, so that a failed one can be repeated.
            self._committed = step.step
            self._commits.add(steps[0], step.step, request)
            for number in steps:
                del self._delivered[number]

    @abstractmethod
    async def _commit(self, step: TrainStep, delivered: list[Delivered], request: Commit) -> None:
        """Record that the ``delivered`` steps, the last one ``step``, were trained."""

    def warn_of_uncommitted(self) -> None:
        """Warn of steps without a commit, unless an error ended the trainer."""
        if self._delivered and not self.failed:
            first, last = min(self._delivered), max(self._delivered)
            _logger.warning(
                "trainer %r ended without a commit of step%s: the next process is given the same "
                "again; commit the last step of a loop too",
                self.options.consumer,
                f" {last}" if first == last else f"s {first} to {last}",
            )

    async def leads(self) -> bool:
        """Return whether this is rank 0 and still holds the lease, by the current store."""
        return self.lease is not None and await self.lease.is_held()

    def measure(self, measures: StepMeasures) -> None:
        """Keep what was measured of a step that was delivered: its commit records that."""
        if (delivered := self._delivered.get(measures.step)) is not None:
            self._delivered[measures.step] = delivered._replace(measures=measures)

    async def uids(self, step: TrainStep, rows: Sequence[int]) -> list[str]:
        """Return the uids of rows of a step, by their places in its manifest."""
        uids = self._loader.uids
        return await self._database.read_session(lambda s: uids(s, step.manifest, rows))


class LeadingStream(TrainStream):
    """Of rank 0: makes the steps of a trainer, for the other ranks too, and commits them.

    Args:
        experiment, options: see `TrainStream`.
        lease: the trainer's lease, held by this process.
        expert: the experiment of the expert's rows, if the stream mixes.
    """

    def __init__(
        self,
        experiment: ExperimentHandle,
        options: StreamOptions,
        lease: TrainerLease,
        expert: ExperimentHandle | None = None,
    ) -> None:
        super().__init__(experiment, options, lease.presence)
        self.lease: TrainerLease = lease
        self._expert = expert
        self._sampler = StepSampler(experiment, options, lease, self._loader, expert)
        self._leased: list[StepRow] | None = None  # before this process; None: not begun
        recorded = (None if options.strategy else experiment, expert)
        self._recorders = {e.key: recorder(e) for e in recorded if e}
        self._without_expert = self._passed_over = False  # already warned of

    # -- opening

    @override
    async def prepare(self) -> None:
        """Begin, if the annotation set exists; otherwise `run` waits for it."""
        if await has_set(self.experiment, self.options):
            await self._begin()

    async def _begin(self) -> None:
        """Register, rewind if asked to, and find the last commit and the steps leased after it."""
        options = self.options
        name, key, database = options.consumer, self.experiment.key, self._database
        row = await register(self.experiment, name, options.annotation_set)
        if options.resume_from is not None:
            await require_checkpoint_of(database, key, name, options.resume_from)
        if options.resume_from not in (None, row.committed_step):
            step = options.resume_from
            back = TrainerRewound(consumer=name, step=step, from_step=row.committed_step)
            await database.write(self.lease.append, [new_event(back)])
            row = await register(self.experiment, name, options.annotation_set)
        leased = await self.find_last_commit(row.committed_step)
        self._next_step = row.leased_step + 1
        if self.resume is not None and self.resume.checkpoint is None:
            _logger.warning(
                "trainer %r goes on after step %d, whose commit names no checkpoint: its weights "
                "are yours to load; resume_from= goes back to a step with a checkpoint, or to 0",
                options.consumer,
                self.resume.step,
            )
        dropped = await rows_to_drop(self.experiment, self._expert, options)
        start = partial(self._sampler.start, dropped=dropped, steps=leased)
        leased = await self._database.session(start)
        # However long the others take: they may start at any time. It says whom it waits for.
        await self._ranks.assemble(self.lease, row.committed_step)
        self._leased = leased

    # -- serving

    @override
    async def _serve(self) -> None:
        if self._leased is None:
            await wait_for_set(self.experiment, self.options, self.presence)
            await self._begin()
        async with self._works(self._gather):
            for row in self._leased or ():
                # For `prefetch` steps beyond those asked for; those the trainer has do not count.
                await self.queue.room()
                self.queue.put(await self._leased_step(row))
            await self.queue.room()
            while await self._next():
                await self.queue.room()
        await self._report_untrained(self.queue.num_put)
        await self._ranks.end(self._next_step - 1)

    async def _gather(self) -> None:
        """Group recorded rows in the background, for sets that no strategy annotates."""

        async def record(key: int, consumer: StrategyConsumer) -> None:
            report = await consumer.run(follow=self.options.follow)
            if key == self.experiment.key:
                self.incomplete_groups = report.waiting_groups
            del self._recorders[key]
            self._database.changes.notify()

        async with task_group() as tasks:
            for key, consumer in list(self._recorders.items()):
                tasks.start_soon(record, key, consumer)

    async def _next(self) -> bool:
        """Make the next step, and more while they are asked for; return False at the end.

        The end is where nothing can come any more: without `follow` at the end of the store, with
        it once the experiment is finished, recorders have read all of it, and no live strategy has
        undecided rows. Only there may a step be smaller than the others.
        """
        session, key, wait = self._database.session, self.experiment.key, None
        read, name = self._database.read, self._sampler.annotation_set
        while True:
            await self.presence.seen()
            # Both before anything is read, so that what is committed meanwhile is not missed.
            state = await self._database.changes.state()
            recorders = dict(self._recorders)
            ending = not recorders and not self.options.follow
            made, finished = await session(partial(self._make, partial_ok=ending))
            if finished and not ending:  # one more pass: rows may precede the end
                reading = key in recorders or not all(c.has_read_all for c in recorders.values())
                # By its heartbeats, not by its lease: one that stands by would go on.
                ending = not (reading or await read(diagnosis.is_being_decided, key, name))
                if ending:
                    made, _ = await session(partial(self._make, partial_ok=True))
            if made or ending:
                if wait is not None:
                    wait.over()
                return made
            expert = None if self._expert is None else self._expert.key
            goes_on = self.options.follow and not finished
            if goes_on and expert not in recorders:  # there is one, and it is finished
                self._sampler.require_expert()
            if wait is None:
                wait = waiting.ReportedWait(self._database, key, self._waiting_for, self.presence)
                wait.is_waited_for = self.queue.is_waited_for
            # A killed strategy commits nothing that would wake this wait.
            await wait.changed(state, LOOK_AGAIN_S if finished else math.inf)

    def _make(self, s: Session, *, partial_ok: bool) -> tuple[bool, bool]:
        """Lease steps while there is room and there are rows.

        Returns:
            Whether a step was made; if not, whether the experiment is finished.
        """
        until, made, sampler = time.monotonic() + IN_ONE_GO_S, False, self._sampler
        # More than one only ahead of the trainer: who waits for a step gets the interpreter lock,
        # and with it the step, only once this thread is idle.
        while not made or (self.queue.has_room() and not sampler.is_through):
            if (taken := sampler.take(s, self._next_step, partial_ok=partial_ok)) is None:
                break
            made = True
            if self._expert and sampler.lacks_expert and not self._without_expert:
                self._without_expert = True
                _logger.warning(
                    "trainer %r: from step %d on fewer of the expert's groups are mixed in, or "
                    "none: experiment %r has no more",
                    self.options.consumer,
                    self._next_step,
                    self.options.expert_experiment,
                )
            self._next_step += 1
            # Before the lease: what cannot be collated leaves no leased step behind. An error from
            # here on ends the stream, so its chain and its number are never ahead of the log.
            step = self._next_link(*taken)
            (place,) = s.write(self.lease.append, [new_event(taken[0])])
            step.log_head = place.head.hex()
            self.queue.put(step)
            # The next step is read into the memory of these segments, and the trainer's step does
            # not keep the bytes of the next one alive.
            del taken, step
            if time.monotonic() > until:
                break
        return made, not made and s.read(writer_queries.is_finished, self.experiment.key)

    # -- reporting

    async def _waiting_for(self) -> str:
        lacking = await self._database.read(self._sampler.waiting_for)
        text = f"trainer {self.options.consumer!r} waits for {lacking}"
        rules, steps = Admission.of(self.experiment.config), self._next_step - 1 - self._committed
        most, counted = rules.most_uncommitted_steps, diagnosis.counted
        # Uncommitted steps may keep explorers waiting.
        if most is None or steps < most or self.options.consumer != rules.trainer:
            return text
        return (
            f"{text}; {counted(steps, 'step')} are handed out and not committed, and with "
            f"max_staleness={rules.max_staleness} explorers wait for their commit: commit at least "
            f"once in {counted(most, 'step')}"
        )

    async def _report_untrained(self, served: int) -> None:
        """Report untrained rows, and why they are left, at the end of a stream."""
        options, key, read = self.options, self.experiment.key, self._database.read
        left = await read(diagnosis.left_of, key, options.annotation_set)
        gone = "" if served else await read(diagnosis.outcome_of, key, options.consumer)
        if left := "; ".join(filter(None, (left, gone))):
            steps = f"after {diagnosis.counted(served, 'step')}" if served else "without a step"
            _logger.warning(
                "trainer %r ended %s: %s", self.options.consumer, steps, waiting.one_line(left)
            )

    # -- committing

    @override
    async def _commit(self, step: TrainStep, delivered: list[Delivered], request: Commit) -> None:
        """Record, in one transaction, that the ``delivered`` steps were trained.

        The published policy and what was measured go into it too. Files are flushed to disk and
        digested before it, since a transaction has to be short.

        Raises:
            LeaseLostError: another process took over; nothing was recorded.
            CheckpointError: no file at the checkpoint or the policy.
            StoreError: a commit that was cancelled had gone through; nothing more was recorded.
        """
        name, steps = self.options.consumer, [of.manifest.step for of in delivered]
        rows = [[of.rows] for of in delivered]
        if self.options.world_size > 1:
            # Raises if a rank is gone or started again; one that lives is waited for without end.
            rows = await self._ranks.all_parts(delivered, self.lease)
        checkpoint, published, skipped = request.checkpoint, request.policy, request.skipped
        known = dict(request.digests)  # checkpoint and policy may share files
        digests = [
            None if path is None else await run_sync(checkpoints.make_durable, path, known)
            for path in (checkpoint, published)
        ]
        committed = StepsCommitted(
            consumer=name,
            token=self.lease.token,
            steps=steps,
            manifests=[of.manifest.digest for of in delivered],
            rows_by_rank=rows,
            chain=step.chain,
            checkpoint=None if checkpoint is None else str(checkpoint),
            checkpoint_digest=digests[0],
            metrics=finite(request.metrics),
            environment=dict(request.environment),
            skipped=NON_FINITE if skipped else None,
            skipped_steps=list(skipped),
            largest_rows=[list(uids) for uids in skipped.values()],
        )
        events, segments = [new_event(committed)], self._database.segments
        # The checkpoint itself, unless the caller named other weights, or none.
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
            # Raises if a commit of ours went through although asyncio had cancelled it: its thread
            # goes on, and then `_committed` is behind the log.
            self.lease.append(tx, events, committed=steps[0] - 1)

        await self._database.write(append)
        if published is not None and not self._passed_over:
            # The steps are committed: without an answer now, the next commit asks again.
            with suppress(StoreError):
                await self._warn_if_passed_over(published)

    async def _warn_if_passed_over(self, published: Path) -> None:
        """Warn once if explorers load another trainer's weights."""
        own, followed = self.options.consumer, self.experiment.config.get("trainer") or "trainer"
        read = self._database.read
        newest = await read(writer_queries.newest_policy, self.experiment.key, str(followed))
        if own != followed and (newest is None or newest[1] != str(published)):
            self._passed_over = True
            _logger.warning(
                "trainer %r: explorers follow trainer %r, and pass over the weights that this one "
                "publishes: to have it followed, set trainer=%r in the experiment's configuration",
                own,
                followed,
                own,
            )


class FollowingStream(TrainStream):
    """Of another rank: serves leased steps; its commit only reports its progress to rank 0.

    The caller keeps its heartbeats going.
    """

    _leased_before = 0

    @override
    async def prepare(self) -> None:
        """Join the other ranks, and find the last commit and the steps leased after it."""
        if not await has_set(self.experiment, self.options):
            await wait_for_set(self.experiment, self.options, self.presence)
        await self._ranks.join()
        self._ranks.wait.is_waited_for = self.queue.is_waited_for
        leased = await self.find_last_commit(self._ranks.committed)
        self._leased_before = self._committed + len(leased)
        self._next_step = self._committed + 1

    @override
    async def _serve(self) -> None:
        """Serve the steps that rank 0 leases until it records the end."""
        named = self.experiment.key, self.options.consumer
        read, steps = self._database.read, trainer_queries.steps
        async with self._works():
            while self._ranks.ended is None or self._next_step <= self._ranks.ended:
                state = await self._database.changes.state()
                if leased := await read(steps, *named, after=self._next_step - 1):
                    self._ranks.wait.over()
                for row in leased:
                    await self.queue.room()
                    step = await self._leased_step(row)
                    step.recorded = row.step <= self._leased_before
                    self._next_step = row.step + 1
                    self.queue.put(step)
                if not leased:
                    # Raises if rank 0 is gone or started again; that another rank did, only rank 0
                    # finds out, at its commit.
                    await self._ranks.wait_for_news(state)

    @override
    async def _commit(self, step: TrainStep, delivered: list[Delivered], request: Commit) -> None:
        """Tell rank 0 that this rank went through the steps; rank 0 carries out the ``request``.

        Raises:
            LeaseLostError: the ranks assembled anew without this one.
        """
        del request
        # Not when rank 0 has committed: until a restart `_committed` may be ahead of the log.
        await self._ranks.part_done(step.step, [of.rows for of in delivered])


@asynccontextmanager
async def open_async_train_stream(
    experiment: ExperimentHandle, **options: Any
) -> AsyncIterator[TrainStream]:
    """Open the stream of gradient steps; see `StreamOptions` for the keywords.

    Uncommitted steps of an earlier process of the same consumer are served first, exactly as
    recorded.

    Raises:
        InvalidArgumentError: an unknown or impossible option, or steps of more groups than the
            configured bounds let explorers plan.
        UnknownExperimentError: ``expert_experiment`` does not exist.
        LeaseHeldError: another process holds the lease, and ``wait_for_lease`` is False.
        CheckpointError: the last commit's checkpoint is missing or has changed.
    """
    refuse_unknown("a train stream", options, option_types(StreamOptions))
    # Under torchrun without ranks, every process would train on its own.
    if not {"rank", "world_size"} & options.keys():
        require_one_process()
    if "strategy" not in options:
        raise InvalidArgumentError(
            "a train stream needs strategy=: the name of an annotation set, or None to train on "
            "what was recorded"
        )
    chosen = StreamOptions.of(experiment.config, **options)
    chosen.warn_of_unbounded()
    # Without `follow`, a stream ends with the stored rows and waits for no explorer.
    if chosen.follow:
        rules = Admission.of(experiment.config)
        # Explorers follow the configured trainer alone; others cannot hold them back.
        if chosen.consumer == rules.trainer:
            rules.require_reachable(chosen.sampling().plan(1, chosen.groups_per_step).usual)
        settle_imports()
    stream: TrainStream
    of, name = (experiment.database, experiment.key), chosen.consumer
    async with AsyncExitStack() as stack:
        # Only rank 0 holds the lease; the others find its steps in the log.
        if chosen.rank:
            presence = waiting.Presence(*of, f"rank {chosen.rank}", name)
            stream = FollowingStream(experiment, chosen, presence)
            await stack.enter_async_context(presence.heartbeats())
        else:
            held = hold_lease(*of, name, ttl_s=chosen.lease_ttl_s, wait=chosen.wait_for_lease)
            lease = await stack.enter_async_context(held)
            stream = LeadingStream(experiment, chosen, lease, await _expert(experiment, chosen))
        # Steps made ahead hold the memory of their tensors.
        stack.callback(stream.queue.discard)
        await stream.prepare()
        await stack.enter_async_context(task_group(stream.run))
        try:
            yield stream
        except Exception:
            stream.closed = True  # its own error is raised, and none to another task that reads it
            raise
        # A portal closes it as if in order where what goes on beside it has failed.
        stream.closed = anyio.current_effective_deadline() > -math.inf
        stream.warn_of_uncommitted()


async def _expert(experiment: ExperimentHandle, options: StreamOptions) -> ExperimentHandle | None:
    """Return the experiment of the expert's rows, if the stream mixes."""
    if (name := options.expert_experiment) is None:
        return None
    if name == experiment.name:
        raise InvalidArgumentError(
            f"expert_experiment={name!r} is the trainer's own: its rows are not an expert's"
        )

    stored = await experiment.database.read(experiment_called, name)
    if stored is None:
        known = ", ".join(await experiment.database.read(log.experiment_names))
        raise UnknownExperimentError(
            f"expert_experiment={name!r} is not in this store; it holds {known}"
        )
    return ExperimentHandle(experiment.database, stored[0], name, stored[1])
