"""The train stream for a synchronous loop; its event loop runs in a thread."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError, UnknownExperimentError
from trinity_buffer.pipeline.store import Experiment, open_store
from trinity_buffer.pipeline.train.options import Resume, StreamOptions, takes
from trinity_buffer.pipeline.train.step import Commit, CommitDoor, StepMeasures, TrainStep
from trinity_buffer.pipeline.train.stream import TrainStream
from trinity_buffer.pipeline.write.planning import Admission
from trinity_buffer.store import writer_queries
from trinity_buffer.store.url import StoreURL

T = TypeVar("T")


class SyncTrainStream(CommitDoor[None]):
    """An open stream; iterate over it. Made by `open_train_stream`.

    Attributes:
        resume: the last commit (`Resume`), or None at the very beginning.
        options: the options it was opened with.
        device: device of the tensors of its steps.
        config: the configuration of the experiment.
    """

    def __init__(self, portal: BlockingPortal, stream: TrainStream, experiment: Experiment) -> None:
        self._portal = portal
        self._experiment = experiment
        self._stream = stream
        self.resume: Resume | None = stream.resume
        self.options = stream.options
        self.device = stream.options.device
        self.config: Mapping[str, Any] = experiment.config

    def _call(self, f: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Return ``await f(*args)``, run in the stream's event loop.

        Raises:
            StoreUseError: the stream is closed, or this is a forked child.
        """
        self._experiment.database.owner.require_process()
        return self._portal.call(f, *args)

    def __iter__(self) -> Iterator[TrainStep]:
        return self

    def __next__(self) -> TrainStep:
        self._experiment.database.owner.require_process(closed_too=True)
        if (step := self._stream.queue.get()) is None:
            raise StopIteration
        self._stream.note_delivered(step)
        return step

    @property
    def incomplete_groups(self) -> int:
        """Number of groups that were left incomplete when the stream ended."""
        return self._stream.incomplete_groups

    @override
    def record(self, step: TrainStep, request: Commit) -> None:
        """Carry out a `commit`."""
        self._call(self._stream.record, step, request)

    def fail(self, error: Exception) -> None:
        """Raise ``error``, from elsewhere, in the current or next wait for a step."""
        self._stream.fail(error)

    def measure(self, measures: StepMeasures) -> None:
        """Keep what was measured of a step that was delivered: its commit records that."""
        self._stream.measure(measures)

    def require_commits(self, every_steps: int, what: str) -> None:
        """Raise if explorers and a trainer that commits every ``every_steps`` steps would deadlock.

        Args:
            every_steps: steps between commits.
            what: the option that sets it, for the message.

        Raises:
            InvalidArgumentError: explorers would wait for a commit, and the commit for them.
        """
        rules = Admission.of(self._experiment.config)
        if self.options.follow and self.options.consumer == rules.trainer:
            rules.require_commits(every_steps, what)

    def columns(self) -> frozenset[str] | None:
        """Return the fields of the first stored experience, or None if there is none yet."""
        return self._call(self._experiment.columns)

    def scoring(self) -> str | None:
        """Return the scoring whose rewards its set was computed from; None: the recorded ones."""
        key, name = self._experiment.key, self.options.annotation_set
        row = self._call(self._experiment.database.read, writer_queries.consumer_row, key, name)
        return None if row is None else row.config.get("rewards")

    def uids(self, step: TrainStep, rows: Sequence[int]) -> list[str]:
        """Return the uids of rows of a step, by their places in its manifest."""
        return self._call(self._stream.uids, step, rows)

    def leads(self) -> bool:
        """Return whether this is rank 0 and still holds the lease, by the current store."""
        return self._call(self._stream.leads)

    def finish(self, reason: str) -> None:
        """Record that the experiment is finished: explorers and strategies that follow it end."""
        self._call(partial(self._experiment.finish, reason, actor=self.options.consumer))


@asynccontextmanager
async def _opened(
    url: StoreURL, *, experiment: str | None = None, **options: Any
) -> AsyncIterator[tuple[TrainStream, Experiment]]:
    async with open_store(url, create=False) as store:
        if experiment is None:
            held = ", ".join(await store.experiments()) or "none"
            raise InvalidArgumentError(
                f"a train stream needs experiment=, its name: {store.url} holds {held}"
            )
        try:
            handle = await store.experiment(experiment)
        except UnknownExperimentError as error:
            error.add_note("start the explorer first, or wait until it has written")
            raise
        async with handle.train_stream(**options) as stream:
            yield stream, handle


@dataclass(frozen=True, kw_only=True)
class _StreamOfExperiment(StreamOptions):
    """The keywords of `open_train_stream`."""

    experiment: str


@takes(_StreamOfExperiment)
@contextmanager
def open_train_stream(url: StoreURL, **options: Any) -> Iterator[SyncTrainStream]:
    """Open the stream of gradient steps of an ``experiment`` in a store; see `StreamOptions`.

    Closing it releases the lease. Steps that were delivered but not committed are served again to
    the next process.

    Raises:
        UnknownStoreError: no store at ``url``; it is not created.
        UnknownExperimentError: it holds no experiment of this name.
    """
    with in_portal(_opened(url, **options)) as (portal, (stream, handle)):
        try:
            yield SyncTrainStream(portal, stream, handle)
        except BaseException:
            stream.failed = True
            raise


@contextmanager
def in_portal(opened: AbstractAsyncContextManager[T]) -> Iterator[tuple[BlockingPortal, T]]:
    """Open ``opened`` in an event loop of its own; close both on leaving.

    Ctrl-C closes them as well, and is raised bare instead of in an exception group of the portal. A
    forked child leaves both to its parent, and a process that ends has no thread to close them in.
    """
    pid = os.getpid()
    loop = LoopThread()
    stack = ExitStack()
    stack.callback(loop.close)
    try:
        yield loop.portal, stack.enter_context(loop.portal.wrap_async_context_manager(opened))
    finally:
        if os.getpid() == pid and not sys.is_finalizing():
            stack.close()


class LoopThread:
    """An event loop that runs in a thread, until it is closed or the process ends.

    Not `anyio.from_thread.start_blocking_portal`: in a forked child, its remains wait for a thread
    that does not exist there when they are collected; and a process that never closes it hangs at
    exit.

    Attributes:
        portal: calls the loop from other threads.
    """

    def __init__(self) -> None:
        self._ready: Future[BlockingPortal] = Future()
        self._thread = Thread(target=anyio.run, args=(self._run,), daemon=True)
        self._thread.start()
        self.portal = self._ready.result()

    async def _run(self) -> None:
        async with BlockingPortal() as portal:
            self._ready.set_result(portal)
            await portal.sleep_until_stopped()

    def close(self) -> None:
        """End the loop and cancel its tasks."""
        self.portal.call(self.portal.stop, True)  # noqa: FBT003 - only positional
        self._thread.join()
