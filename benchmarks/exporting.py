"""How fast `export` writes a table: a store as the demo fills it, and long rows beside pyarrow.

python -m benchmarks.exporting    # 200,000 experiences; again: the store is not filled anew
python -m benchmarks.exporting --experiences 1000 --store /tmp/exporting.db

Each call is a whole process, as a user starts it, and counts with its start. Beside both stands
pyarrow, which writes the columns of the exported file again with the same codec.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet

from benchmarks.compaction import fill_long
from benchmarks.measuring import Cost, run_measured
from benchmarks.performance import RECORD, record
from benchmarks.provenance import provenance
from benchmarks.verify import STORE, fill
from benchmarks.workload import RUNS


def exported(store: Path, file: Path) -> Cost:
    """Run ``trinity-buffer export`` and return what it took."""
    command = (sys.executable, "-m", "trinity_buffer", "export", "--store", str(store))
    return run_measured((*command, "-o", str(file)))[1]


def rewritten(file: Path) -> Cost:
    """Return what pyarrow takes to write ``file`` again, one group of rows after another."""
    source, again = parquet.ParquetFile(file), file.with_suffix(".again")
    codec = source.metadata.row_group(0).column(0).compression
    wall = cpu = 0.0
    with parquet.ParquetWriter(again, source.schema_arrow, compression=codec) as writer:
        for number in range(source.num_row_groups):
            group = source.read_row_group(number)
            began, used = time.perf_counter(), time.process_time()
            writer.write_table(group)
            wall += time.perf_counter() - began
            cpu += time.process_time() - used
    again.unlink()
    return Cost(wall, cpu, 0)


def measured(store: Path, file: Path, rows: int, repetitions: int) -> dict[str, Any]:
    """Return the medians of both, in turns."""
    ours, limit = [], []
    for _ in range(repetitions):
        ours.append(exported(store, file))
        limit.append(rewritten(file))
    wall = statistics.median(one.wall_s for one in ours)
    return {
        "rows": rows,
        "wall_s": round(wall, 2),
        "cpu_s": round(statistics.median(one.cpu_s for one in ours), 2),
        "rows_per_s": round(rows / wall),
        "bare_wall_s": round(statistics.median(one.wall_s for one in limit), 2),
        "bare_cpu_s": round(statistics.median(one.cpu_s for one in limit), 2),
        "largest_mb": max(one.largest_mb for one in ours),
        "file_mb": round(file.stat().st_size / 1e6, 1),
        "repetitions": repetitions,
    }


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--experiences", type=int, default=200_000)
    parser.add_argument("--store", type=Path, default=STORE.with_name("exporting.db"))
    parser.add_argument("--tasks", type=int, default=2048, help="groups of 8 long rows")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    origin = provenance("python -m benchmarks.exporting --record")
    asyncio.run(fill(str(asked.store), asked.experiences, asked.store.with_suffix(".acks")))
    with tempfile.TemporaryDirectory(dir=asked.store.parent) as name:
        folder = Path(name)
        asyncio.run(fill_long(folder / "long.db", asked.tasks))
        for case, store, rows in (
            ("rows as of the demo", asked.store, asked.experiences),
            ("rows of 1,280 tokens", folder / "long.db", asked.tasks * RUNS),
        ):
            found = measured(store, folder / "rows.parquet", rows, asked.repetitions)
            row = {"op": "export", "case": case, "backend": "sqlite", **found}
            print(json.dumps(row), flush=True)
            if asked.record:
                record({**row, **origin})


if __name__ == "__main__":
    main()
