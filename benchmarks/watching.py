"""How much slower a trainer is while somebody watches it: a line with the ratio of the two.

python -m benchmarks.watching                     # 100,000 experiences; again: goes on, or watches
python -m benchmarks.watching --store postgresql
python -m benchmarks.watching --record            # kept in docs/proofs/performance.jsonl

A trainer takes steps of 128 rows off a stream, computes for some 50 ms on one core, and commits. In
turns nobody watches it, and `trinity-buffer serve` does, with one page open that follows the run as
a browser does: an event stream, and after news the page again, at most every two seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import torch

from benchmarks.asking import filled
from benchmarks.performance import RECORD, record
from benchmarks.provenance import provenance
from benchmarks.verify import EXPERIMENT, GROUPS_PER_STEP, STORE
from trinity_buffer.pipeline.store import Experiment, open_store

COMPUTE_S = 0.05
PAUSE_S = 2.0
"""As in ``web/static/inspector.js``."""


class Work:
    """What a step computes: as many products of matrices as take `COMPUTE_S` on a quiet core."""

    def __init__(self) -> None:
        self._matrix = torch.rand(512, 512)
        began, count = time.perf_counter(), 20
        self(count)
        self.products = max(1, round(COMPUTE_S * count / (time.perf_counter() - began)))

    def __call__(self, count: int) -> None:
        """Compute ``count`` products."""
        found = self._matrix
        for _ in range(count):
            found = (found @ self._matrix) / 512


async def train(stream: Any, work: Work, steps: int) -> float:
    """Return the seconds that ``steps`` steps took."""
    began = time.perf_counter()
    for _ in range(steps):
        step = await anext(stream)
        for _microbatch in step.microbatches:
            pass
        work(work.products)
        await stream.commit(step)
    return time.perf_counter() - began


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[list[int]]:
    """Serve the store to one page that follows it; yield the sizes of the pages that it got."""
    command = (sys.executable, "-m", "trinity_buffer", "serve", "--port", "0", "--store", url)
    pages: list[int] = []
    async with await anyio.open_process(command, stderr=None) as server:
        try:
            assert server.stdout is not None  # a pipe
            base = (await server.stdout.receive()).decode().rpartition(": ")[2].strip()
            page = f"{base.rstrip('/')}/{EXPERIMENT}/"
            async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
                following = asyncio.create_task(_follow(client, page, pages))
                try:
                    while not pages:  # noqa: ASYNC110 - the first page is there before it counts
                        await anyio.sleep(0.01)
                    yield pages
                finally:
                    following.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await following
        finally:
            server.terminate()


async def _follow(client: httpx2.AsyncClient, page: str, pages: list[int]) -> None:
    """Ask for the page after news, as its script does."""
    shown = (await client.get(page)).text
    (live,) = re.findall(r'data-live="([^"]+)"', shown)
    pages.append(len(shown))
    renewed = time.monotonic()
    async with client.stream("GET", live) as news:
        async for line in news.aiter_lines():
            if line.startswith("data") and time.monotonic() - renewed > PAUSE_S:
                pages.append(len((await client.get(page)).text))
                renewed = time.monotonic()


async def measured(url: str, steps: int, pairs: int) -> dict[str, Any]:
    """Return the medians of both, and of the ratios of neighbours."""
    work = Work()
    alone, under, renewed = [], [], 0
    async with open_store(url) as store:
        experiment: Experiment = await store.experiment(EXPERIMENT)
        options = {"strategy": "grpo", "groups_per_step": GROUPS_PER_STEP}
        name = f"watched-{time.time_ns()}"
        async with experiment.train_stream(consumer=name, **options) as stream:
            await train(stream, work, 2)
            for pair in range(pairs):
                for is_watched in (pair % 2 == 0, pair % 2 == 1):
                    if not is_watched:
                        alone.append(await train(stream, work, steps))
                        continue
                    async with watched(url) as pages:
                        under.append(await train(stream, work, steps))
                        renewed += len(pages)
    ratios = [b / a for a, b in zip(alone, under, strict=True)]
    return {
        "steps": steps,
        "alone_s": round(statistics.median(alone), 3),
        "watched_s": round(statistics.median(under), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "pages": renewed,
        "repetitions": pairs,
    }


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--experiences", type=int, default=100_000)
    parser.add_argument(
        "--store",
        default=str(STORE.with_name("watching.db")),
        help="a file, a URL, or postgresql: a server that is started",
    )
    parser.add_argument("--steps", type=int, default=100, help="of each turn")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = f"--experiences {given.experiences} --steps {given.steps} --pairs {given.pairs}"
    command = f"python -m benchmarks.watching {sizes} --record"
    with filled(given.store, given.experiences) as url:
        backend = "postgresql" if url.startswith("postgresql") else "sqlite"
        origin = provenance(command if backend == "sqlite" else f"{command} --store postgresql")
        found = asyncio.run(measured(url, given.steps, given.pairs))
        row = {"op": "watch", "case": "a trainer under a watcher", "backend": backend}
        row |= {"experiences": given.experiences, **found}
        print(json.dumps(row), flush=True)
        if given.record:
            record({**row, **origin})


if __name__ == "__main__":
    main()
