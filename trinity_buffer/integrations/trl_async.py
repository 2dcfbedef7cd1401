"""TRL's asynchronous trainer, fed from the store.

Written against TRL 1.16: a rollout worker of its `AsyncGRPOTrainer`, and the callback that commits
what was trained. The training step of TRL itself wants a GPU.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.integrations.checkpointed_steps import require_max_steps, saving_interval
from trinity_buffer.lazy import importing
from trinity_buffer.pipeline.sync_stream import SyncTrainStream
from trinity_buffer.pipeline.train.step import TrainStep

with importing("trl", "trinity-buffer[trl]"):
    from accelerate import PartialState
    from transformers import TrainerCallback
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

AHEAD = 2
"""Steps that wait in TRL's queue."""
_POLL_S = 0.2


class _Rollouts(queue.Queue[RolloutSample]):
    """The queue that TRL drains. Behind the stream's last row come rows without weight.

    TRL looks a micro-batch ahead, and waits for it before it trains the one that it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = False
        self.version = 0

    @override
    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        if self.has_ended and self.empty():
            return _filler(self.version)
        return super().get(block, timeout)


class StoredRollouts(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """A rollout worker whose rollouts, old log-probs and advantages are those of a train stream.

    Give it to the trainer twice, as ``rollout_worker=`` and in ``callbacks=``. One optimizer step
    is one step of the stream; a step with fewer rows is filled up with rows of one token and
    advantage 0, which TRL counts in its means. Each checkpoint that TRL saves commits the steps up
    to it, and the training ends with the stream. Go on from ``stream.resume.checkpoint``
    (``trainer.train(resume_from_checkpoint=...)``): what was trained after it is handed out again.
    How old a rollout may be is the stream's affair (``max_staleness=``): TRL, which drops rows in
    silence, is told that none is.

    Args:
        stream: from `trinity_buffer.open_train_stream`, padded; None on all processes but the main
            one.
        args: of the trainer, with ``token_budget=0`` and ``max_steps``: so many rows make a step as
            ``per_device_train_batch_size``, ``gradient_accumulation_steps`` and processes say.

    Raises:
        InvalidArgumentError: settings under which a step of TRL is not one of the stream.
    """

    def __init__(self, stream: SyncTrainStream | None, args: Any) -> None:
        if args.token_budget != 0:
            raise InvalidArgumentError(
                f"token_budget={args.token_budget}: give token_budget=0, else a step of TRL is not "
                "a step of the stream"
            )
        require_max_steps(args)
        if stream is not None:  # TRL looks for the next step before it saves this one
            stream.require_commits(saving_interval(args) + 1, "save_steps + 1")
        self.rollout_buffer = _Rollouts()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._rows = rows * args.world_size
        self._temperature = args.temperature
        self._stream = stream
        self._handed: dict[int, TrainStep] = {}
        self._trained: TrainStep | None = None
        self._last: int | None = None  # the stream's last step, once it has ended
        self._room = threading.Semaphore(AHEAD)
        self._stopped = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stored-rollouts")
        self._feeding: Future[None] | None = None

    # -- the worker

    def start(self) -> None:
        """Begin to hand out steps."""
        self._feeding = self._thread.submit(self._feed)

    def stop(self) -> None:
        """End; a wait for another step ends with the stream."""
        self._stopped.set()
        self._thread.shutdown(wait=False)

    def update_model_version(self, model_version: int) -> None:
        """Take note of TRL's own count of weight syncs."""
        self.rollout_buffer.version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what went wrong; to wait for explorers is no fault, and the stream says so."""
        del stale_after_s
        if self._feeding is not None and self._feeding.done():
            self._feeding.result()

    def _feed(self) -> None:
        assert self._stream is not None, "TRL starts a worker on the main process"
        for step in self._stream:
            while not self._room.acquire(timeout=_POLL_S):
                if self._stopped.is_set():
                    return
            self._put(step)
        if not self._handed and self._trained is None:
            raise InvalidArgumentError("the stream has ended: nothing is left to train on")
        self._last = max(self._handed, default=0 if self._trained is None else self._trained.step)
        self.rollout_buffer.has_ended = True

    def _put(self, step: TrainStep) -> None:
        for microbatch in step.microbatches:
            microbatch.require_plain(self._temperature)
        version = self.rollout_buffer.version + AHEAD + 1
        samples = list(samples_of(step, version))
        if len(samples) > self._rows:
            raise InvalidArgumentError(
                f"step {step.step} has {len(samples)} rows, TRL's steps have {self._rows}: "
                "per_device_train_batch_size × gradient_accumulation_steps × processes must be "
                "groups_per_step × rollouts_per_group"
            )
        self._handed[step.step] = step
        for sample in samples + [_filler(version)] * (self._rows - len(samples)):
            self.rollout_buffer.put(sample)

    # -- the callback

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take note that a step was trained; end, on all processes, with the stream."""
        ends = self._stream is not None and self._note(state.global_step)
        if _of_main(ends=ends):
            control.should_training_stop = control.should_save = True

    def _note(self, step: int) -> bool:
        """Note that a step was trained; return whether it was the last one."""
        if step not in self._handed:
            raise InvalidArgumentError(
                f"TRL has trained step {step}, the stream handed out {sorted(self._handed)}: train "
                "from the checkpoint of the last commit"
            )
        self._trained = self._handed.pop(step)
        self._room.release()
        return step == self._last

    @override
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit what the checkpoint was trained on."""
        if self._stream is not None and self._trained is not None:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._stream.commit(self._trained, checkpoint)


def _of_main(*, ends: bool) -> bool:
    """Return whether the main process says so; every process calls it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ends
    flag = torch.tensor(int(ends), device=PartialState().device)
    torch.distributed.broadcast(flag, 0)
    return bool(flag)


def samples_of(step: TrainStep, version: int) -> Iterator[RolloutSample]:
    """Yield the rows of a step as TRL's worker makes them.

    Args:
        step: of a padded stream.
        version: that TRL shall take them to be made with.

    Raises:
        InvalidArgumentError: packed rows, advantages that differ from token to token, or no
            log-probabilities of the explorer.
    """
    for batch in step.microbatches:
        if "cu_seqlens" in batch:
            raise InvalidArgumentError("open the stream with layout='padded' for TRL")
        if "old_logprob" not in batch:
            raise InvalidArgumentError(
                f"step {step.step} has no log-probabilities of the explorer, which TRL trains with"
            )
        for row, length in enumerate(batch["attention_mask"].sum(-1).tolist()):
            mask = batch["action_mask"][row, :length]
            advantages = batch["advantages"][row, :length][mask]
            if len(advantages) and bool((advantages != advantages[0]).any()):
                raise InvalidArgumentError(
                    "TRL's asynchronous trainer takes one advantage of a rollout, and those of "
                    "this set differ from token to token: annotate with a strategy such as 'grpo'"
                )
            yield _row(
                batch["input_ids"][row, :length].numpy(),
                mask.numpy().astype(np.int64),
                batch["old_logprob"][row, :length].float().numpy(),
                advantage=float(advantages[0]) if len(advantages) else 0.0,
                model_version=version,
                group_id=step.step << 20 | int(batch["group_index"][row]),
            )


def _filler(version: int) -> RolloutSample:
    """Return a row whose one token changes nothing: TRL's loss needs one in every micro-batch."""
    ids, mask, logprobs = np.zeros(2, np.int64), np.array([0, 1]), np.zeros(2, np.float32)
    return _row(ids, mask, logprobs, advantage=0.0, model_version=version, group_id=-1)


def _row(ids: Any, mask: Any, logprobs: Any, **others: Any) -> RolloutSample:
    own = {"input_ids": ids, "completion_mask": mask, "old_log_probs": logprobs}
    return RolloutSample(prompt=[], completion=[], metrics={}, **own, **others)
