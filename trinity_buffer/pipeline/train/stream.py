"""The stream of gradient steps: rank 0 leases and serves them, other ranks only serve them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio

from trinity_buffer.algorithm.arguments import refuse_unknown
from trinity_buffer.errors import InvalidArgumentError, LeaseLostError, UnknownExperimentError
from trinity_buffer.pipeline.background import running, settle_imports
from trinity_buffer.pipeline.coordination.lease import hold_lease
from trinity_buffer.pipeline.handle import ExperimentHandle
from trinity_buffer.pipeline.load.columns import RowLoader
from trinity_buffer.pipeline.load.events import EventCache
from trinity_buffer.pipeline.train.commit import (
    Commit,
    DeliveredSteps,
    LastCommits,
    PolicyPath,
    StepMeasures,
)
from trinity_buffer.pipeline.train.lead import FollowingRank, LeadingRank
from trinity_buffer.pipeline.train.options import Resume, StreamOptions
from trinity_buffer.pipeline.train.ranks import require_one_process
from trinity_buffer.pipeline.train.step import StepQueue, TrainStep
from trinity_buffer.pipeline.write.planning import Admission
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.transaction import Transaction


class Rank(Protocol):
    """The source of one rank's steps, which also commits them.

    Attributes:
        queue: the steps that are ready.
        resume: the last commit, or None at the very beginning; known after `prepare`.
        committed: step of the last commit, or 0.
        incomplete_groups: number of groups left incomplete when the steps ended.
    """

    queue: StepQueue
    resume: Resume | None
    committed: int
    incomplete_groups: int

    @property
    def lost(self) -> LeaseLostError | None:
        """Why this process cannot commit any more, or None."""

    async def leads(self) -> bool:
        """Return whether this is rank 0 and still holds the lease."""

    async def prepare(self) -> None:
        """Begin, if the annotation set exists."""

    async def run(self) -> None:
        """Put steps into the queue until there are no more."""

    async def commit(
        self, step: TrainStep, steps: Sequence[int], delivered: DeliveredSteps, request: Commit
    ) -> None:
        """Record that ``steps``, the last one ``step``, were trained."""


class TrainStream:
    """An open stream; iterate over it asynchronously. Made by `open_async_train_stream`.

    Attributes:
        resume: the last commit, or None at the very beginning.
    """

    def __init__(
        self, experiment: ExperimentHandle, options: StreamOptions, rank: Rank, loader: RowLoader
    ) -> None:
        self.experiment = experiment
        self.options = options
        self.resume: Resume | None = None
        self._rank = rank
        self._loader = loader
        self._delivered = DeliveredSteps()
        self._commits = LastCommits(options.consumer)
        self._committing = anyio.Lock()

    @property
    def incomplete_groups(self) -> int:
        """With ``strategy=None``, the number of groups left incomplete when the stream ended."""
        return self._rank.incomplete_groups

    async def prepare(self) -> None:
        """Begin, if the annotation set exists; otherwise wait for it later.

        Raises:
            UnknownNameError: the set does not exist, and ``wait_for_set`` is False.
        """
        await self._rank.prepare()
        self.resume = self._rank.resume

    def __aiter__(self) -> AsyncIterator[TrainStep]:
        return self

    async def __anext__(self) -> TrainStep:
        step = self._delivery(await self._rank.queue.receive())
        if step is None:
            raise StopAsyncIteration
        return step

    def wait_for_step(self) -> TrainStep | None:
        """Return the next step, or None at the end; blocks the calling thread."""
        return self._delivery(self._rank.queue.get())

    def fail(self, error: Exception) -> None:
        """Raise ``error``, from elsewhere, in the current or next wait for a step."""
        self._rank.queue.fail(error)
        self._rank.queue.end()

    def _delivery(self, step: TrainStep | None) -> TrainStep | None:
        """Note that ``step`` was delivered to the trainer."""
        if step is not None:
            if self._rank.lost is not None:
                raise self._rank.lost
            self._delivered.add(step)
        return step

    async def commit(
        self,
        step: TrainStep,
        checkpoint: str | Path | None = None,
        policy: PolicyPath = None,
        environment: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        skipped: Mapping[int, Sequence[str]] | None = None,
        digests: Mapping[Path, str] | None = None,
    ) -> None:
        """Record, in one transaction, that the steps up to ``step`` are in ``checkpoint``.

        The checkpoint's files are flushed to disk first. A committed step is never served again, so
        commit only what you have saved. Repeating a commit is a no-op. A rank above 0 tells rank 0
        that it went through the steps and has written its files of the checkpoint, if any; the
        other arguments are used by rank 0 alone.

        Args:
            checkpoint: file or folder that holds the weights after ``step``; None to commit
                without one.
            policy: the weights that explorers load as policy version ``step.step``: None publishes
                the checkpoint, a path another file or folder with the same weights, and False
                nothing. Without a checkpoint, only a path publishes anything.
            environment: the environment for replay; by default that of `environment_of_run`.
            metrics: numbers to record with the step; those that are not finite are left out.
            skipped: steps that did not change the weights -> uids of the rows to look at.
            digests: absolute path -> what `pipeline.proof.checkpoint.written` returned, of files of
                the checkpoint that need not be hashed and written through to the disk again.

        Raises:
            LeaseLostError: another process took over, or the ranks assembled anew without this
                one; nothing was recorded.
            CheckpointError: no file at ``checkpoint`` or ``policy``.
            InvalidArgumentError: a step up to ``step`` was not delivered by this stream, or it is
                committed already, with another checkpoint or policy.
        """
        request = Commit(checkpoint, policy, environment, metrics, skipped, digests)
        await self.record(step, request)

    async def record(self, step: TrainStep, request: Commit) -> None:
        """Carry out a `commit`; calls are serialized."""
        if not isinstance(step, TrainStep):
            raise InvalidArgumentError(f"commit() takes a step of the stream, not {step!r:.60}")
        # Two concurrent commits of the same steps would both find them uncommitted.
        async with self._committing:
            if step.step <= self._rank.committed:
                self._commits.require_same(step.step, request)
                return
            steps = self._delivered.up_to(step, self._rank.committed)
            await self._rank.commit(step, steps, self._delivered, request)
            # Only after the commit is durable, so that a failed one can be repeated.
            self._rank.committed = step.step
            self._commits.add(steps, request)
            self._delivered.forget(steps)

    async def leads(self) -> bool:
        """Return whether this is rank 0 and still holds the lease, by the current store."""
        return await self._rank.leads()

    def measure(self, measures: StepMeasures) -> None:
        """Keep what was measured of a step that was delivered: its commit records that."""
        self._delivered.measure(measures)

    async def uids(self, step: TrainStep, rows: Sequence[int]) -> list[str]:
        """Return the uids of rows of a step, by their places in its manifest."""
        return await self.experiment.database.read_session(
            lambda s: self._loader.uids(s, step.manifest, rows)
        )


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
    refuse_unknown("a train stream", options, StreamOptions.__slots__)
    # Under torchrun without ranks, every process would train on its own.
    if not {"rank", "world_size"} & options.keys():
        require_one_process()
    if "strategy" not in options:
        raise InvalidArgumentError(
            "a train stream needs strategy=: the name of an annotation set, or None to train on "
            "what was recorded"
        )
    try:
        chosen = StreamOptions.of(experiment.config, **options)
    except TypeError as error:
        raise InvalidArgumentError(f"train stream: {error}") from error
    # Without `follow`, a stream ends with the stored rows and waits for no explorer.
    if chosen.follow:
        _require_explorers_get_on(experiment, chosen)
        settle_imports()
    loader = RowLoader(EventCache(experiment.key, experiment.name))
    # Only rank 0 holds the lease; the others find its steps in the log.
    if chosen.rank:
        following = FollowingRank(experiment, chosen, loader)
        async with (
            following.presence.heartbeats(),
            _served(experiment, chosen, following, loader) as stream,
        ):
            yield stream
        return
    async with hold_lease(
        experiment.database,
        experiment.key,
        chosen.consumer,
        ttl_s=chosen.lease_ttl_s,
        wait=chosen.wait_for_lease,
    ) as lease:
        expert = await _expert_of(experiment, chosen)
        rank = LeadingRank(experiment, chosen, loader, lease, expert)
        async with _served(experiment, chosen, rank, loader) as stream:
            yield stream


def _require_explorers_get_on(experiment: ExperimentHandle, options: StreamOptions) -> None:
    """Raise unless explorers may plan as many groups as a step takes.

    Raises:
        InvalidArgumentError: explorers and stream would wait for each other.
    """
    rules = Admission.of(experiment.config)
    # Explorers follow the configured trainer alone; others cannot hold them back.
    if options.consumer == rules.trainer:
        rules.require_reachable(options.sampling().plan(1, options.groups_per_step).usual)


@asynccontextmanager
async def _served(
    experiment: ExperimentHandle, options: StreamOptions, rank: Rank, loader: RowLoader
) -> AsyncIterator[TrainStream]:
    """Serve the steps of a rank inside the context."""
    stream = TrainStream(experiment, options, rank, loader)
    try:
        await stream.prepare()
        async with running(rank.run):
            yield stream
    finally:
        # Steps made ahead hold the memory of their tensors.
        rank.queue.discard()


async def _expert_of(
    experiment: ExperimentHandle, options: StreamOptions
) -> ExperimentHandle | None:
    """Return the experiment of the expert's rows, if the stream mixes."""
    name = options.expert_experiment
    if name is None:
        return None
    if name == experiment.name:
        raise InvalidArgumentError(
            f"expert_experiment={name!r} is the trainer's own: its rows are not an expert's"
        )

    def find(tx: Transaction) -> tuple[int | None, Any, dict[str, int]]:
        key = log.find_experiment(tx, name)
        stored = None if key is None else writer_queries.config_of(tx, key)
        return key, stored, log.experiment_names(tx)

    key, stored, known = await experiment.database.read(find)
    if key is None or stored is None:
        raise UnknownExperimentError(
            f"expert_experiment={name!r} is not in this store; it holds {', '.join(known)}"
        )
    return ExperimentHandle(experiment.database, key, name, stored[0])
