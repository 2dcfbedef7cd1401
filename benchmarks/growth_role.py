"""One process of the growth benchmark: it does its work and says in a line what that took.

python -m benchmarks.growth_role fill URL EXPERIENCES    # a run until it has so many
python -m benchmarks.growth_role explorer URL BATCHES    # the next batches of the run
python -m benchmarks.growth_role strategy URL BATCHES    # decides on them
python -m benchmarks.growth_role trainer URL BATCHES     # trains them; the last step stays leased
python -m benchmarks.growth_role reader URL REPETITIONS  # asks, each once before it counts

The line has the seconds of each operation, one by one, of the clock and of the processor, and the
most memory that was held once all was imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import torch

from benchmarks.asking import Names, answers, sizes_of
from benchmarks.measuring import frozen, peak_kb
from benchmarks.verify import EXPERIMENT, RUNS, TASKS, batches_done, fill, rollouts
from benchmarks.workload import ROWS_PER_STEP
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.pipeline.store import Experiment, open_store
from trinity_buffer.pipeline.train.stream import open_async_train_stream

BATCHES_PER_STEP = ROWS_PER_STEP // (TASKS * RUNS)
ASKED = ("show", "why", "groups", "groups --step", "steps", "blame", "stats")
WARM = 4
"""Batches that are explored, and a quarter of them trained, before it counts."""

Took = dict[str, list[tuple[float, float]]]


@contextmanager
def clock(took: Took, name: str, times: int = 1) -> Iterator[None]:
    """Append the seconds of the clock, and of the processor, to what an operation took.

    Args:
        times: how often it is done inside.
    """
    began, worked = time.perf_counter(), time.process_time()
    yield
    seconds = (time.perf_counter() - began, time.process_time() - worked)
    took[name].append((seconds[0] / times, seconds[1] / times))


@asynccontextmanager
async def opened(url: str, took: Took) -> AsyncIterator[Experiment]:
    """Open the store for the second time in this process, which imports nothing any more."""
    async with open_store(url) as store:
        await store.experiment(EXPERIMENT)
    async with AsyncExitStack() as stack:
        with clock(took, "open a store and its experiment"):
            store = await stack.enter_async_context(open_store(url))
            experiment = await store.experiment(EXPERIMENT)
        with frozen():
            yield experiment


async def explorer(url: str, number: int, took: Took) -> None:
    """Write the next batches of the run."""
    async with opened(url, took) as experiment:
        writer = experiment.writer(actor="e0")
        with clock(took, "an explorer's start"):
            first = await batches_done(writer)
        for batch in range(first, first + number):
            if batch == first + WARM:
                for name in ("plan a batch", "write 64", "seal a batch"):
                    took[name].clear()
            name, made = rollouts(batch)
            with clock(took, "plan a batch"):
                await writer.plan(name, list(range(TASKS)), RUNS)
            with clock(took, "write 64"):
                await writer.write(made)
            with clock(took, "seal a batch"):
                await writer.seal(name, len(made))


async def strategy(url: str, number: int, took: Took) -> None:
    """Decide on so many batches, which wait."""
    async with opened(url, took) as experiment:
        with clock(took, "decide, per experience", number * TASKS * RUNS):
            await run_strategy(experiment, "grpo")


async def trainer(url: str, number: int, took: Took) -> None:
    """Resume, make the steps of so many batches, and commit all but the last, which is leased."""
    options = {"strategy": "grpo", "groups_per_step": ROWS_PER_STEP // RUNS}
    async with opened(url, took) as experiment, AsyncExitStack() as stack:
        with clock(took, "resume a trainer, to its first step"):
            opening = open_async_train_stream(experiment, **options)
            stream = await stack.enter_async_context(opening)
            steps = [await anext(stream)]
        steps += [await anext(stream) for _ in range(WARM // BATCHES_PER_STEP)]
        more = number // BATCHES_PER_STEP - 1 - len(steps)
        with clock(took, "make a step of 256", more):
            steps += [await anext(stream) for _ in range(more)]
        for step in steps:
            with clock(took, "commit a step"):
                await stream.commit(step)
    del took["commit a step"][0]


async def reader(url: str, number: int, took: Took) -> None:
    """Ask each question, about rows and steps drawn by chance."""
    names = Names(*(await sizes_of(url))[1:], random.Random(0))
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment(EXPERIMENT)
        with frozen():
            for name in ASKED:
                _, question = answers(store, experiment, names)[name]
                for _ in range(number + 1):
                    with clock(took, name):
                        await question()
                del took[name][0]


async def filler(url: str, number: int, _took: Took) -> None:
    """Explore, annotate and train up to so many experiences."""
    await fill(url, number)


ROLES: dict[str, Callable[[str, int, Took], Awaitable[None]]] = {
    "fill": filler,
    "explorer": explorer,
    "strategy": strategy,
    "trainer": trainer,
    "reader": reader,
}


async def main(role: str, url: str, number: int) -> None:
    """Do the work of a role, and say what it took."""
    took: Took = defaultdict(list)
    await ROLES[role](url, number, took)
    print(json.dumps({"seconds": took, "largest_mb": peak_kb(os.getpid()) / 1024}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # importing took the most; that does not count
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
