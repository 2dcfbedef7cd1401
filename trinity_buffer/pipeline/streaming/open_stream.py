"""Opening a train stream: with the lease as rank 0, without it as any other rank."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from trinity_buffer.algorithm.arguments import refuse_unknown
from trinity_buffer.errors import InvalidArgumentError, UnknownExperimentError
from trinity_buffer.pipeline.background import running, settle_imports
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.streaming.rank_stream import RankStream
from trinity_buffer.pipeline.streaming.stream_options import StreamOptions
from trinity_buffer.pipeline.streaming.train_stream import TrainStream
from trinity_buffer.pipeline.streaming.trainer_lease import TrainerLease, hold_lease
from trinity_buffer.store import log, queries
from trinity_buffer.store.transaction import Transaction


@asynccontextmanager
async def open_async_train_stream(
    experiment: Experiment, **options: Any
) -> AsyncIterator[TrainStream]:
    """Open the stream of gradient steps; see `StreamOptions` for the keywords.

    Uncommitted steps of an earlier process of the same consumer are served first, byte for byte as
    they were recorded.

    Raises:
        InvalidArgumentError: an unknown or impossible option.
        UnknownExperimentError: there is no ``expert_experiment`` of this name.
        LeaseHeldError: another process is this consumer, and ``wait_for_lease`` is False.
        CheckpointError: the last commit's checkpoint is missing or is not the one that was
            committed.
    """
    refuse_unknown("a train stream", options, StreamOptions.__slots__)
    if "strategy" not in options:
        raise InvalidArgumentError(
            "a train stream needs strategy=: the name of an annotation set, or None to train on "
            "what was recorded"
        )
    try:
        chosen = StreamOptions.of(experiment.config, **options)
    except TypeError as error:
        raise InvalidArgumentError(f"train stream: {error}") from error
    if chosen.follow:
        settle_imports()
    if chosen.rank:
        lease = TrainerLease(
            experiment.database, experiment.key, chosen.consumer, chosen.lease_ttl_s
        )
        async with _served(RankStream(experiment, chosen, lease)) as follower:
            yield follower
        return
    async with hold_lease(
        experiment.database,
        experiment.key,
        chosen.consumer,
        ttl_s=chosen.lease_ttl_s,
        wait=chosen.wait_for_lease,
    ) as lease:
        expert = await _expert_of(experiment, chosen)
        async with _served(TrainStream(experiment, chosen, lease, expert)) as stream:
            yield stream


@asynccontextmanager
async def _served(stream: TrainStream) -> AsyncIterator[TrainStream]:
    """Serve ``stream`` inside the context."""
    try:
        await stream.prepare()
        async with running(stream.run):
            yield stream
    finally:
        stream.close()


async def _expert_of(experiment: Experiment, options: StreamOptions) -> Experiment | None:
    """Return the experiment that a mixing stream takes the expert's rows from."""
    name = options.expert_experiment
    if name is None:
        return None
    if name == experiment.name:
        raise InvalidArgumentError(
            f"expert_experiment={name!r} is the trainer's own: its rows are not an expert's"
        )

    def find(tx: Transaction) -> tuple[int | None, Any, dict[str, int]]:
        key = log.find_experiment(tx, name)
        found = None if key is None else queries.config_of(tx, key)
        return key, found, log.experiment_names(tx)

    key, found, known = await experiment.database.read(find)
    if key is None or found is None:
        raise UnknownExperimentError(
            f"expert_experiment={name!r} is not in this store; it holds {', '.join(known)}"
        )
    return experiment.sibling(key, name, found[0])
