"""What the first group of a fresh role still loads: prints it as JSON, for a test.

python -m tests.pipeline.first_group explorer|strategy|trainer URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy.sql.compiler import SQLCompiler

from tests.contract.making import group, kinds
from trinity_buffer.pipeline.annotating import strategy_consumer
from trinity_buffer.pipeline.annotating.rehearsal import rehearse_deciding
from trinity_buffer.pipeline.annotating.strategy_consumer import run_strategy
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.streaming.train_stream import TrainStream


class Compiled:
    """The statements that SQLAlchemy compiles from now on."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        usual: Any = SQLCompiler.__init__

        def noted(compiler: Any, *args: Any, **how: Any) -> None:
            usual(compiler, *args, **how)
            self.statements.append(str(compiler))

        pytest.MonkeyPatch().setattr(SQLCompiler, "__init__", noted)

    @contextmanager
    def watched(self, found: dict[str, list[str]]) -> Iterator[None]:
        """Note what is compiled and imported inside the context."""
        self.statements.clear()
        before = set(sys.modules)
        yield
        found["statements"] = list(self.statements)
        found["modules"] = sorted(set(sys.modules) - before)


async def main(role: str, url: str) -> None:
    """Let the role wait in an empty experiment, then write a group for it."""
    compiled, found = Compiled(), dict[str, list[str]]()
    async with open_store(url) as store, AsyncExitStack() as opened:
        experiment = await store.experiment("x", config={"rollouts_per_group": 4})
        writer = experiment.writer("e0")
        if role != "explorer":
            await following(experiment, opened)
        arrived: Callable[[], Coroutine[Any, Any, Any]] = partial(annotated, experiment)
        if role == "trainer":
            stream = await opened.enter_async_context(
                experiment.train_stream(strategy="grpo", groups_per_step=1, follow=True)
            )
            arrived = partial(trained, stream)
        assert await kinds(experiment)  # asked once, as it is asked for what arrives
        with compiled.watched(found):
            await writer.write(group(rewards=[0.0, 1.0, 1.0, 1.0]))
            if role != "explorer":
                await arrived()
        await experiment.finish("over")
    sys.stdout.write(json.dumps(found))


async def following(experiment: Experiment, opened: AsyncExitStack) -> None:
    """Start a strategy, which ends with ``opened``, and return once it has rehearsed."""
    rehearsed, loop = asyncio.Event(), asyncio.get_running_loop()

    def noted(dialect: str, families: tuple[str, ...]) -> None:
        rehearse_deciding(dialect, families)
        loop.call_soon_threadsafe(rehearsed.set)

    patch = opened.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(strategy_consumer, "rehearse_deciding", noted)
    task = asyncio.create_task(run_strategy(experiment, "grpo", follow=True))
    opened.push_async_callback(asyncio.wait, [task])
    await rehearsed.wait()


async def annotated(experiment: Experiment) -> None:
    """Return once the strategy has decided something."""
    async for event in experiment.events(follow=True):
        if event.kind == "ExperiencesAnnotated":
            return


async def trained(stream: TrainStream) -> None:
    """Commit the step that comes."""
    await stream.commit(await anext(stream))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
