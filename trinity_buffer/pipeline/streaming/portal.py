"""An event loop in a thread of its own, for synchronous code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from threading import Thread
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal

T = TypeVar("T")


@contextmanager
def in_portal(opened: AbstractAsyncContextManager[T]) -> Iterator[tuple[BlockingPortal, T]]:
    """Open ``opened`` in an event loop of its own; close both on leaving.

    Ctrl-C too closes them as usual, and comes out as it is and not in a group of the portal's. A
    child that was forked meanwhile leaves both to its parent.
    """
    pid = os.getpid()
    loop = _Loop()
    try:
        entered = loop.portal.wrap_async_context_manager(opened)
        stream = entered.__enter__()
        try:
            yield loop.portal, stream
        finally:
            if os.getpid() == pid:
                entered.__exit__(None, None, None)
    finally:
        if os.getpid() == pid:
            loop.close()


class _Loop:
    """An event loop that runs in a thread, until it is closed.

    Not `anyio.from_thread.start_blocking_portal`: what is left of that in a forked child, which has
    no such thread, waits for the thread when it is collected.
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
        self.portal.call(self.portal.stop, True)  # noqa: FBT003 - only positional
        self._thread.join()
