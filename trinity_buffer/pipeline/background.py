"""Background tasks that end with the body of a context, and a generator that works ahead."""

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
    """Collect garbage once, before the process waits for work.

    The first full collection walks everything imported, with torch for 0.1 to 0.3 s. Left alone, it
    would happen in the middle of work, after some tens of calls; the next one comes only after the
    number of objects has grown by a quarter.
    """
    gc.collect()


@asynccontextmanager
async def task_group(*tasks: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[TaskGroup]:
    """Run ``tasks`` during the body; its end cancels them.

    Without tasks, the end of the body waits for what it has started in the group. An error, of the
    body or of a task, cancels the others. The first error is raised bare, not inside an exception
    group: callers catch errors by type.
    """
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            for task in tasks:
                group.start_soon(task)
            try:
                yield group
            except Exception as error:  # noqa: BLE001 - re-raised below, bare of the group
                failure = error
            if tasks or failure is not None:
                group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:  # KeyboardInterrupt included
        failure = failure or errors
        # The other errors of a group are most often consequences of its first.
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
    if failure is not None:
        raise failure


@asynccontextmanager
async def made_ahead(
    make: Callable[[], Coroutine[Any, Any, T | None]],
) -> AsyncIterator[AsyncIterator[T]]:
    """Yield results of ``make`` until None; the next one is made while the caller uses the last.

    An error of ``make`` is raised after all earlier results were yielded.
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

    async with task_group(run):
        with receive:
            yield receive
        if failure:
            raise failure[0]
