"""Measure everything, each operation beside its raw limit in the same run: one JSON line a figure.

python -m benchmarks.run                          # all of it, on SQLite
python -m benchmarks.run --only write,stream --repetitions 9
python -m benchmarks.run --backend postgresql
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from benchmarks import throughput
from benchmarks.latency import latency
from benchmarks.measuring import machine
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
    parser.add_argument("--append", type=Path, help="a file that keeps the lines too")
    parser.add_argument("--folder", type=Path, help="where SQLite's files lie meanwhile")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for name in asked.only.split(","):
            with site(asked.backend, Path(folder)) as place:
                for figure in OPERATIONS[name](place, asked.tasks, asked.repetitions):
                    line = json.dumps(figure.line(machine()))
                    print(line, flush=True)
                    if asked.append is not None:
                        with asked.append.open("a") as kept:
                            kept.write(line + "\n")


if __name__ == "__main__":
    main()
