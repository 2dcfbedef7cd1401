"""A gradient step and its micro-batches, and the queue between its maker and the trainer.

`TrainStep.compute` and `apply` see the step as one batch: advantages that compare rows, and
penalties with an adaptive coefficient, must not depend on the split into micro-batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import BatchLeased
from trinity_buffer.pipeline.annotate.consumer import RECORDED
from trinity_buffer.pipeline.handle import ExperimentHandle
from trinity_buffer.pipeline.load.columns import LoadedRows, RowLoader
from trinity_buffer.pipeline.manifest import FIRST_LINK, chain, rows_by_rank
from trinity_buffer.pipeline.train.collate import collate_step, mean_reward
from trinity_buffer.pipeline.train.microbatch import MicroBatch, Mover, StepMemory
from trinity_buffer.pipeline.train.options import StreamOptions
from trinity_buffer.pipeline.train.resume import leased_step, sound_rows
from trinity_buffer.store.rows import StepRow
from trinity_buffer.store.transaction import ReadSession

_logger = logging.getLogger(__name__)

Tensors = dict[str, Any]

MOMENT_S = 0.002
"""Upper bound of the time that a trainer has for the step that it took, before the next is made."""

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over data-parallel ranks."""


@dataclass(slots=True)
class TrainStep:
    """The input of one gradient step.

    Attributes:
        step: 1, 2, ... of this trainer.
        microbatches: mappings of tensors, those of this rank; accumulate their gradients, then step
            the optimizer. Empty where every row was dropped: commit the step like any other.
        manifest: the rows in their order, the event of the log that recorded them.
        chain: link of the manifest chain after this step; keep it with the weights that went
            through the step.
        recorded: True if this step was leased before a restart and is served again.
        policy_versions: of the trainer's own experiences, where known.
        reward: mean over the trainer's own runs, each once, as it was recorded; None: unknown.
        skipped: True in a replay of a step that was committed without changing the weights.
        rows: number of rows of the manifest on this rank.
        log_head: hash of the log up to the event that leased the step, as hex.
        environment: in a replay, the environment of the step's commit; else empty.
    """

    step: int
    microbatches: list[MicroBatch]
    manifest: BatchLeased
    chain: bytes
    recorded: bool
    policy_versions: list[int] = field(default_factory=list)
    reward: float | None = None
    skipped: bool = False
    rows: int = 0
    log_head: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def staleness(self) -> float | None:
        """Mean of (step - 1 - policy version) over rows with a known version."""
        lags = [self.step - 1 - version for version in self.policy_versions]
        return sum(lags) / len(lags) if lags else None

    def compute(
        self,
        advantage_fn: Callable[..., tuple[MutableMapping[str, Any], Mapping[str, Any]]],
        *,
        reduce: Reduce | None = None,
    ) -> dict[str, Any]:
        """Compute advantages over this rank's whole step into its micro-batches; return metrics.

        The micro-batches must hold the inputs of the function (``values``, ``teacher_logprob``,
        ...).

        Args:
            advantage_fn: a trainer-side advantage function, such as ``ADVANTAGE_FN.get("rloo")()``.
            reduce: sums a tensor over ranks, for statistics over all ranks of the step.
        """
        return self.apply(lambda batch, _: advantage_fn(batch, reduce=reduce)[1], reduce=reduce)

    def apply(
        self,
        change: Callable[[dict[str, Any], Any], Mapping[str, Any]],
        *,
        reduce: Reduce | None = None,
    ) -> dict[str, Any]:
        """Let ``change(batch, layout)`` alter the step as one batch; return the metrics it returns.

        Per-token tensors that it adds or replaces are put back into the micro-batches. A new action
        mask also changes the denominators.

        Raises:
            InvalidArgumentError: one does not have the shape of the tokens.
        """
        if not self.microbatches:
            return {}
        batch, layout = _joined(self.microbatches)
        before = dict(batch)
        metrics = change(batch, layout)
        shape = batch["input_ids"].shape
        names = [name for name, value in batch.items() if before.get(name) is not value]
        for name in names:
            if batch[name].shape != shape:
                raise InvalidArgumentError(
                    f"{name} has the shape {tuple(batch[name].shape)}; what is computed over a "
                    f"step has one value per token, {tuple(shape)}"
                )
        start = 0
        for microbatch in self.microbatches:
            ids = microbatch["input_ids"]
            own = slice(start, start := start + len(ids))
            for name in names:
                value: Tensor = batch[name][own]
                microbatch[name] = value if ids.dim() == 1 else value[:, : ids.shape[1]]
        if "action_mask" in names:
            _recount(batch, self.microbatches, reduce)
        return dict(metrics)


def _joined(microbatches: Sequence[MicroBatch]) -> tuple[Tensors, BatchLayout]:
    """Return all micro-batches as one: padded to the widest, or concatenated.

    It has only the tensors that every micro-batch holds.
    """
    first = microbatches[0]
    packed = "cu_seqlens" in first
    names = [n for n in first if all(n in m for m in microbatches)]
    batch: Tensors = {}
    for name in names:
        values = [m[name] for m in microbatches]
        if name == "cu_seqlens":
            ends = [values[0]]
            for value in values[1:]:
                ends.append(value[1:] + ends[-1][-1])
            batch[name] = torch.cat(ends)
        elif isinstance(values[0], Tensor):
            if not packed and values[0].dim() > 1:
                width = max(value.shape[1] for value in values)
                pad = torch.nn.functional.pad
                values = [pad(value, (0, width - value.shape[1])) for value in values]
            batch[name] = torch.cat(values)
        elif name == "max_seqlen":
            batch[name] = max(values)
    return batch, replace(first.layout, cu_seqlens=batch.get("cu_seqlens"))


def _recount(
    batch: Mapping[str, Any], microbatches: Sequence[MicroBatch], reduce: Reduce | None
) -> None:
    """Set the denominators of the micro-batches by the action mask of the joined batch."""
    boundaries, groups = batch.get("cu_seqlens"), batch["group_index"]
    expert = batch.get("expert_mask", torch.zeros_like(groups, dtype=torch.bool))
    mask = batch["action_mask"]
    old = microbatches[0].layout
    denominators = []
    for before, rows in ((old.total, None), (old.usual, ~expert), (old.expert, expert)):
        mine = Totals.count(mask, cu_seqlens=boundaries, group_index=groups, rows=rows)
        counts = torch.tensor([mine.tokens, mine.active_sequences or 0], dtype=torch.float64)
        tokens, active = (counts if reduce is None else reduce(counts)).tolist()
        # A changed mask does not change rows and groups.
        denominators.append(replace(before, tokens=int(tokens), active_sequences=int(active)))
    for microbatch in microbatches:
        microbatch.layout = replace(
            microbatch.layout, total=denominators[0], usual=denominators[1], expert=denominators[2]
        )


@dataclass(slots=True)
class _Zeros:
    """Warns once if advantages are read that were never computed; can be pickled."""

    consumer: str
    annotation_set: str
    has_warned: bool = False

    def warn(self) -> None:
        """Warn once."""
        if not self.has_warned:
            self.has_warned = True
            _logger.warning(
                "trainer %r: the annotation set %r has no advantages, so that `advantages` is 0 "
                "everywhere: train on another set, or say with needs= what the loss reads "
                "(needs=('advantages',) refuses a set without them)",
                self.consumer,
                self.annotation_set,
            )


class StepMaker:
    """Makes the steps of one rank in order, as each is a link of the manifest chain.

    Args:
        experiment: the trainer's own experiment.
        options: options of the stream.
        loader: loads the trainer's rows.
    """

    def __init__(
        self, experiment: ExperimentHandle, options: StreamOptions, loader: RowLoader
    ) -> None:
        self._experiment = experiment
        self._options = options
        self._loader = loader
        self._memory = StepMemory()
        self._mover = Mover(options.device)
        self._chain = FIRST_LINK
        self._zeros = _Zeros(options.consumer, options.annotation_set)

    def go_on_after(self, committed: Iterable[StepRow]) -> bytes:
        """Begin after the ``committed`` steps; return the link of the chain after them.

        ``committed`` begins with the first step, or with one whose commit recorded the link.
        """
        self._chain = FIRST_LINK
        for done in committed:
            self._chain = done.chain or chain(self._chain, done.manifest_digest)
        return self._chain

    async def leased(self, row: StepRow) -> TrainStep:
        """Return a step that was leased before, by the log.

        Raises:
            ArchivedSegmentError, CodecError, DamagedSegmentError: as `sound_rows`.
        """

        def load(s: ReadSession) -> TrainStep:
            leased = leased_step(s, self._experiment, row)
            _, rows, _ = sound_rows(s, self._loader, leased.manifest, drops=False)
            step = s.compute(self.make, leased.manifest, rows)
            return self.chained(replace(step, recorded=True), leased.head)

        return await self._experiment.database.read_session(load)

    def make(self, lease: BatchLeased, rows: LoadedRows) -> TrainStep:
        """Return a step with this rank's micro-batches, not yet in the chain."""
        options = self._options
        step = collated(
            lease,
            rows,
            rank=options.rank,
            world=options.world_size,
            mover=self._mover,
            memory=self._memory,
        )
        asked = options.needs or options.annotation_set == RECORDED
        zeros = not asked and len(rows.lacking("advantages")) == len(lease.groups)
        for microbatch in step.microbatches:
            if zeros:
                microbatch.read_zeros = self._zeros.warn
            if options.recompute_old_logprob:
                microbatch.drop("old_logprob")
        return step

    def chained(self, step: TrainStep, head: bytes | None) -> TrainStep:
        """Return the next step with its link of the chain.

        Args:
            head: head of the log at the event that leased it.
        """
        step.chain = self._chain = chain(self._chain, step.manifest.digest)
        step.log_head = "" if head is None else head.hex()
        return step


def collated(
    lease: BatchLeased,
    rows: LoadedRows,
    *,
    rank: int,
    world: int,
    mover: Mover,
    memory: StepMemory | None = None,
) -> TrainStep:
    """Return a step of one rank, still without its link of the chain; see `collate_step`."""
    microbatches = collate_step(lease, rows, rank=rank, world=world, mover=mover, memory=memory)
    versions = zip(rows.facts.policy_versions, rows.expert.tolist(), strict=True)
    return TrainStep(
        lease.step,
        microbatches,
        lease,
        b"",
        recorded=False,
        policy_versions=[version for version, of in versions if not (version is None or of)],
        reward=mean_reward(lease, rows),
        rows=rows_by_rank(lease)[rank],
    )


class StepQueue:
    """A queue of steps between threads, which holds at most ``ahead`` unreceived ones.

    The event loop is woken only if a task in it waits. Between two threads, that is one wake-up per
    step instead of five.

    Args:
        ahead: number of steps that are made before they are requested.
    """

    def __init__(self, ahead: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._ahead = ahead
        self._steps: SimpleQueue[TrainStep | None] = SimpleQueue()
        self._num_put = self._num_asked = self._num_received = 0
        self._num_waiting = 0
        self._idle_since = 0.0
        self._news = asyncio.Event()
        self._failure: Exception | None = None

    # -- for the maker
    # --------------------------------------------------------------------------------------------

    @property
    def num_put(self) -> int:
        """Number of steps put."""
        return self._num_put

    def has_room(self) -> bool:
        """Return whether another step may be made."""
        return self._num_put < self._num_asked + self._ahead

    def is_waited_for(self) -> bool:
        """Return whether a reader waits for a step that does not exist yet."""
        return self._num_asked > self._num_put

    async def room(self) -> None:
        """Wait until another step may be made."""
        self._idle_since = time.monotonic()
        await self._until(self.has_room)

    def put(self, step: TrainStep) -> None:
        """Add the next step."""
        self._num_put += 1
        self._steps.put(step)
        self._tell()

    def fail(self, error: Exception) -> None:
        """End the queue by ``error``, which the next request raises."""
        self._failure = error

    def end(self) -> None:
        """End the queue."""
        self._steps.put(None)
        self._tell()

    # -- for the trainer
    # --------------------------------------------------------------------------------------------

    def get(self) -> TrainStep | None:
        """Return the next step, or None at the end; blocks the thread until there is one.

        Raises:
            Exception: the error passed to `fail`.
        """
        self._ask()
        return self._received(self._steps.get())

    async def receive(self) -> TrainStep | None:
        """Return the next step like `get`, without blocking the event loop."""
        self._ask()
        await self._until(lambda: not self._steps.empty())
        return self._received(self._steps.get_nowait())

    def discard(self) -> None:
        """Drop the steps that were not requested."""
        try:
            while True:
                self._steps.get_nowait()
        except Empty:
            self.end()

    def _ask(self) -> None:
        # A request that was cancelled while it waited is repeated, not counted twice.
        self._num_asked = self._num_received + 1
        if self._steps.empty():
            self._tell()
        elif self._num_waiting:
            self._loop.call_soon_threadsafe(self._ring_soon)

    def _received(self, step: TrainStep | None) -> TrainStep | None:
        if step is None:
            self._steps.put(None)  # the end must be readable again
            if self._failure is not None:
                raise self._failure from None
        else:
            self._num_received += 1
        return step

    # -- waiting
    # --------------------------------------------------------------------------------------------

    async def _until(self, done: Callable[[], bool]) -> None:
        # A waiter registers before it checks the condition, and a writer looks for waiters after
        # its change: one of the two always sees the other, so no wake-up is lost.
        self._num_waiting += 1
        try:
            while not done():
                await self._news.wait()
        finally:
            self._num_waiting -= 1

    def _tell(self) -> None:
        if self._num_waiting:
            self._loop.call_soon_threadsafe(self._ring)

    def _ring_soon(self) -> None:
        """Let the next step be made in a moment, where the trainer has computed for long.

        It moves the step that it takes now to its device, which threads that make another one
        would slow down by the interpreter lock.
        """
        idle_s = time.monotonic() - self._idle_since
        self._loop.call_later(min(MOMENT_S, idle_s / 10), self._ring)

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
