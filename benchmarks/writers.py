"""Do many writers of one store get on, and does none starve? A JSON line a number of processes.

python -m benchmarks.writers                           # 1, 4 and 16 processes, ten seconds each
python -m benchmarks.writers --writers 1,16 --seconds 5 --backend postgresql
python -m benchmarks.writers --record                  # kept in docs/proofs/performance.jsonl

Each process writes call after call, as an explorer does that never generates. The slowest call is
compared with what it would take if each process had its turn in order: as many calls, of the
median length that one process alone needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.performance import RECORD, record
from benchmarks.provenance import provenance
from benchmarks.sites import Site, site
from benchmarks.throughput import EXPERIMENT
from benchmarks.workload import calls, experiences
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.pipeline.store import open_store

PER_CALL = 8


async def _write(url: str, actor: str, seconds: float, per_call: int) -> None:
    """Write until the time is over; say how long each call took, a JSON list."""
    some = calls(experiences(per_call), per_call)[0]
    took: list[float] = []
    async with open_store(url) as store:
        writer = (await store.experiment(EXPERIMENT)).writer(actor=actor)
        print("ready", flush=True)
        sys.stdin.readline()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            given = _again(some, actor, len(took))
            began = time.monotonic()
            await writer.write(given)
            took.append(time.monotonic() - began)
    print(json.dumps(took), flush=True)


def _again(some: Sequence[Experience], actor: str, number: int) -> list[Experience]:
    """Return ``some`` under addresses of their own."""
    made = []
    for run, one in enumerate(some):
        again = Experience.from_state(dict(vars(one)))
        again.eid = EID(actor, number, run)
        made.append(again)
    return made


def _measured(url: str, number: int, seconds: float, per_call: int) -> list[list[float]]:
    """Return how long each call of each of so many processes took, in seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    roles = []
    for n in range(number):
        named = [url, f"explorer-{n}", str(seconds), str(per_call)]
        command = [sys.executable, "-m", "benchmarks.writers", "--role", *named]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        roles.append(subprocess.Popen(command, text=True, env=environment, **pipes))
    try:
        for role in roles:
            assert role.stdout is not None
            role.stdout.readline()
        for role in roles:
            assert role.stdin is not None
            role.stdin.write("go\n")
            role.stdin.flush()
        return [json.loads(role.communicate()[0]) for role in roles]
    finally:
        for role in roles:
            role.kill()
            role.wait()


def compared(
    took: Sequence[Sequence[float]], alone: Sequence[float], seconds: float
) -> dict[str, Any]:
    """Return what is to be told of calls of several processes, beside those of one alone."""
    every = [one for some in took for one in some]
    in_order = len(took) * median(alone)
    return {
        "calls_per_s": round(len(every) / seconds, 1),
        "share_of_one": round(len(every) / len(alone), 3),
        "p50_ms": round(1e3 * median(every), 2),
        "slowest_ms": round(1e3 * max(every), 1),
        "slowest_in_turns": round(max(every) / in_order, 2),
        "least_by_most": round(min(map(len, took)) / max(map(len, took)), 3),
    }


async def _create(url: str) -> None:
    async with open_store(url) as store:
        await store.experiment(EXPERIMENT, config={})


def lines(
    site: Site, numbers: Sequence[int], seconds: float, per_call: int
) -> Iterator[dict[str, Any]]:
    """Yield a result for each of ``numbers`` of processes; one alone is measured before each."""
    for number in numbers:
        found = []
        for processes in (1, number):
            url = site.new_url()
            asyncio.run(_create(url))
            found.append(_measured(url, processes, seconds, per_call))
            site.drop(url)
        (alone,), took = found
        yield {"case": f"{number} processes, {per_call} per call", **compared(took, alone, seconds)}


def main() -> None:
    """Print a line a number of processes."""
    if sys.argv[1:2] == ["--role"]:
        url, actor, seconds, per_call = sys.argv[2:]
        torch.set_num_threads(1)
        asyncio.run(_write(url, actor, float(seconds), int(per_call)))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--writers", default="1,4,16", help="numbers of processes")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each")
    parser.add_argument("--per-call", type=int, default=PER_CALL)
    parser.add_argument("--backend", default="sqlite", choices=("sqlite", "postgresql"))
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}")
    given = parser.parse_args()
    origin = provenance(f"python -m benchmarks.writers --backend {given.backend} --record")
    numbers = [int(number) for number in given.writers.split(",")]
    with tempfile.TemporaryDirectory() as folder, site(given.backend, Path(folder)) as place:
        for line in lines(place, numbers, given.seconds, given.per_call):
            row = {"op": "writers", "backend": place.backend, **line}
            print(json.dumps(row), flush=True)
            if given.record:
                record({**row, **origin})


if __name__ == "__main__":
    main()
