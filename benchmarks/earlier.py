"""Measure this version beside an earlier one, in turns: one JSON line a figure.

python -m benchmarks.earlier . --backend postgresql   # beside itself: how much chance does

In place of the dot stands a folder with the code of an earlier version, for example what
``git archive COMMIT | tar x -C FOLDER`` has made. Each measurement is of a new store, in a process
of its own; the limit is the earlier version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.measuring import figure_of_rates, interleaved
from benchmarks.sites import Site, site

HERE = Path(__file__).parent
CASES = {
    "write": "64 per call, one caller",
    "annotate": "grpo, groups of 8",
    "stream": "batches of 256, padded",
    "step": "leases and commits of 256 rows",
}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tree", type=Path, help="the code of the earlier version")
    parser.add_argument("--only", default=",".join(CASES), help="operations, with commas")
    parser.add_argument("--backend", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--repetitions", type=int, default=5)
    asked = parser.parse_args()
    trees = (HERE.parent, asked.tree.absolute())
    with tempfile.TemporaryDirectory() as folder, site(asked.backend, Path(folder)) as place:
        for operation in asked.only.split(","):
            counted: list[int] = []
            ours, limit = (_Timed(place, operation, tree, counted) for tree in trees)
            seconds = interleaved(ours, limit, asked.repetitions)
            (number,) = set(counted)
            case = f"{CASES[operation]}, {asked.tree.name}"
            figure = figure_of_rates(operation, case, asked.backend, number, seconds)
            print(json.dumps(asdict(figure)), flush=True)


class _Timed:
    """One operation of one version."""

    def __init__(self, place: Site, operation: str, tree: Path, counted: list[int]) -> None:
        self._place, self._operation, self._tree, self._counted = place, operation, tree, counted

    def __call__(self) -> float:
        url = self._place.new_url()
        try:
            said = json.loads(
                _run([str(HERE / "earlier_role.py"), self._operation, url], self._tree)
            )
        finally:
            self._place.drop(url)
        self._counted.append(said["number"])
        return float(said["seconds"])


def _run(role: Sequence[str], tree: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", *role]
    return subprocess.run(
        command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


if __name__ == "__main__":
    main()
