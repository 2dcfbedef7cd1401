"""Steps on their way from who makes them to who trains on them, in whatever threads they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import Empty, SimpleQueue

from trinity_buffer.pipeline.streaming.train_step import TrainStep


class StepQueue:
    """A queue of steps that asks for no more than ``ahead`` of what was received.

    Whoever puts or gets does so in its own thread; the event loop is woken only if somebody in it
    waits. Between two threads that is one wake-up a step instead of five.

    Args:
        ahead: how many steps are made before they are asked for.
    """

    def __init__(self, ahead: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._ahead = ahead
        self._steps: SimpleQueue[TrainStep | None] = SimpleQueue()
        self._num_put = self._num_asked = self._num_received = 0
        self._num_waiting = 0
        self._news = asyncio.Event()
        self._failure: Exception | None = None

    # -- who makes them
    # --------------------------------------------------------------------------------------------

    @property
    def num_put(self) -> int:
        """How many steps were handed over."""
        return self._num_put

    def has_room(self) -> bool:
        """Return whether another step may be made."""
        return self._num_put < self._num_asked + self._ahead

    def is_waited_for(self) -> bool:
        """Return whether somebody has asked for a step that is not made."""
        return self._num_asked > self._num_put

    async def room(self) -> None:
        """Return once another step may be made."""
        await self._until(self.has_room)

    def put(self, step: TrainStep) -> None:
        """Hand over the next step."""
        self._num_put += 1
        self._steps.put(step)
        self._tell()

    def fail(self, error: Exception) -> None:
        """Say why there will be no more: whoever asks for the next step is told so."""
        self._failure = error

    def end(self) -> None:
        """Say that there will be no more."""
        self._steps.put(None)
        self._tell()

    # -- who trains on them
    # --------------------------------------------------------------------------------------------

    def get(self) -> TrainStep | None:
        """Return the next step, or None at the end; until there is one, the thread waits.

        Raises:
            Exception: what `fail` was told.
        """
        self._ask()
        return self._received(self._steps.get())

    async def receive(self) -> TrainStep | None:
        """Return what `get` does, without holding up the event loop."""
        self._ask()
        await self._until(lambda: not self._steps.empty())
        return self._received(self._steps.get_nowait())

    def discard(self) -> None:
        """Let go of the steps that nobody asked for."""
        try:
            while True:
                self._steps.get_nowait()
        except Empty:
            self.end()

    def _ask(self) -> None:
        # Asked for again is what somebody was cancelled while waiting for.
        self._num_asked = self._num_received + 1
        self._tell()

    def _received(self, step: TrainStep | None) -> TrainStep | None:
        if step is None:
            self._steps.put(None)  # for a caller that asks again
            if self._failure is not None:
                raise self._failure from None
        else:
            self._num_received += 1
        return step

    # -- waiting
    # --------------------------------------------------------------------------------------------

    async def _until(self, done: Callable[[], bool]) -> None:
        # Who waits says so before it looks, and who changes something looks for waiters after it:
        # one of the two sees the other.
        self._num_waiting += 1
        try:
            while not done():
                await self._news.wait()
        finally:
            self._num_waiting -= 1

    def _tell(self) -> None:
        if self._num_waiting:
            self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
