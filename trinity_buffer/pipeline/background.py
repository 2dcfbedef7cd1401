"""A task that runs beside a body, and ends with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio


@asynccontextmanager
async def running(*tasks: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run ``tasks`` while the body runs; cancel them when it ends.

    An error of the body comes out as it is, not inside an exception group: callers catch errors by
    name.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(task)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - re-raised below, bare of the group
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
