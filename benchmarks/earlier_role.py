"""One measurement of whatever version of the package is found: prints seconds and number as JSON.

python benchmarks/earlier_role.py write URL     # calls of 64 experiences of 12 KB
python benchmarks/earlier_role.py annotate URL  # GRPO over groups of 8
python benchmarks/earlier_role.py stream URL    # steps of 256 rows of 12 KB, leased and collated
python benchmarks/earlier_role.py step URL      # leases and commits of 256 small rows

It uses only names that each version has.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable

import torch

import trinity_buffer as tb

RUNS, PER_CALL, ROWS_PER_STEP = 8, 64, 256
WRITTEN, STEPS = 4_096, 24
LONG, SHORT = (256, 1024), (2, 6)
"""Tokens of a prompt and of a response."""


def _experiences(number: int, sizes: tuple[int, int]) -> list[tb.Experience]:
    prompt, response = sizes
    generator = torch.Generator().manual_seed(0)
    size = (prompt + response,)
    return [
        tb.Experience(
            eid=tb.EID("e0-0", at // RUNS, at % RUNS),
            tokens=torch.randint(0, 151_000, size, dtype=torch.int32, generator=generator),
            prompt_length=prompt,
            logprobs=-torch.rand(response, generator=generator),
            reward=float(at % 3),
            response_text="The quick brown fox. " * (response // 10),
            info={"model_version": 0},
        )
        for at in range(number)
    ]


async def _written(url: str, number: int, sizes: tuple[int, int]) -> tuple[float, float]:
    """Return the seconds of the calls of ``write`` but the first ones, and those of GRPO."""
    given = _experiences(number, sizes)
    async with tb.open_store(url) as store:
        experiment = await store.experiment("x", config={"rollouts_per_group": RUNS})
        writer = experiment.writer(actor="e0")
        await writer.plan("e0-0", list(range(number // RUNS)), RUNS)
        began = 0.0
        for start in range(0, number, PER_CALL):
            if start == 2 * PER_CALL:
                began = time.perf_counter()
            await writer.write(given[start : start + PER_CALL])
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        await tb.run_strategy(experiment, "grpo")
        return seconds, time.perf_counter() - began


def write(url: str) -> tuple[float, int]:
    """Return the seconds of durable writes, and how many experiences were written in them."""
    return asyncio.run(_written(url, WRITTEN, LONG))[0], WRITTEN - 2 * PER_CALL


def annotate(url: str) -> tuple[float, int]:
    """Return the seconds of GRPO over all that is stored, and how many experiences that is."""
    return asyncio.run(_written(url, WRITTEN, LONG))[1], WRITTEN


def stream(url: str) -> tuple[float, int]:
    """Return the seconds of steps, each leased and collated, and their rows."""
    asyncio.run(_written(url, WRITTEN, LONG))
    began, rows = 0.0, 0
    with tb.open_train_stream(
        url, experiment="x", strategy="grpo", groups_per_step=ROWS_PER_STEP // RUNS
    ) as made:
        for number, one in enumerate(made):
            if number == 2:
                began = time.perf_counter()
            rows += sum(len(batch["group_index"]) for batch in one.microbatches)
        seconds = time.perf_counter() - began
    return seconds, rows - 2 * ROWS_PER_STEP


def step(url: str) -> tuple[float, int]:
    """Return the seconds of steps, each leased, collated and committed, and their rows."""
    asyncio.run(_written(url, (STEPS + 2) * ROWS_PER_STEP, SHORT))
    began, rows = 0.0, 0
    groups = ROWS_PER_STEP // RUNS
    with tb.open_train_stream(
        url, experiment="x", strategy="grpo", groups_per_step=groups
    ) as stream:
        for number, made in enumerate(stream):
            if number == 2:
                began = time.perf_counter()
            stream.commit(made)
            rows += len(made.manifest.experiences)
        seconds = time.perf_counter() - began
    return seconds, rows - 2 * ROWS_PER_STEP


ROLES: dict[str, Callable[[str], tuple[float, int]]] = {
    "write": write,
    "annotate": annotate,
    "stream": stream,
    "step": step,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    seconds, number = ROLES[sys.argv[1]](sys.argv[2])
    print(json.dumps({"seconds": seconds, "number": number}))
