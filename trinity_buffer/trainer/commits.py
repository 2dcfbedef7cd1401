"""How a trainer commits: at once, or by a thread that writes the checkpoint beside the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from trinity_buffer.crash_points import reached
from trinity_buffer.pipeline.history.replay import ReplayStream
from trinity_buffer.pipeline.streaming.train_step import TrainStep
from trinity_buffer.pipeline.sync_stream import SyncTrainStream
from trinity_buffer.trainer.checkpoint_folder import TrainerState, remove_old
from trinity_buffer.trainer.host_copies import HostCopies
from trinity_buffer.trainer.parallel import OneProcess, Processes, processes_of_writers
from trinity_buffer.trainer.policy import Policy
from trinity_buffer.trainer.random_numbers import random_state
from trinity_buffer.trainer.settings import TrainerSettings
from trinity_buffer.trainer.shared_checkpoint import Begun, begin, end, is_shared


class Committed(NamedTuple):
    """What is committed beside the checkpoint.

    Attributes:
        metrics: of the step.
        environment: in which the steps were computed.
        skipped: steps that the weights did not go through -> uids of the rows to look at.
    """

    step: TrainStep
    metrics: Mapping[str, float]
    environment: Mapping[str, Any]
    skipped: Mapping[int, Sequence[str]]


def is_beside(settings: TrainerSettings, policy: Policy) -> bool:
    """Return whether checkpoints of ``policy`` are written beside the training."""
    if settings.async_checkpoints is not None:
        return settings.async_checkpoints
    # Of another policy a copy is made where it is, which may be more than a GPU has room for.
    in_parts = hasattr(policy, "held")
    return in_parts and any(weight.device.type == "cuda" for weight in policy.parameters())


class Commits:
    """Writes the checkpoints of a trainer and commits them, one after the other.

    Args:
        stream: of the trainer.
        settings: of the trainer.
        processes: its ranks; each calls everything here, in the same order.
        policy: what is trained.
    """

    def __init__(
        self,
        stream: SyncTrainStream | ReplayStream,
        settings: TrainerSettings,
        processes: Processes,
        policy: Policy,
    ) -> None:
        self._stream = stream
        self._settings = settings
        self._processes = processes
        self._shared = is_shared(policy)
        self._file_name = policy.file_name
        self._beside = is_beside(settings, policy)
        self._copies = HostCopies(copied=self._beside)
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._writers: Processes = OneProcess()
        if self._shared:  # in a group of their own: the training goes on in the other
            self._writers = processes_of_writers()

    def commit(self, what: Committed, state: TrainerState[Any]) -> bool:
        """Commit a step, whose weights ``state`` has; return whether that is done.

        Raises:
            CheckpointError, NonFiniteError: it cannot be written, or the one before could not.
            LeaseLostError: another process took over.
        """
        self.finish()
        state = replace(state, random=self._processes.gather(random_state(self._stream.device)))
        if self._processes.rank and not self._shared:
            self._stream.commit(what.step)  # rank 0 writes for all
            return not self._beside
        reached("before-checkpoint")
        begun = begin(self._settings.checkpoints, state, self._writers, self._copies)
        if self._beside:
            self._copies.hold()  # whatever is computed next, a callback's work too
            self._begin(partial(self._write, begun, what))
            return False
        self._write(begun, what)
        return True

    def look(self) -> None:
        """Raise what went wrong beside the training; it is waited for by nobody."""
        if self._last is not None and self._last.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last step is committed that was to be.

        Raises:
            CheckpointError, LeaseLostError: it was not.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait until what is being written is committed, end the thread, give back memory."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._copies.close()

    def _begin(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        try:
            self._last = self._thread.submit(work)
        except RuntimeError:  # the main thread has ended while we train, and with it all of these
            work()
            return
        self._last.add_done_callback(self._tell)

    def _tell(self, done: Future[None]) -> None:
        """End a wait for the next step, which may be for what this commit would have published."""
        error = done.exception()
        if isinstance(error, Exception):
            self._stream.fail(error)

    def _write(self, begun: Begun, what: Committed) -> None:
        saved = end(begun, begun.write)
        reached("after-checkpoint")
        if self._processes.rank:
            self._stream.commit(what.step)
            return
        self._stream.commit(
            what.step,
            checkpoint=saved.folder,
            policy=saved.folder / self._file_name,
            environment=what.environment,
            metrics=what.metrics,
            skipped=what.skipped,
            digests=saved.digests,
        )
        keep = self._settings.keep_checkpoints
        # Whoever took over may have gone back, and go on from what would be removed here.
        if keep is not None and self._stream.leads():
            remove_old(self._settings.checkpoints, keep=keep, committed=saved.folder)
