"""Steps of a train stream for a trainer that counts its own steps and keeps its own checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from trinity_buffer.errors import CheckpointError, InvalidArgumentError, TrainingError
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.load.columns import experiences_of
from trinity_buffer.pipeline.store import Experiment, open_store
from trinity_buffer.pipeline.sync_stream import LoopThread
from trinity_buffer.pipeline.train.step import TrainStep
from trinity_buffer.pipeline.train.stream import TrainStream
from trinity_buffer.sampling import SEGMENTS, sampled
from trinity_buffer.store import trainer_queries, writer_queries


@dataclass(slots=True)
class CheckpointedSteps:
    """A train stream after the steps that the weights of a checkpoint went through.

    What the weights have seen is committed with the checkpoint that holds it, once the trainer says
    that this is whole; what they have not seen comes again after a crash. Steps are numbered as the
    trainer counts them: one of which every row was dropped is not handed to it, and is committed
    with the next one.

    Attributes:
        newest: the last step that the weights went through or the trainer was handed.
    """

    stream: TrainStream
    newest: int
    _handed: dict[int, TrainStep] = field(default_factory=dict)

    async def take(self) -> TrainStep:
        """Return the next step that has rows.

        Raises:
            StopAsyncIteration: the stream has ended.
        """
        step = await anext(self.stream)
        while not step.microbatches:
            step = await anext(self.stream)
        self.newest += 1
        self.hand(step)
        return step

    def hand(self, step: TrainStep) -> None:
        """Take note of the `newest` step of the trainer."""
        self._handed[self.newest] = replace(step, microbatches=[])

    async def commit(self, step: int, checkpoint: Path | None) -> None:
        """Commit what is in ``checkpoint``: everything up to ``step``; again is a no-op."""
        if step not in self._handed:
            return
        await self.stream.commit(self._handed[step], checkpoint)
        # Steps up to the commit are in the checkpoint: nothing of them is asked for again.
        self._handed = {n: taken for n, taken in self._handed.items() if n > step}


@asynccontextmanager
async def checkpointed_steps(
    experiment: Experiment, trained: int, **options: Any
) -> AsyncIterator[CheckpointedSteps]:
    """Yield the steps after the first ``trained``, which the weights went through.

    Raises:
        CheckpointError: the weights have seen nothing of what was committed, or steps that were
            never handed out.
    """
    consumer = str(options.get("consumer", "trainer"))
    read, key = experiment.database.read, experiment.key
    row = await read(writer_queries.consumer_row, key, consumer)
    committed, leased = (0, 0) if row is None else (row.committed_step, row.leased_step)
    # Before the stream is open: what it drops now, the weights may have seen.
    seen = await read(trainer_queries.step_with_rows, key, consumer, trained)
    if seen > leased:  # rows that no weights have seen would be taken for those
        raise CheckpointError(
            f"the trainer has trained {trained} steps already, and of experiment "
            f"{experiment.name!r} {consumer!r} was handed {leased}: name the experiment, and the "
            "consumer=, that they were of; or let the trainer count from step 1, with these "
            "weights as the model that it begins with"
        )
    if committed > seen:
        if not trained:
            raise CheckpointError(
                f"the trainer starts with step 1, and experiment {experiment.name!r} has committed "
                f"step {committed}: give it the checkpoint, or this trainer another consumer="
            )
        options["resume_from"] = seen
    # One process hands the steps out, whatever ranks the trainer has.
    async with experiment.train_stream(**{"rank": 0, "world_size": 1, **options}) as stream:
        steps = CheckpointedSteps(stream, trained)
        # The checkpoint is ahead of the store: its commit was cut short by the crash.
        if committed < seen:
            while (step := await anext(stream)).step < seen:
                pass
            steps.hand(step)
        yield steps


class StoreThread:
    """A store and the steps of an experiment, for a trainer that is not async.

    Its event loop runs in a thread, which does not outlive a process that never closes it.

    Args:
        url: of the store; made if there is none.
        experiment: its name; made if there is none.
        config: of the experiment.
    """

    def __init__(self, url: str, experiment: str, config: Mapping[str, Any]) -> None:
        self._stack = ExitStack()
        loop = LoopThread()
        self._stack.callback(loop.close)
        self.portal = loop.portal
        self.store = self._entered(open_store(url))
        self.experiment: Experiment = self.portal.call(
            lambda: self.store.experiment(experiment, config=dict(config))
        )
        self.steps: CheckpointedSteps | None = None

    def begin(self, trained: int, **options: Any) -> CheckpointedSteps:
        """Return the steps after the first ``trained``; see `checkpointed_steps`."""
        if self.steps is None:
            self.steps = self._entered(checkpointed_steps(self.experiment, trained, **options))
        return self.steps

    def rows_of(self, step: TrainStep) -> list[Experience]:
        """Return the rows of a step, group after group: micro-batches may sort them by length."""
        rows = self.portal.call(experiences_of, self.experiment, step.manifest)
        places = sorted(range(len(rows)), key=step.manifest.annotations.__getitem__)
        return [rows[place] for place in places]

    def close(self) -> None:
        """Release the lease; a trainer that is killed loses it after ``lease_ttl_s``."""
        self._stack.close()

    def _entered(self, context: Any) -> Any:
        return self._stack.enter_context(self.portal.wrap_async_context_manager(context))


def last_saved(folder: Path) -> int:
    """Return the step that ``latest_checkpointed_iteration.txt`` names, 0 where it names none.

    Trinity-RFT and verl write it in place once a checkpoint is whole: it may be empty for a moment.
    """
    latest = folder / "latest_checkpointed_iteration.txt"
    return int((latest.read_text() if latest.exists() else "") or 0)


def require_max_steps(args: Any) -> None:
    """Raise unless the arguments of a trainer of TRL say how many steps it takes at most.

    Raises:
        InvalidArgumentError: they do not.
    """
    if args.max_steps < 1:
        raise InvalidArgumentError(
            "max_steps: give it, TRL cannot know how long the stream is; the run ends with the "
            "stream if that is sooner"
        )


def saving_interval(args: Any) -> int:
    """Return after how many steps TRL saves a checkpoint; at the end at least."""
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "steps":
        return int(args.max_steps)
    share = args.save_steps < 1  # of all steps
    return ceil(args.max_steps * args.save_steps) if share else int(args.save_steps)


def require_temperature(rows: Sequence[Experience], temperature: float) -> None:
    """Raise unless a trainer that divides all logits by ``temperature`` scores ``rows`` right.

    Those that do not say how they were sampled are taken as they are.

    Raises:
        TrainingError: one says that it was sampled at another temperature.
    """
    for row in rows:
        spans = sampled(row.info, row.prompt_length, len(row.tokens)) or ()
        # Segments that change nothing say a temperature of 1.
        neutral = [] if spans else [1.0] * bool(row.info.get(SEGMENTS))
        for heat in [*neutral, *(span.temperature for span in spans)]:
            if abs(heat - temperature) > 1e-4 * temperature:
                raise TrainingError(
                    f"row {row.eid.uid} was sampled at temperature {heat:g}, and the "
                    f"trainer divides all logits by {temperature:g}: give it the temperature of "
                    "the rows, and sample all at one"
                )
