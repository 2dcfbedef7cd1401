"""A gradient step, the queue between its maker and the trainer, and what its commit records.

`TrainStep.compute` and `apply` see the step as one batch: advantages that compare rows, and
penalties with an adaptive coefficient, must not depend on the split into micro-batches.

A commit records the software, device and settings on which the bits of a step depend. A replay
restores what can be restored and names the rest.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from anyio.lowlevel import checkpoint_if_cancelled
from torch import Tensor

from trinity_buffer import events
from trinity_buffer.algorithm.building import require_recorded
from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.codec.objects import new_event
from trinity_buffer.codec.segments import Column, content_digest, encode_segment
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.encoding import columns_of, edits_of
from trinity_buffer.pipeline.train.microbatch import MicroBatch
from trinity_buffer.store.segments import SegmentRow, SegmentStore, new_key

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
    manifest: events.BatchLeased
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

        Raises:
            InvalidArgumentError: it reads rewards or log-probabilities, and a row has none.
        """
        require_rewarded(self.microbatches, advantage_fn)
        reads = {*getattr(advantage_fn, "tensors", ())}
        reads |= {"old_logprob"} if getattr(advantage_fn, "reads_old_logprob", False) else set()
        for microbatch in self.microbatches[:1]:  # each knows what is lacking in the whole step
            require_recorded(microbatch, advantage_fn, reads)
        return self.apply(lambda batch, _: advantage_fn(batch, reduce=reduce)[1], reduce=reduce)

    def apply(
        self,
        change: Callable[[dict[str, Any], Any], Mapping[str, Any]],
        *,
        reduce: Reduce | None = None,
    ) -> dict[str, Any]:
        """Let ``change(batch, layout)`` alter the step as one batch; return the metrics it returns.

        Per-token tensors that it adds, replaces or changes in place are put back into the
        micro-batches. A new action mask also changes the denominators.

        Raises:
            InvalidArgumentError: one does not have the shape of the tokens.
        """
        if not self.microbatches:
            return {}
        batch, layout = _joined(self.microbatches)
        before = {name: (value, edits_of(value)) for name, value in batch.items()}
        metrics = change(batch, layout)
        shape = batch["input_ids"].shape
        names = [
            name
            for name, value in batch.items()
            if (known := before.get(name)) is None
            or known[0] is not value
            or known[1] != edits_of(value)
        ]
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


def require_rewarded(microbatches: Iterable[MicroBatch], advantage_fn: object) -> None:
    """Raise unless all rows of a step have the rewards that an advantage function reads.

    Raises:
        InvalidArgumentError: names a row that has none.
    """
    reads = getattr(advantage_fn, "reads_rewards", False)
    for lacking in (m.unrewarded for m in microbatches if reads and m.unrewarded is not None):
        raise InvalidArgumentError(
            f"{type(advantage_fn).__name__} reads the rewards of all rows, and "
            f"{lacking or 'no row of the step'} has {'none' if lacking else 'one'}: assign "
            "token_level_rewards to the micro-batches, or go on without such rows "
            f"({f'drop=[{lacking!r}]' if lacking else 'consumer=, another one'}) and ask the "
            "stream for needs=('reward',), which rejects those of the steps to come"
        )


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
            ends = accumulate(values, lambda before, own: own[1:] + before[-1])
            batch[name] = torch.cat([*ends])
        elif isinstance(values[0], Tensor):
            if not packed and values[0].dim() > 1:
                width = max(value.shape[1] for value in values)
                pad = torch.nn.functional.pad
                values = [pad(value, (0, width - value.shape[1])) for value in values]
            batch[name] = torch.cat(values)
        elif name == "max_seqlen":
            batch[name] = max(values)
    return batch, replace(first.layout, cu_seqlens=batch.get("cu_seqlens"))


def _recount(batch: Tensors, microbatches: Sequence[MicroBatch], reduce: Reduce | None) -> None:
    """Set the denominators of the micro-batches by the action mask of the joined batch."""
    boundaries, groups = batch.get("cu_seqlens"), batch["group_index"]
    expert = batch.get("expert_mask", torch.zeros_like(groups, dtype=torch.bool))
    mask = batch["action_mask"]
    old, counted = microbatches[0].layout, list[Totals]()
    for before, rows in ((old.total, None), (old.usual, ~expert), (old.expert, expert)):
        mine = Totals.count(mask, cu_seqlens=boundaries, group_index=groups, rows=rows)
        counts = torch.tensor([mine.tokens, mine.active_sequences or 0], dtype=torch.float64)
        tokens, active = (counts if reduce is None else reduce(counts)).tolist()
        # A changed mask does not change rows and groups.
        counted.append(replace(before, tokens=int(tokens), active_sequences=int(active)))
    total, usual, ours = counted
    for microbatch in microbatches:
        microbatch.layout = replace(microbatch.layout, total=total, usual=usual, expert=ours)


@dataclass(slots=True)
class ZeroAdvantages:
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


class StepQueue:
    """A queue of steps between threads, which holds at most ``ahead`` unreceived ones.

    The event loop is woken only if a task in it waits. Between two threads, that is one wake-up per
    step instead of five.

    Args:
        ahead: number of steps that are made before they are requested.

    Attributes:
        num_put: number of steps put.
    """

    def __init__(self, ahead: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._ahead = ahead
        self._steps: SimpleQueue[TrainStep | None] = SimpleQueue()
        self.num_put = 0
        self._num_asked = self._num_received = self._num_waiting = 0
        self._idle_since = 0.0
        self._news = asyncio.Event()
        self._failure: Exception | None = None

    # -- for the maker
    # --------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Return whether another step may be made."""
        return self.num_put < self._num_asked + self._ahead

    def is_waited_for(self) -> bool:
        """Return whether a reader waits for a step that does not exist yet."""
        return self._num_asked > self.num_put

    async def room(self) -> None:
        """Wait until another step may be made."""
        self._idle_since = time.monotonic()
        await self._until(self.has_room)

    def put(self, step: TrainStep | None) -> None:
        """Add the next step, or None for the end."""
        self.num_put += step is not None
        self._steps.put(step)
        if self._num_waiting:
            self._loop.call_soon_threadsafe(self._ring)

    def end(self, error: Exception | None = None) -> None:
        """End the queue, by ``error`` if there is one, which the next request raises."""
        self._failure = self._failure or error
        self.put(None)

    # -- for the trainer
    # --------------------------------------------------------------------------------------------

    def get(self) -> TrainStep | None:
        """Return the next step, or None at the end; blocks the thread until there is one.

        Raises:
            Exception: the error passed to `end`.
        """
        # A request that was cancelled while it waited is repeated, not counted twice.
        self._num_asked = self._num_received + 1
        if self._num_waiting and self._steps.empty():
            self._loop.call_soon_threadsafe(self._ring)
        elif self._num_waiting:
            # The next step is made in a moment, where the trainer has computed for long: it moves
            # the step that it takes now to its device, which threads that make another one would
            # slow down by the interpreter lock.
            idle_s = time.monotonic() - self._idle_since
            moment_s = min(MOMENT_S, idle_s / 10)
            self._loop.call_soon_threadsafe(self._loop.call_later, moment_s, self._ring)
        if (step := self._steps.get()) is not None:
            self._num_received += 1
            return step
        self._steps.put(None)  # the end must be readable again
        if self._failure is not None:
            raise self._failure from None
        return None

    async def receive(self) -> TrainStep | None:
        """Return the next step like `get`, without blocking the event loop."""
        if self._steps.empty():
            self._num_asked = self._num_received + 1
            self._ring()
            await self._until(lambda: not self._steps.empty())
        # What cancels the reader cancels the maker, too, whose end may be seen first.
        await checkpoint_if_cancelled()
        return self.get()

    def discard(self) -> None:
        """Drop the steps that were not requested."""
        with suppress(Empty):
            while True:
                self._steps.get_nowait()
        self.end()

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

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


Numbers = npt.NDArray[np.float32]
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class StepMeasures:
    """Measurements of one step.

    Attributes:
        rows: name -> ``[rows of the manifest]``, NaN for missing values.
        metrics: numbers of the whole step.
        tokens: name -> ``[its tokens]`` for each row of the manifest; empty if not requested.
    """

    step: int
    rows: Mapping[str, Numbers]
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def measured_event(
    consumer: str, measures: StepMeasures, store: SegmentStore
) -> tuple[events.NewEvent, list[SegmentRow]]:
    """Put ``measures`` into ``store``; return the event that records them, and their segment.

    Encodes: call it off the event loop.
    """
    number = len(next(iter(measures.rows.values())))
    arrays = {n: np.ascontiguousarray(of, np.dtype("<f4")) for n, of in measures.rows.items()}
    shapes = np.zeros((number, 0), np.int64)
    columns = [Column(n, "float32", shapes, of.view(np.uint8)) for n, of in arrays.items()]
    families = {events.MEASURED_ROWS: encode_segment(columns, {}, number)}
    if measures.tokens:
        of_tokens = [c for n, values in measures.tokens.items() for c in columns_of(n, values)]
        families[events.MEASURED_TOKENS] = encode_segment(of_tokens, {}, number)
    key = new_key()
    measured = events.StepMeasured(
        consumer=consumer,
        step=measures.step,
        segment=key,
        families={family: len(blob) for family, blob in families.items()},
        digest=content_digest(list(families.values())),
        rows=number,
        metrics=finite(measures.metrics),
    )
    blobs = {family: [blob] for family, blob in families.items()}
    return new_event(measured), store.put(key, blobs)


PolicyPath = str | Path | Literal[False] | None
"""The weights that a commit publishes: a path, None for the checkpoint, False for none."""


class Commit(NamedTuple):
    """What a commit records; see `CommitDoor.commit`. Its paths are absolute."""

    checkpoint: Path | None
    policy: Path | None
    environment: Mapping[str, Any]
    metrics: Mapping[str, float]
    skipped: Mapping[int, Sequence[str]]
    digests: Mapping[Path, str]


class CommitDoor(Protocol[T_co]):
    """A stream whose steps are committed, by a function that returns or by one that is awaited.

    Attributes:
        device: device of the tensors of its steps.
    """

    device: str

    def commit(
        self,
        step: TrainStep,
        checkpoint: str | Path | None = None,
        policy: PolicyPath = None,
        environment: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        skipped: Mapping[int, Sequence[str]] | None = None,
        digests: Mapping[Path, str] | None = None,
    ) -> T_co:
        """Record, in one transaction, that the steps up to ``step`` are in ``checkpoint``.

        The checkpoint's files are flushed to disk first. A committed step is never served again, so
        commit only what you have saved. Repeating a commit is a no-op for the stream that made it.
        A rank above 0 tells rank 0 that it went through the steps and has written its files of the
        checkpoint, if any; the other arguments are used by rank 0 alone.

        Args:
            checkpoint: file or folder that holds the weights after ``step``; None to commit
                without one.
            policy: the weights that explorers load as policy version ``step.step``: None publishes
                the checkpoint, a path another file or folder with the same weights, and False
                nothing. Without a checkpoint, only a path publishes anything.
            environment: the environment for replay; by default that of `environment_of_run`.
            metrics: numbers to record with the step; those that are not finite are left out.
            skipped: steps that did not change the weights -> uids of the rows to look at.
            digests: absolute path -> what `pipeline.train.checkpoint.written` returned, of files of
                the checkpoint that need not be hashed and written through to the disk again.

        Raises:
            LeaseLostError: another process took over, or the ranks assembled anew without this
                one; nothing was recorded.
            CheckpointError: no file at ``checkpoint`` or ``policy``.
            InvalidArgumentError: a step up to ``step`` was not delivered by this stream, or it is
                committed already, with another checkpoint or policy.
            StoreError: a commit that was cancelled went through all the same: open the stream
                again.
        """
        if not isinstance(step, TrainStep):
            raise InvalidArgumentError(f"commit() takes a step of the stream, not {step!r:.60}")
        if isinstance(policy, bool) and policy:
            raise InvalidArgumentError(
                "policy=True: leave it out to publish the checkpoint, give another path of the "
                "same weights, or False to publish nothing"
            )
        weights = checkpoint if policy is None else policy or None
        saved, published = (
            None if path is None else Path(path).absolute() for path in (checkpoint, weights)
        )
        # In the caller's thread, of which torch's number of threads is a setting.
        here = environment or environment_of_run(self.device)
        commit = Commit(saved, published, here, metrics or {}, skipped or {}, digests or {})
        return self.record(step, commit)

    def record(self, step: TrainStep, request: Commit) -> T_co:
        """Carry out a `commit`."""
        ...


class Delivered(NamedTuple):
    """A delivered and uncommitted step, without its tensors.

    Attributes:
        rows: number of its rows on this rank.
        measures: what was measured of it, if anything was.
    """

    manifest: events.BatchLeased
    rows: int
    measures: StepMeasures | None = None


COMMITS_KEPT = 1024
"""Number of commits that are remembered, to tell a repeated one from a contradiction."""


class LastCommits:
    """The last commits of a stream, by step.

    Args:
        trainer: name of the trainer, for messages.
    """

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer
        self._commits = deque[tuple[range, Commit]](maxlen=COMMITS_KEPT)
        self._warned = self._warned_of_path = False

    def require_same(self, step: int, request: Commit) -> None:
        """Raise if a repeated commit of ``step`` names what the first one did not record.

        Raises:
            InvalidArgumentError: its checkpoint or policy would be silently ignored.
        """
        # Of an earlier stream, or too long ago, it is not remembered.
        steps, made = next((c for c in self._commits if step in c[0]), (range(step + 1), request))
        paths = (made.checkpoint, made.policy) if step == steps[-1] else (None, None)
        for what, path, known in zip(("checkpoint", "policy"), request, paths, strict=False):
            if path not in (None, known):
                how = f"with {known}" if known is not None else f"without a {what}"
                raise InvalidArgumentError(
                    f"commit of step {step} with {what} {path}: the step is committed already, "
                    f"{how}. A commit covers all steps up to its own, once and for all: make it "
                    "when what it names is written"
                )

    def add(self, first: int, step: int, request: Commit) -> None:
        """Note a commit of the steps from ``first`` to ``step``.

        Warns once if checkpoints stop, and once if one reuses an earlier path.
        """
        checkpoint = request.checkpoint
        saved = {of[-1]: made.checkpoint for of, made in self._commits if made.checkpoint}
        if checkpoint is None and saved and not self._warned:
            self._warned = True
            _logger.warning(
                "trainer %r: step %d is committed without a checkpoint, step %d had one: after a "
                "restart neither the steps between are served again, nor are there weights that "
                "went through them; commit only steps that are saved, which covers all before them",
                self._trainer,
                step,
                max(saved),
            )
        earlier = [at for at, path in saved.items() if path == checkpoint]
        if earlier and not self._warned_of_path:
            self._warned_of_path = True
            _logger.warning(
                "trainer %r: the checkpoint of step %d was written over that of step %d (%s): "
                "while the next one is written, a crash leaves no checkpoint to go on from, "
                "and explorers may read half of it; give each step a path of its own",
                self._trainer,
                step,
                earlier[-1],
                checkpoint,
            )
        self._commits.append((range(first, step + 1), request))


NON_FINITE = "non_finite"
"""Reason of a committed step that did not change the weights."""


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics: events hold no NaN or infinity."""
    try:  # a number of torch's has an item()
        numbers = {n: v.item() if hasattr(v, "item") else v for n, v in metrics.items()}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}
    except (AttributeError, RuntimeError, TypeError, ValueError):
        raise InvalidArgumentError(
            f"metrics={metrics!r:.200}: each must be a number, such as float(loss)"
        ) from None


CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The variable without which torch refuses deterministic products of matrices on a GPU."""

DRIVER_FILE = Path("/proc/driver/nvidia/version")


class Flag(NamedTuple):
    """A setting of torch that changes bits, and that a replay restores."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


def environment_of_run(device: str) -> dict[str, Any]:
    """Return the environment that the bits of a step depend on, as `StepsCommitted` records it.

    Args:
        device: the device that computes the steps.
    """
    transformers = sys.modules.get("transformers")
    environment = {
        "torch": str(torch.__version__),
        "device": device,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed() % (1 << 63),
        **{name: flag.get() for name, flag in flags(device).items()},
        "transformers": getattr(transformers, "__version__", None),
        "only_warns": torch.is_deterministic_algorithms_warn_only_enabled() or None,
    }
    if device.startswith("cuda"):
        environment |= {
            "gpu": torch.cuda.get_device_name(device),
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cublas_workspace": os.environ.get(CUBLAS_WORKSPACE),
            "triton": triton_version(),
        }
    else:  # the instructions that torch uses, which choose its kernels
        environment["processor"] = torch.backends.cpu.get_cpu_capability()
    return {name: value for name, value in environment.items() if value is not None}


@cache
def flags(device: str) -> dict[str, Flag]:
    """Return the settings that change bits on a device, by the names under which they are recorded.

    `threads` is one of them; those that make operations deterministic are not.
    """
    settings = {
        "threads": Flag(torch.get_num_threads, torch.set_num_threads),
        "matmul_precision": Flag(_matmul_precision, _set_matmul_precision),
        "attention_backends": Flag(_attention_backends, _set_attention_backends),
    }
    if device.startswith("cuda"):
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        settings |= {
            "matmul_bf16_reduction": _attribute(matmul, "allow_bf16_reduced_precision_reduction"),
            "matmul_fp16_reduction": _attribute(matmul, "allow_fp16_reduced_precision_reduction"),
            "cudnn_tf32": _attribute(cudnn, "allow_tf32"),
        }
    return settings


def settle_cublas() -> None:
    """Choose the workspace of cuBLAS unless it is set; call it before a model is used.

    Torch reads it once, at the first matrix product on a GPU. If it was unset then, deterministic
    products are refused for the rest of the process.
    """
    if torch.version.cuda is not None:  # not `is_available()`, after which no child may use a GPU
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the recorded values that differ here: name -> recorded, here.

    Values that older versions did not record are not compared, nor is the seed: a run that resumes
    takes the random state of its checkpoint.
    """
    return {
        name: [value, here.get(name)]
        for name, value in recorded.items()
        if name != "seed" and here.get(name) != value
    }


def in_words(differing: Mapping[str, list[Any]]) -> str:
    """Return differences as text: ``threads 4 (here 1)``."""
    return ", ".join(f"{name} {then} (here {here})" for name, (then, here) in differing.items())


def _attribute(owner: Any, name: str) -> Flag:
    def get() -> Any:
        with suppress(RuntimeError):  # unreadable after old and new TF32 settings were mixed
            return getattr(owner, name)
        return None

    return Flag(get, lambda value: setattr(owner, name, value))


def _matmul_precision() -> str:
    """Return the precision of float32 products, by the newer setting where torch has it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # after mixing both settings, only the new one can be read
        return str(torch.backends.cuda.matmul.fp32_precision)


def _set_matmul_precision(value: str) -> None:
    if value in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(value)
    else:
        torch.backends.cuda.matmul.fp32_precision = value


_BACKENDS = ("cudnn", "flash", "mem_efficient", "math")
"""Of ``scaled_dot_product_attention``, as torch calls them in the names of its functions."""


def _attention_backends() -> str:
    """Return which backends of attention torch may choose from."""
    cuda = torch.backends.cuda  # a CPU heeds these settings too
    return "+".join(name for name in _BACKENDS if getattr(cuda, f"{name}_sdp_enabled")())


def _set_attention_backends(value: str) -> None:
    for name in _BACKENDS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name in value.split("+"))


@cache
def triton_version() -> str | None:
    """Return the version of Triton, whose kernels compute scores; None: it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("triton")
    return None


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, which torch does not expose; None: unknown."""
    with suppress(OSError):
        words = DRIVER_FILE.read_text().split("\n", 1)[0].split()
        # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    return None
