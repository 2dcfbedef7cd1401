"""Is a ratio still what docs/proofs/performance.md says? Fails with each that has halved.

python -m benchmarks.guard       # half a minute: writes, decisions and the stream, on SQLite

A figure under half of the recorded one is measured once more, longer, before it counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import throughput
from benchmarks.measuring import Figure
from benchmarks.performance import Row, newest_rows
from benchmarks.sites import SQLiteSite

GUARDED = {"write": throughput.write, "annotate": throughput.annotate, "stream": throughput.stream}
LEAST = 0.5
"""Of the recorded ratio."""
TASKS, REPETITIONS = 256, 3

Measure = Callable[[str, int], Iterable[Figure]]


def slow(
    figures: Iterable[Figure], recorded: Mapping[tuple[str, str], Row], least: float = LEAST
) -> list[str]:
    """Return a line for each of ``figures`` whose ratio is too far below the recorded one."""
    found = []
    for figure in figures:
        row = recorded.get((figure.op, figure.case))
        if row is not None and figure.ratio < least * row["ratio"]:
            found.append(
                f"{figure.op}, {figure.case}, {figure.backend}: {figure.ratio:g} of the bare speed "
                f"({figure.ours:,} /s), where {row['ratio']:g} is recorded ({row['date']})"
            )
    return found


def guarded(
    operations: Sequence[str],
    measure: Measure,
    recorded: Mapping[tuple[str, str], Row],
    least: float = LEAST,
) -> list[str]:
    """Measure ``operations``; return what is slow twice, the second time of more repetitions.

    Args:
        measure: name of an operation, and factor of the repetitions -> its figures.
    """
    found = []
    for name in operations:
        if slow(measure(name, 1), recorded, least):
            found += slow(measure(name, 3), recorded, least)
    return found


def main() -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(GUARDED), help="operations, with commas")
    parser.add_argument("--tasks", type=int, default=TASKS, help="groups of 8 runs each")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--least", type=float, default=LEAST, help="share of a recorded ratio")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = SQLiteSite(Path(folder))

        def measure(name: str, factor: int) -> Iterable[Figure]:
            for figure in GUARDED[name](place, asked.tasks, asked.repetitions * factor):
                print(f"{figure.op}, {figure.case}: {figure.ratio:g}", flush=True)
                yield figure

        found = guarded(asked.only.split(","), measure, newest_rows(), asked.least)
    for line in found:
        print(f"too slow: {line}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
