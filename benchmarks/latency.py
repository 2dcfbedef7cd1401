"""How long a group takes from the call of ``write`` to the trainer, in three processes."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

from benchmarks.bare import connect, empty_copy
from benchmarks.measuring import Figure, percentile
from benchmarks.sites import Site
from benchmarks.throughput import EXPERIMENT
from benchmarks.workload import RUNS, calls, experiences
from trinity_buffer.pipeline.store import open_store

WRITES_PER_BLOCK = 50
PAUSES_S = (0.12, 0.2)
"""Between a delivery and the next write: by then every poller has become slow."""


class Role:
    """A process of its own, which says ``ready`` and then what reached it."""

    def __init__(self, name: str, where: str) -> None:
        command = [sys.executable, "-m", "benchmarks.latency_role", name, where]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.line()

    def line(self) -> str:
        """Return the next line it says."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said:
            raise RuntimeError(f"{self.process.args!r} ended: {self.process.wait()}")
        return said

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def _roles(prefix: str, where: str) -> Iterator[Role]:
    """Run a strategy and a trainer; yield the trainer."""
    running: list[Role] = []
    try:
        running.append(Role(f"{prefix}strategy", where))
        running.append(Role(f"{prefix}trainer", where))
        yield running[1]
    finally:
        for role in running:
            role.stop()


def _delivered(trainer: Role, number: int) -> float:
    """Return when the write ``number`` was delivered."""
    while True:
        of, at = trainer.line().split()
        if int(of) == number:
            return float(at)


async def _ours(site: Site, block: int, writes: int) -> list[float]:
    url, found = site.new_url(), []
    groups = calls(experiences(writes, first_task=block * writes), RUNS)
    pauses = random.Random(block)
    async with open_store(url) as store:
        experiment = await store.experiment(EXPERIMENT, config={"rollouts_per_group": RUNS})
        writer = experiment.writer(actor="explorer-0")
        with _roles("", url) as trainer:
            for group in groups:
                await asyncio.sleep(pauses.uniform(*PAUSES_S))
                began = time.monotonic()
                receipt = await writer.write(group)
                found.append(_delivered(trainer, receipt.position) - began)
    site.drop(url)
    return found


def _bare(folder: Path, block: int, writes: int) -> list[float]:
    path, found = folder / "bare.db", []
    blob = os.urandom(RUNS * 12_352)  # as many bytes as a group has on the disk
    empty_copy(path)
    pauses = random.Random(block)
    with closing(connect(path)) as connection:
        for table in ("written", "scored"):
            connection.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, data BLOB)")
        with _roles("bare-", str(path)) as trainer:
            for number in range(1, writes + 1):
                time.sleep(pauses.uniform(*PAUSES_S))
                began = time.monotonic()
                connection.execute("INSERT INTO written VALUES (?, ?)", (number, blob))
                found.append(_delivered(trainer, number) - began)
    return found


def latency(site: Site, tasks: int, repetitions: int) -> Iterator[Figure]:
    """Measure write to delivered; the limit is bare sqlite3 that polls every millisecond.

    A repetition is a block of writes to a new store, of a group each.
    """
    writes = min(WRITES_PER_BLOCK, tasks)
    ours: list[list[float]] = []
    bare: list[list[float]] = []
    for block in range(repetitions):
        ours.append(asyncio.run(_ours(site, block, writes)))
        with tempfile.TemporaryDirectory() as folder:
            bare.append(_bare(Path(folder), block, writes))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        of_blocks = [
            percentile(own, share) / percentile(raw, share)
            for own, raw in zip(ours, bare, strict=True)
        ]
        yield Figure(
            op="latency",
            case=f"write to delivered, {name}",
            backend=site.backend,
            unit="ms",
            ours=round(1e3 * percentile([s for some in ours for s in some], share), 2),
            limit=round(1e3 * percentile([s for some in bare for s in some], share), 2),
            ratio=round(median(of_blocks), 3),
            ratio_low=round(min(of_blocks), 3),
            ratio_high=round(max(of_blocks), 3),
            repetitions=sum(map(len, ours)),
        )
