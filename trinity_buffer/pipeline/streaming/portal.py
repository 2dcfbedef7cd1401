"""Steps for synchronous code, out of an event loop that runs in a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from trinity_buffer.pipeline.streaming.stream_options import TrainStep

T = TypeVar("T")


class PortalSteps:
    """Iterates over steps that are made in the event loop behind ``portal``."""

    def __init__(self, portal: BlockingPortal, steps: AsyncIterator[TrainStep]) -> None:
        self._portal = portal
        self._steps = steps

    def __iter__(self) -> Iterator[TrainStep]:
        return self

    def __next__(self) -> TrainStep:
        step: TrainStep | None = self._portal.call(self._receive)
        if step is None:
            raise StopIteration
        return step

    async def _receive(self) -> TrainStep | None:
        # StopAsyncIteration cannot pass through a portal.
        return await anext(self._steps, None)


@contextmanager
def in_portal(opened: AbstractAsyncContextManager[T]) -> Iterator[tuple[BlockingPortal, T]]:
    """Open ``opened`` in an event loop of its own; close both on leaving.

    Ctrl-C too closes them as usual, and comes out as it is and not in a group of the portal's.
    """
    failure: BaseException | None = None
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(opened) as stream,
    ):
        try:
            yield portal, stream
        except BaseException as error:  # noqa: BLE001 - re-raised below
            failure = error
    if failure is not None:
        raise failure
