"""What do the chain of the log and the digests of segments cost? With and without, in turns.

python -m benchmarks.chain --repetitions 9   # a line for a write of 64, a decision and a step

Without them, the functions that compute them give a constant at once; all else is the same. What
is compared is processor time, of all threads; `ratio` is the median over neighbouring pairs, and
`share` that of the time that is spent inside these functions, which noise does not reach.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import interleaved
from benchmarks.provenance import provenance
from benchmarks.workload import BATCH, ROWS_PER_STEP, RUNS, TASKS, calls, experiences
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.annotate import deciding
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.sync_stream import open_train_stream
from trinity_buffer.store import log

EXPERIMENT = "bench"
PER_CALL = 64
HEADS = (log, "head_of", bytes(32))
DIGESTS = (deciding, "content_digest", bytes(16))
NAMES = count()


@contextmanager
def without(module: object, name: str, constant: bytes) -> Iterator[None]:
    """Have a function of ``module`` give ``constant``."""
    original = getattr(module, name)
    setattr(module, name, lambda *_: constant)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def timed(module: Any, name: str, _: bytes) -> Iterator[list[float]]:
    """Have a function of ``module`` append how many seconds each of its calls took."""
    original, seconds = getattr(module, name), list[float]()

    def call(*given: object) -> Any:
        began = time.thread_time()
        result = original(*given)
        seconds.append(time.thread_time() - began)
        return result

    setattr(module, name, call)
    try:
        yield seconds
    finally:
        setattr(module, name, original)


def new_url(folder: Path) -> str:
    """Return the URL of a store that is not there yet."""
    return f"sqlite:///{folder / str(next(NAMES))}.db"


async def write(url: str, given: Sequence[Sequence[Experience]]) -> float:
    """Write to a new store; return the processor seconds of it."""
    async with open_store(url) as store:
        experiment = await store.experiment(EXPERIMENT, config={"rollouts_per_group": RUNS})
        writer = experiment.writer(actor="explorer-0")
        tasks = list(dict.fromkeys(e.eid.task for some in given for e in some))
        await writer.plan(BATCH, tasks, RUNS)
        began = time.process_time()
        for some in given:
            await writer.write(some)
        return time.process_time() - began


async def decide(url: str) -> float:
    """Let GRPO decide on all, under a new name; return the processor seconds of it."""
    async with open_store(url) as store:
        experiment = await store.experiment(EXPERIMENT)
        began = time.process_time()
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6}, name=f"grpo-{next(NAMES)}")
        return time.process_time() - began


def step(url: str, strategy: str) -> float:
    """Take and commit all steps as a new trainer; return the processor seconds of it."""
    with open_train_stream(
        url,
        experiment=EXPERIMENT,
        strategy=strategy,
        consumer=f"trainer-{next(NAMES)}",
        groups_per_step=ROWS_PER_STEP // RUNS,
    ) as stream:
        began = time.process_time()
        for one in stream:
            list(one.microbatches)
            stream.commit(one)
        return time.process_time() - began


def cost(
    what: str, of: tuple[Any, str, bytes], work: Callable[[], float], repetitions: int
) -> dict[str, object]:
    """Return the line of one comparison."""

    def bare() -> float:
        with without(*of):
            return work()

    ours, limit = interleaved(work, bare, repetitions)
    with timed(*of) as inside:
        whole = work()
    ratios = sorted(a / b for a, b in zip(ours, limit, strict=True))
    return {
        "what": what,
        "without": of[1],
        "cpu_s": round(statistics.median(ours), 4),
        "share": round(sum(inside) / whole, 4),
        "calls": len(inside),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(ratios[0], 4),
        "ratio_high": round(ratios[-1], 4),
        "repetitions": repetitions,
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--tasks", type=int, default=TASKS, help="groups of 8 runs each")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    origin = provenance(f"python -m benchmarks.chain --repetitions {asked.repetitions}", None)
    given = calls(experiences(asked.tasks), PER_CALL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = new_url(folder)
        asyncio.run(write(url, given))
        asyncio.run(_annotate(url))
        for what, of, work in (
            ("write of 64", HEADS, lambda: asyncio.run(write(new_url(folder), given))),
            ("decision", HEADS, lambda: asyncio.run(decide(url))),
            ("decision", DIGESTS, lambda: asyncio.run(decide(url))),
            ("step of 256 and its commit", HEADS, partial(step, url, "grpo")),
        ):
            row = cost(what, of, work, asked.repetitions)
            print(json.dumps({**row, **origin}), flush=True)


async def _annotate(url: str) -> None:
    async with open_store(url) as store:
        await run_strategy(await store.experiment(EXPERIMENT), "grpo", {"epsilon": 1e-6})


if __name__ == "__main__":
    main()
