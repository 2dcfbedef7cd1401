"""Do several processes of one strategy cost what one costs? A JSON line for each number of them.

python -m benchmarks.sharing                            # one process, and four
python -m benchmarks.sharing --processes 1,2,4 --tasks 4096 --backend postgresql
python -m benchmarks.sharing --live                     # a writer goes on while they decide
python -m benchmarks.sharing --once                     # they end with what is stored

The processes run one strategy of one store under one name, until the experiment is finished. What
is counted is their processor time from the moment in which all have opened the store, and, as
``with_start_s``, all of it, with the start of Python and its imports. What they decided must be the
same rows, each once, with the same scores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sites import site
from benchmarks.workload import BATCH, RUNS
from trinity_buffer.experience import EID, Experience
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.pipeline.load.columns import experiences_of
from trinity_buffer.pipeline.store import Experiment, open_store

EXPERIMENT = "sharing"
STRATEGY = "grpo"
PER_CALL = 64
PLANNED_AT_ONCE = 64


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _decide(url: str, *, follow: bool) -> None:
    """Run the strategy when told to; say what it took and how much this process decided."""
    async with open_store(url) as store:
        experiment = await store.experiment(EXPERIMENT)
        print("ready", flush=True)
        sys.stdin.readline()
        began = _processor_s()
        report = await run_strategy(experiment, STRATEGY, follow=follow)
        took = _processor_s() - began
    told = {
        "processor_s": took,
        "with_start_s": _processor_s(),
        "decided": report.annotated + report.rejected,
    }
    print(json.dumps(told), flush=True)


def _rollouts(first: int, tasks: int) -> list[Experience]:
    return [
        Experience(
            eid=EID(f"{BATCH}-{first}", task, run),
            tokens=[1, 2, 3, 4],
            prompt_length=2,
            logprobs=[-0.5, -0.25],
            reward=float((task * 7 + run * run) % 5),
        )
        for task in range(first, first + tasks)
        for run in range(RUNS)
    ]


async def _write(experiment: Experiment, tasks: int, pause_s: float) -> None:
    """Record ``tasks`` planned groups whose runs lie in several events, then finish."""
    writer = experiment.writer(actor="e0")
    for first in range(0, tasks, PLANNED_AT_ONCE):
        some = range(first, min(first + PLANNED_AT_ONCE, tasks))
        batch = f"{BATCH}-{first}"
        await writer.plan(batch=batch, tasks=list(some), rollouts_per_group=RUNS)
        made = _rollouts(first, len(some))
        made.sort(key=lambda one: one.eid.run)  # run by run: a group's lie far apart
        for start in range(0, len(made), PER_CALL):
            await writer.write(made[start : start + PER_CALL])
            if pause_s:
                await asyncio.sleep(pause_s)
        await writer.seal(batch=batch, expected=len(made))
    await experiment.finish("benchmark")


async def _scores(url: str) -> list[tuple[str, float]]:
    """Return the uid and the advantage of each annotated experience, in order."""
    async with open_store(url) as store:
        experiment = await store.experiment(EXPERIMENT)
        found: list[tuple[str, float]] = []
        options: dict[str, Any] = {"strategy": STRATEGY, "consumer": "t", "groups_per_step": 256}
        async with experiment.train_stream(**options) as stream:
            async for step in stream:
                for one in await experiences_of(experiment, step.manifest):
                    assert one.advantages is not None
                    found.append((one.eid.uid, float(one.advantages.sum())))
    return sorted(found)


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a process of the strategy ended early; what it said stands above")
    found: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
    return found


def _start(url: str, *, follow: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.sharing", "--role", url]
    command += [] if follow else ["--once"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def _measured(
    url: str, number: int, tasks: int, pause_s: float, *, follow: bool
) -> dict[str, Any]:
    """Return what ``number`` processes took for ``tasks`` groups."""
    async with open_store(url) as store:
        experiment = await store.experiment(EXPERIMENT, config={"groups_per_step": 1})
        if not pause_s:
            await _write(experiment, tasks, pause_s)
        processes = [_start(url, follow=follow) for _ in range(number)]
        for process in processes:
            _told(process)
        began = time.monotonic()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        if pause_s:
            await _write(experiment, tasks, pause_s)
        told = await asyncio.gather(*(asyncio.to_thread(_told, one) for one in processes))
        seconds = time.monotonic() - began
        for process in processes:
            process.communicate()
    return {
        "processes": number,
        "experiences": tasks * RUNS,
        "decided": [one["decided"] for one in told],
        "processor_s": round(sum(one["processor_s"] for one in told), 3),
        "with_start_s": round(sum(one["with_start_s"] for one in told), 3),
        "each_s": [round(one["processor_s"], 3) for one in told],
        "seconds": round(seconds, 3),
    }


def _compare(
    counts: Sequence[int], backend: str, tasks: int, pause_s: float, *, follow: bool
) -> None:
    """Print a line for each number of processes, with its ratios to the first."""
    first: dict[str, Any] = {}
    for number in counts:
        with tempfile.TemporaryDirectory() as folder, site(backend, Path(folder)) as place:
            url = place.new_url()
            found = asyncio.run(_measured(url, number, tasks, pause_s, follow=follow))
            scores = asyncio.run(_scores(url))
        first = first or {**found, "scores": scores}
        found["same"] = scores == first["scores"] and len(scores) == tasks * RUNS
        for name in ("processor_s", "with_start_s"):
            found[f"{name[:-2]}_ratio"] = round(found[name] / first[name], 2)
        print(json.dumps({**found, "backend": backend}), flush=True)


def main() -> None:
    """Read the command line; compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="1,4", help="the first is compared with")
    parser.add_argument("--tasks", type=int, default=2048, help="groups of 8")
    parser.add_argument("--backend", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--live", action="store_true", help="a writer goes on, call after call")
    parser.add_argument("--once", action="store_true", help="what is stored, then end")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.live and given.once:
        parser.error("--live goes on, --once ends with what is stored")
    if given.role:
        asyncio.run(_decide(given.role, follow=not given.once))
        return
    counts = [int(one) for one in given.processes.split(",")]
    pause_s = 0.01 if given.live else 0.0
    _compare(counts, given.backend, given.tasks, pause_s, follow=not given.once)


if __name__ == "__main__":
    main()
