"""The stream of gradient steps: rank 0 leases and serves them, other ranks only serve them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from typing_extensions import override

from trinity_buffer.algorithm.arguments import refuse_unknown
from trinity_buffer.errors import InvalidArgumentError, UnknownExperimentError
from trinity_buffer.options import option_types
from trinity_buffer.pipeline.background import running, settle_imports
from trinity_buffer.pipeline.coordination.lease import hold_lease
from trinity_buffer.pipeline.handle import ExperimentHandle
from trinity_buffer.pipeline.load.columns import RowLoader
from trinity_buffer.pipeline.load.events import EventCache
from trinity_buffer.pipeline.train.commit import (
    Commit,
    CommitDoor,
    Delivered,
    LastCommits,
    StepMeasures,
)
from trinity_buffer.pipeline.train.lead import FollowingRank, LeadingRank, Rank
from trinity_buffer.pipeline.train.options import Resume, StreamOptions
from trinity_buffer.pipeline.train.ranks import require_one_process
from trinity_buffer.pipeline.train.step import TrainStep
from trinity_buffer.pipeline.write.planning import Admission
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.transaction import Transaction


class TrainStream(CommitDoor[Coroutine[Any, Any, None]]):
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
        self._delivered: dict[int, Delivered] = {}
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
        step = await self._rank.queue.receive()
        if step is None:
            raise StopAsyncIteration
        return self._noted(step)

    def wait_for_step(self) -> TrainStep | None:
        """Return the next step, or None at the end; blocks the calling thread."""
        step = self._rank.queue.get()
        return None if step is None else self._noted(step)

    def fail(self, error: Exception) -> None:
        """Raise ``error``, from elsewhere, in the current or next wait for a step."""
        self._rank.queue.fail(error)
        self._rank.queue.end()

    def _noted(self, step: TrainStep) -> TrainStep:
        """Note that ``step`` was delivered to the trainer."""
        lease = self._rank.lease
        # As the last heartbeat knew, to spare the trainer a step in vain; a commit asks the store.
        if lease is not None and lease.lost is not None:
            raise lease.lost
        self._delivered[step.step] = Delivered(step.manifest, step.rows)
        return step

    @override
    async def record(self, step: TrainStep, request: Commit) -> None:
        """Carry out a `commit`; calls are serialized."""
        # Two concurrent commits of the same steps would both find them uncommitted.
        async with self._committing:
            committed = self._rank.committed
            if step.step <= committed:
                self._commits.require_same(step.step, request)
                return
            steps = range(committed + 1, step.step + 1)
            missing = [number for number in steps if number not in self._delivered]
            # A step of another stream has another manifest.
            if not missing and self._delivered[step.step].manifest.digest != step.manifest.digest:
                missing = [step.step]
            if missing:
                raise InvalidArgumentError(
                    f"commit of step {step.step}: step {missing[0]} was not delivered by this "
                    "stream"
                )
            # Of rank 0, one transaction; of the others, no more than a report to rank 0.
            await self._rank.commit(step, [self._delivered[number] for number in steps], request)
            # Only after the commit is durable, so that a failed one can be repeated.
            self._rank.committed = step.step
            self._commits.add(steps[0], step.step, request)
            for number in steps:
                del self._delivered[number]

    async def leads(self) -> bool:
        """Return whether this is rank 0 and still holds the lease, by the current store."""
        lease = self._rank.lease
        return lease is not None and await lease.is_held()

    def measure(self, measures: StepMeasures) -> None:
        """Keep what was measured of a step that was delivered: its commit records that."""
        delivered = self._delivered.get(measures.step)
        if delivered is not None:
            self._delivered[measures.step] = delivered._replace(measures=measures)

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
