"""How long `compact` takes: a store as the demo fills it, and long rows beside bare pyarrow.

python -m benchmarks.compaction    # a million experiences; again: the store is not filled anew
python -m benchmarks.compaction --experiences 100000 --store /tmp/compaction.db

Each call is a whole process on a copy of the store, as a user starts it. Beside the long rows
stands pyarrow, which writes the columns of the archive again with the same codec.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet

from benchmarks.measuring import run_measured
from benchmarks.provenance import provenance
from benchmarks.throughput import GRPO
from benchmarks.verify import STORE, fill
from benchmarks.workload import BATCH, ROWS_PER_STEP, RUNS, calls, experiences
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.pipeline.store import open_store


async def fill_long(path: Path, tasks: int) -> None:
    """Write, annotate and train experiences of 1,280 tokens in a new store."""
    async with open_store(str(path)) as store:
        experiment = await store.experiment("long", config={"rollouts_per_group": RUNS})
        writer = experiment.writer(actor="e0")
        await writer.plan(BATCH, list(range(tasks)), RUNS)
        for some in calls(experiences(tasks), 64):
            await writer.write(some)
        await writer.seal(BATCH, tasks * RUNS)
        await run_strategy(experiment, "grpo", GRPO)
        options = {"strategy": "grpo", "groups_per_step": ROWS_PER_STEP // RUNS}
        async with experiment.train_stream(**options) as stream:
            async for step in stream:
                await stream.commit(step)


def compacted(path: Path, archive: Path) -> dict[str, Any]:
    """Run ``trinity-buffer compact`` and return what it took."""
    command = (sys.executable, "-m", "trinity_buffer", "compact", "--keep-steps", "0", "--json")
    said, cost = run_measured((*command, "--store", str(path), "--archive", str(archive)))
    found = json.loads(said)
    return {
        "segments": found["segments"],
        "bytes": found["bytes"],
        "files": len(found["files"]),
        "wall_s": round(cost.wall_s, 2),
        "cpu_s": round(cost.cpu_s, 2),
        "largest_mb": cost.largest_mb,
    }


def bare(archive: Path) -> dict[str, Any]:
    """Return what pyarrow takes to write all files of ``archive`` again, read beforehand."""
    wall = cpu = 0.0
    for file in sorted(archive.glob("*.parquet")):
        table, again = parquet.read_table(file), file.with_suffix(".again")
        group = parquet.ParquetFile(file).metadata.row_group(0).num_rows
        began, used = time.perf_counter(), time.process_time()
        parquet.write_table(table, again, compression="zstd", row_group_size=group)
        wall += time.perf_counter() - began
        cpu += time.process_time() - used
        again.unlink()
    return {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2)}


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--experiences", type=int, default=1_000_000)
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--tasks", type=int, default=4096, help="groups of 8 long rows")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    origin = provenance("python -m benchmarks.compaction")
    asyncio.run(fill(str(asked.store), asked.experiences, asked.store.with_suffix(".acks")))
    with tempfile.TemporaryDirectory(dir=asked.store.parent) as name:
        folder = Path(name)
        long, archive = folder / "long.db", folder / "long"
        asyncio.run(fill_long(long, asked.tasks))
        shutil.copy(asked.store, folder / "short.db")
        lines: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
            ("short rows", lambda: compacted(folder / "short.db", folder / "short")),
            ("short rows again", lambda: compacted(folder / "short.db", folder / "short")),
            ("long rows", lambda: compacted(long, archive)),
            ("long rows, bare pyarrow", lambda: bare(archive)),
        )
        for case, measured in lines:
            print(json.dumps({"op": "compact", "case": case, **measured(), **origin}), flush=True)


if __name__ == "__main__":
    main()
