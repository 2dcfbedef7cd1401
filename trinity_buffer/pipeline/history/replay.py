"""The recorded batches once more: a trainer's steps as its manifests say, changing nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import anyio.to_thread
from anyio.from_thread import BlockingPortal

from trinity_buffer.algorithm.arguments import refuse_unknown
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import BatchLeased, StepsCommitted
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline import manifest as manifests
from trinity_buffer.pipeline.handle import fact_at
from trinity_buffer.pipeline.load.columns import RowLoader
from trinity_buffer.pipeline.load.reading import EventCache
from trinity_buffer.pipeline.store import Experiment, open_store
from trinity_buffer.pipeline.sync_stream import SyncTrainStream, in_portal
from trinity_buffer.pipeline.train.checkpoint import resolve_moved
from trinity_buffer.pipeline.train.collate import collate_step
from trinity_buffer.pipeline.train.microbatch import Mover, StepMemory
from trinity_buffer.pipeline.train.options import Resume
from trinity_buffer.pipeline.train.sampler import plan_again
from trinity_buffer.pipeline.train.step import CommitDoor, TrainStep
from trinity_buffer.store import log, trainer_queries, writer_queries
from trinity_buffer.store.rows import StepRow
from trinity_buffer.store.url import StoreURL


async def replayed_steps(
    experiment: Experiment,
    *,
    consumer: str = "trainer",
    first: int = 1,
    last: int | None = None,
    device: str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    needs: Collection[str] = (),
) -> AsyncIterator[TrainStep]:
    """Yield the steps ``first`` to ``last`` of a trainer exactly as they were handed out.

    To another number of ranks than then the same rows are dealt anew, with the same gradient.

    Args:
        last: by default the last committed one.
        needs: of another algorithm than the run's; with ``advantages``, steps need some.

    Raises:
        InvalidArgumentError: no such trainer or rank, or steps that it was not handed or that lack
            needs.
        ArchivedSegmentError, CodecError, DamagedSegmentError: rows of a step cannot be read; the
            message names the step and some of them.
    """
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank={rank} of world_size={world_size}: ranks count from 0")
    database, key = experiment.database, experiment.key
    row = await database.read(writer_queries.consumer_row, key, consumer)
    if row is None or row.kind != "trainer":
        raise InvalidArgumentError(f"experiment {experiment.name!r} has no trainer {consumer!r}")
    if last is None and not row.committed_step:
        raise InvalidArgumentError(
            f"trainer {consumer!r} has committed no step yet, and a replay goes up to the last "
            "commit: commit steps first, or name the last step with last="
        )
    last = row.committed_step if last is None else last
    if not 1 <= first <= last <= row.leased_step:
        raise InvalidArgumentError(
            f"steps {first}:{last}: trainer {consumer!r} was handed steps 1 to {row.leased_step}"
        )
    link, mover, memory = manifests.FIRST_LINK, Mover(device), StepMemory()
    loader = RowLoader(EventCache(key, experiment.name))
    async for recorded in _steps(experiment, consumer, first, last):
        # A commit says its link; only the steps between commits are chained here.
        link = recorded.chain or manifests.chain(link, recorded.manifest_digest)
        if first <= recorded.step:
            manifest, commit, head = await _recorded(experiment, recorded)
            earlier = manifest.step - 1
            before = f"those before it (`--steps :{earlier}`), or " if earlier else ""
            after = "those after a later checkpoint (`--from-checkpoint`)"
            remedy = f"replay other steps: {before}{after}"
            load = partial(loader.load_leased, lease=manifest, remedy=remedy)
            rows = await database.read_session(load)
            # No zeros in their place.
            if "advantages" in needs and not rows.fields["advantages"].blocks:
                raise InvalidArgumentError(
                    f"step {manifest.step} was trained on the set {manifest.annotation_set!r}, "
                    "which has no advantages: replay it with an algorithm that computes them in "
                    "the trainer, such as rloo, or that reads none"
                )
            if len(manifests.rows_by_rank(manifest)) != world_size:
                order, plans = plan_again(world_size, manifest, rows, range(len(manifest.groups)))
                manifest = manifests.repartitioned(manifest, order, plans)
                rows = rows.reordered(order)
            part = partial(collate_step, rank=rank, world=world_size)
            yield replace(
                await anyio.to_thread.run_sync(part, manifest, rows, mover, memory),
                chain=link,
                recorded=True,
                skipped=commit is not None and recorded.step in commit.skipped_steps,
                log_head=head,
                environment={} if commit is None else commit.environment,
            )


async def _steps(
    experiment: Experiment, consumer: str, first: int, last: int
) -> AsyncIterator[StepRow]:
    """Yield the steps up to ``last``, from one whose link of the chain is known, page by page."""
    database, key, limit = experiment.database, experiment.key, sizes.rows_per_page
    read = trainer_queries.steps_from_link
    page = await database.read(read, key, consumer, first - 1, limit=limit)
    while page:
        for row in page:
            if row.step > last:
                return
            yield row
        after = page[-1].step
        page = await database.read(trainer_queries.steps, key, consumer, after=after, limit=limit)


async def _recorded(
    experiment: Experiment, recorded: StepRow
) -> tuple[BatchLeased, StepsCommitted | None, str]:
    """Return the manifest of a step, its commit if there was one, and its head."""
    leased = await experiment.database.read_session(
        partial(manifests.leased_step, experiment=experiment, row=recorded)
    )
    places = [] if recorded.committed_at is None else [recorded.committed_at]
    stored = await experiment.database.read(log.read_at, experiment.key, places)
    commit = fact_at(experiment.name, stored[0], StepsCommitted) if stored else None
    return leased.manifest, commit, (leased.head or b"").hex()


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """Where a replay ends.

    Attributes:
        step: the last one that is run again.
        digest: of the weights that were published after it; None: none were, or a checkpoint as a
            whole was, optimizer and all, which no other weights can be compared with.
        weights: where they should be; None as above.
        without_heads: the last step that was committed before the log had heads; 0: none.
    """

    step: int
    digest: str | None
    weights: Path | None
    without_heads: int


async def recorded_end(experiment: Experiment, consumer: str, last: int | None) -> RecordedEnd:
    """Return where a replay of a trainer up to ``last``, or up to its last commit, ends.

    Raises:
        InvalidArgumentError: it has committed nothing.
    """
    database, key = experiment.database, experiment.key
    row = await database.read(writer_queries.consumer_row, key, consumer)
    if row is None or not row.committed_step:
        raise InvalidArgumentError(f"trainer {consumer!r} has committed no step yet")
    end = row.committed_step if last is None else last
    step = await database.read(trainer_queries.step_at, key, consumer, end)
    digest = weights = None
    if step is not None:
        after = await database.read(trainer_queries.weights_after, key, consumer, step)
        if after is not None and after[0] != step.checkpoint_digest:
            digest, weights = after[0], resolve_moved(after[1], after[0], database.folder)
    without_heads = await database.read(trainer_queries.steps_without_heads, key, consumer)
    return RecordedEnd(end, digest, weights, without_heads)


Uids = Callable[[TrainStep, Sequence[int]], Awaitable[list[str]]]
"""Returns the uids of rows of a step, by their places in its manifest."""


@dataclass(eq=False)
class ReplayStream(CommitDoor[None]):
    """Looks like a train stream to a trainer; commits go nowhere. Made by `open_replay_stream`.

    Attributes:
        resume: where the replay begins: the given checkpoint, or None for the very beginning.
        device: where the tensors of its steps are.
        rank, world_size: whose part of each step it serves.
    """

    _portal: BlockingPortal
    _steps: AsyncIterator[TrainStep]
    _uids: Uids
    resume: Resume | None
    device: str
    rank: int
    world_size: int
    _repeat_skips: bool

    def __iter__(self) -> Iterator[TrainStep]:
        return self

    def __next__(self) -> TrainStep:
        # StopAsyncIteration cannot pass through a portal.
        step: TrainStep | None = self._portal.call(anext, self._steps, None)
        if step is None:
            raise StopIteration
        step.skipped &= self._repeat_skips
        return step

    def uids(self, step: TrainStep, rows: Sequence[int]) -> list[str]:
        """Return the uids of rows of a step, by their places in its manifest."""
        return self._portal.call(self._uids, step, rows)

    def leads(self) -> bool:
        """Return True: a replay has no lease to lose."""
        return True

    def _change_nothing(self, *_: Any, **__: Any) -> None:
        """Change nothing: a replay leaves the store as it is, and no other rank waits for it."""

    record = measure = fail = finish = _change_nothing


StepStream = SyncTrainStream | ReplayStream
"""The source of a trainer's steps: a live store, or the replay of one."""


@asynccontextmanager
async def _opened(
    url: StoreURL, experiment: str, options: dict[str, Any]
) -> AsyncIterator[tuple[AsyncIterator[TrainStep], Uids]]:
    async with open_store(url, read_only=True) as store:
        opened = await store.experiment(experiment)
        loader = RowLoader(EventCache(opened.key, opened.name))

        async def uids(step: TrainStep, rows: Sequence[int]) -> list[str]:
            ask = partial(loader.uids, lease=step.manifest, places=rows)
            return await store.database.read_session(ask)

        yield replayed_steps(opened, **options), uids


@contextmanager
def open_replay_stream(
    url: StoreURL,
    *,
    experiment: str,
    from_checkpoint: str | Path | None = None,
    repeat_skips: bool = True,
    **options: Any,
) -> Iterator[ReplayStream]:
    """Open the recorded steps of a trainer as a stream that `Trainer` takes; see `replayed_steps`.

    Args:
        from_checkpoint: folder of the checkpoint to begin with; ``first`` is the step after it.
        repeat_skips: leave out the steps that the recorded weights did not go through; False where
            another loss is tried, which may come through them.
    """
    taken = [*signature(replayed_steps).parameters][1:]
    refuse_unknown("a replay stream", options, ["from_checkpoint", "repeat_skips", *taken])
    first = options.get("first", 1)
    resume = (
        None if from_checkpoint is None else Resume(first - 1, Path(from_checkpoint), None, b"")
    )
    with in_portal(_opened(url, experiment, options)) as (portal, (steps, uids)):
        device = str(options.get("device", "cpu"))
        ranks = (options.get("rank", 0), options.get("world_size", 1))
        yield ReplayStream(portal, steps, uids, resume, device, *ranks, repeat_skips)
