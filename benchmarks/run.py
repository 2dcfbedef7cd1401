"""Measure everything, each operation beside its raw limit in the same run: one JSON line a figure.

python -m benchmarks.run                          # all of it, on SQLite
python -m benchmarks.run --only write,stream --repetitions 9
python -m benchmarks.run --backend postgresql
python -m benchmarks.run --repetitions 9 --record    # kept, and in docs/proofs/performance.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import throughput
from benchmarks.latency import latency
from benchmarks.performance import PAGE, RECORD, record
from benchmarks.provenance import provenance
from benchmarks.sites import site
from benchmarks.workload import TASKS

OPERATIONS = {
    "write": throughput.write,
    "annotate": throughput.annotate,
    "stream": throughput.stream,
    "latency": latency,
}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(OPERATIONS), help="operations, with commas")
    parser.add_argument("--backend", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--tasks", type=int, default=TASKS, help="groups of 8 runs each")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}, renew {PAGE}")
    parser.add_argument("--folder", type=Path, help="where SQLite's files lie meanwhile")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for name in asked.only.split(","):
            origin = provenance(_command(name, asked))
            with site(asked.backend, Path(folder)) as place:
                for figure in OPERATIONS[name](place, asked.tasks, asked.repetitions):
                    row = {**asdict(figure), **origin}
                    print(json.dumps(row), flush=True)
                    if asked.record:
                        record(row)


def _command(operation: str, asked: argparse.Namespace) -> str:
    """Return what records the figures of one operation again."""
    return (
        f"python -m benchmarks.run --only {operation} --backend {asked.backend} "
        f"--tasks {asked.tasks} --repetitions {asked.repetitions} --record"
    )


if __name__ == "__main__":
    main()
