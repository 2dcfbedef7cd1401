"""What runs beside the event loop: tasks that end with a body."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

T = TypeVar("T")


@cache
def settle_imports() -> None:
    """Collect garbage now, once in a process, before it waits for work.

    The first full collection walks all that was imported, with torch for 0.1 to 0.3 s. It would
    come by itself in the midst of work, after some tens of calls; the next comes when a quarter as
    much was added.
    """
    gc.collect()


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Open a group of tasks whose first error comes out as it is, not inside an exception group.

    Callers catch errors by name. An error, of the body or of a task, cancels the others.
    """
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            try:
                yield group
            except Exception as error:  # noqa: BLE001 - re-raised below, bare of the group
                failure = error
                group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:  # KeyboardInterrupt comes out as it is, too
        failure = failure or _first_of(errors)
    if failure is not None:
        raise failure


@asynccontextmanager
async def running(*tasks: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run ``tasks`` while the body runs; cancel them when it ends, and it when one of them fails.

    An error comes out as `task_group` says.
    """
    async with task_group() as group:
        for task in tasks:
            group.start_soon(task)
        yield
        group.cancel_scope.cancel()


@asynccontextmanager
async def made_ahead(
    make: Callable[[], Coroutine[Any, Any, T | None]],
) -> AsyncIterator[AsyncIterator[T]]:
    """Yield what ``make`` returns until it returns None: one is made while another is worked on.

    What ``make`` raises comes out at the end of the body, after all that was made before.
    """
    send, receive = anyio.create_memory_object_stream[T](0)
    failure: list[Exception] = []

    async def run() -> None:
        async with send:
            try:
                while (made := await make()) is not None:
                    await send.send(made)
            except Exception as error:  # noqa: BLE001 - re-raised below
                failure.append(error)

    async with running(run):
        with receive:
            yield receive
        if failure:
            raise failure[0]


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group; what else went wrong is most often its consequence."""
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
