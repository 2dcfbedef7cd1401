"""An event loop in a thread of its own, for synchronous code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

T = TypeVar("T")


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
