"""The stream of gradient steps as a `torch.utils.data` dataset, with or without a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import Any

import torch.multiprocessing as mp
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError, StoreError, TrinityBufferError
from trinity_buffer.pipeline.sync_stream import SyncTrainStream, open_train_stream
from trinity_buffer.pipeline.train.step import PolicyPath, TrainStep, environment_of_run

NOWHERE = -1
"""A pass goes on after the last commit."""

COMMIT_S = 60.0
"""A worker that has not committed by then is gone."""

NO_REQUEST = 0
"""No request is waited for; requests are numbered from 1."""


class StepDataset(IterableDataset[TrainStep]):
    """Gradient steps of a trainer, each once: ``DataLoader(StepDataset(...), batch_size=None)``.

    The store is opened where the steps are made: in this process, or in the one worker that serves
    them (the others of ``num_workers`` have nothing to do). Commits go there too. A step that was
    handed out and not committed comes again after a restart, or in the next pass, whatever the
    loader had prefetched; so does it with ``persistent_workers=True``.

    Args:
        url: of the store.
        experiment: its name.
        options: of the stream; see `StreamOptions`.
    """

    def __init__(self, url: str, *, experiment: str, **options: Any) -> None:
        self._url = url
        self._experiment = experiment
        self._options = options
        self._here: SyncTrainStream | None = None
        self._pass = ExitStack()  # what is open here
        # Without locks: a worker that is killed could hold one for good, and one that is spawned
        # cannot be given those of a process that forks.
        self._go_on_after = mp.Value("q", NOWHERE, lock=False)  # a worker that stays reads it again
        self._committed = mp.Value("q", NOWHERE, lock=False)
        self._waited_for = mp.Value("q", NO_REQUEST, lock=False)
        self._asking, self._asked = mp.Pipe()
        self._last_request = NO_REQUEST
        self._worker: _Worker | None = None

    @override
    def __iter__(self) -> Iterator[TrainStep]:
        """Yield the steps after the last commit.

        Raises:
            TrinityBufferError: as `open_train_stream` does.
        """
        worker = get_worker_info()
        if worker is not None:
            # One worker serves all steps: each is handed out once, in order.
            if worker.id == 0:
                self._worker = self._worker or _Worker(self._asked, self._waited_for)
                yield from self._worker.steps(self._open())
            return
        # Of a loop that an error has left, such as in a notebook, the stream is still open.
        self._pass.close()
        with ExitStack() as self._pass:
            self._here = stream = self._pass.enter_context(self._open())
            try:
                yield from stream
            finally:
                if self._here is stream:
                    self._here = None

    @contextmanager
    def _open(self) -> Iterator[SyncTrainStream]:
        options = dict(self._options)
        if self._go_on_after.value != NOWHERE:
            options["resume_from"] = self._go_on_after.value
        with open_train_stream(self._url, experiment=self._experiment, **options) as stream:
            self._committed.value = 0 if stream.resume is None else stream.resume.step
            yield stream

    def commit(
        self, step: TrainStep, checkpoint: str | Path | None = None, policy: PolicyPath = None
    ) -> None:
        """Record that every step up to ``step`` is in ``checkpoint``; see `TrainStream.commit`.

        The checkpoint is published to explorers, unless ``policy`` is another path or False.

        Raises:
            StoreError: the dataset is not being iterated over, or its worker could not commit, or
                did not answer in time: then commit the same again, a no-op if it was done.
        """
        if self._here is not None:
            self._here.commit(step, checkpoint, policy)
        else:
            self._ask(step, checkpoint, policy)
        self._committed.value = max(self._committed.value, step.step)
        self._go_on_after.value = NOWHERE  # a pass that begins now supersedes nothing

    def _ask(self, step: TrainStep, checkpoint: str | Path | None, policy: PolicyPath) -> None:
        self._last_request += 1
        request = self._waited_for.value = self._last_request
        # Of this process, which trains; the worker's are others.
        environment = environment_of_run(self._options.get("device", "cpu"))
        self._asking.send((request, step.step, (checkpoint, policy, environment)))
        end, failure = monotonic() + COMMIT_S, None
        try:
            while self._asking.poll(max(end - monotonic(), 0.0)):
                answered, failure = self._asking.recv()
                if answered == request:  # else it is the answer to an earlier one
                    break
            else:
                raise StoreError(
                    f"commit of step {step.step}: no worker answered within {COMMIT_S:g} s; commit "
                    "while the loader is being read (behind its loop, too, with one worker and "
                    "persistent_workers=True), and the same step again if it is"
                )
        finally:
            self._waited_for.value = NO_REQUEST
        if failure is not None:
            raise StoreError(f"commit of step {step.step}: {failure}")

    def state_dict(self) -> dict[str, int | None]:
        """Return the last committed step: ``{"step": 12}``, None before a pass has begun."""
        step = self._committed.value
        return {"step": None if step == NOWHERE else step}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on after the step that `state_dict` told; commits that are there now are superseded.

        Raises:
            InvalidArgumentError: what is given is no such state.
        """
        if set(state) != {"step"}:
            raise InvalidArgumentError(f"state {state!r}: expected what state_dict() returned")
        # Read by the worker when its next pass begins.
        step = NOWHERE if state["step"] is None else state["step"]
        self._go_on_after.value = self._committed.value = step


class _Worker:
    """Serves the steps of one pass after another in a worker, and commits what it is asked to.

    A stream stays open for commits until the next pass begins, or the worker's process ends.
    """

    def __init__(self, asked: Connection, waited_for: Any) -> None:
        self._asked = asked
        self._waited_for = waited_for
        self._lock = Lock()
        self._open = ExitStack()
        self._stream: SyncTrainStream | None = None
        self._handed: dict[int, TrainStep] = {}
        self._committed = 0
        Finalize(None, self._open.close, exitpriority=10)
        Thread(target=self._commit_all, daemon=True).start()

    def steps(self, opened: AbstractContextManager[SyncTrainStream]) -> Iterator[TrainStep]:
        """Yield the steps of a stream that is opened here; the one before is over."""
        with self._lock:
            self._open.close()
            self._handed = {}
            self._stream = stream = self._open.enter_context(opened)
            self._committed = 0 if stream.resume is None else stream.resume.step
        for step in stream:
            # Its tensors would keep a file of shared memory each, of which a process has 1024.
            self._handed[step.step] = replace(step, microbatches=[])
            yield step

    def _commit_all(self) -> None:
        while True:
            request, number, what = self._asked.recv()
            with self._lock:
                # A request that came too late, or to a worker that is gone, is not for this one.
                if request != self._waited_for.value:
                    continue
                failure = self._commit(number, what)
            self._asked.send((request, failure))

    def _commit(self, number: int, what: tuple[Any, ...]) -> str | None:
        """Commit a step and ``what`` was named with it; return why that failed."""
        step = self._handed.get(max(number, self._committed))
        if self._stream is None or step is None:
            if number <= self._committed:  # by an earlier pass
                return None
            return "it was handed out by an earlier pass; this one hands it out again"
        try:
            # Of a step that is committed the stream knows with what.
            self._stream.commit(replace(step, step=number), *what)
        except TrinityBufferError as error:
            return str(error)
        self._committed = max(number, self._committed)
        for done in [handed for handed in tuple(self._handed) if handed < self._committed]:
            del self._handed[done]
        return None
