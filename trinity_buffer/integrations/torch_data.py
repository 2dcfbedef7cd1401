"""The stream of gradient steps as a `torch.utils.data` dataset, with or without a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Thread
from typing import Any

import torch.multiprocessing as mp
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError, StoreError, TrinityBufferError
from trinity_buffer.pipeline.streaming.train_step import TrainStep
from trinity_buffer.pipeline.sync_stream import SyncTrainStream, open_train_stream

COMMIT_S = 60.0
"""A worker that has not committed by then is gone."""


class StepDataset(IterableDataset[TrainStep]):
    """Gradient steps of a trainer, each once: ``DataLoader(StepDataset(...), batch_size=None)``.

    The store is opened where the steps are made: in this process, or in the one worker that serves
    them (the others of ``num_workers`` have nothing to do). Commits go there too. A step that was
    handed out and not committed comes again after a restart, whatever the loader had prefetched.

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
        self._committed: int | None = None
        self._go_on_after: int | None = None
        self._asking, self._asked = mp.Pipe()

    @override
    def __iter__(self) -> Iterator[TrainStep]:
        """Yield the steps after the last commit.

        Raises:
            TrinityBufferError: as `open_train_stream` does.
        """
        worker = get_worker_info()
        if worker is not None:
            if worker.id == 0:
                yield from self._in_worker()
            return
        with self._open() as self._here:
            try:
                yield from self._here
            finally:
                self._here = None

    def _open(self) -> AbstractContextManager[SyncTrainStream]:
        options = dict(self._options)
        if self._go_on_after is not None:
            options["resume_from"] = self._go_on_after
        return open_train_stream(self._url, experiment=self._experiment, **options)

    def _in_worker(self) -> Iterator[TrainStep]:
        """Yield the steps; the stream stays open for commits until the worker's process ends."""
        stack = ExitStack()
        stream = stack.enter_context(self._open())
        Finalize(None, stack.close, exitpriority=10)
        handed: dict[int, TrainStep] = {}
        Thread(target=_commit, args=(stream, handed, self._asked), daemon=True).start()
        for step in stream:
            handed[step.step] = step
            yield step

    def commit(self, step: TrainStep, checkpoint: str | Path | None = None) -> None:
        """Record that every step up to ``step`` is in ``checkpoint``; see `TrainStream.commit`.

        Raises:
            StoreError: nobody iterates over the dataset, or its worker could not commit.
        """
        if self._here is not None:
            self._here.commit(step, checkpoint)
        else:
            self._ask(step, checkpoint)
        self._committed = step.step
        self._go_on_after = None  # a pass that begins now supersedes nothing

    def _ask(self, step: TrainStep, checkpoint: str | Path | None) -> None:
        self._asking.send((step.step, None if checkpoint is None else str(checkpoint)))
        if not self._asking.poll(COMMIT_S):
            raise StoreError(
                f"commit of step {step.step}: no worker answered within {COMMIT_S:g} s; commit "
                "while the loader is being read"
            )
        failure = self._asking.recv()
        if failure is not None:
            raise StoreError(f"commit of step {step.step}: {failure}")

    def state_dict(self) -> dict[str, int | None]:
        """Return the last committed step: ``{"step": 12}``, None before the first."""
        return {"step": self._committed}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on after the step that `state_dict` told; commits that are there now are superseded.

        Raises:
            InvalidArgumentError: what is given is no such state.
        """
        if set(state) != {"step"}:
            raise InvalidArgumentError(f"state {state!r}: expected what state_dict() returned")
        self._committed = self._go_on_after = state["step"]


def _commit(stream: SyncTrainStream, handed: dict[int, TrainStep], asked: Connection) -> None:
    """Commit what the trainer's process asks for, and tell it when that is done."""
    while True:
        number, checkpoint = asked.recv()
        try:
            stream.commit(handed[number], checkpoint)
        except TrinityBufferError as error:
            asked.send(str(error))
        else:
            for done in [step for step in handed if step <= number]:
                del handed[done]
            asked.send(None)
