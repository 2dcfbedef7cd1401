"""Does every algorithm learn? Each trains on the demo's task from a store, with three seeds.

python benchmarks/learning.py --algorithm grpo             # three seeds of one algorithm
python benchmarks/learning.py --all                        # what is not in the results yet
python benchmarks/learning.py --report                     # docs/learning.md and its plots
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that it runs as a script too

from benchmarks.learning_progress import to_stderr  # noqa: E402
from benchmarks.learning_report import write_report  # noqa: E402
from benchmarks.learning_run import run, trained_teacher  # noqa: E402
from benchmarks.learning_setups import SETUPS, Setup  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402

RESULTS = ROOT / "docs" / "learning.jsonl"
KEPT = ROOT / ".benchmarks"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line, or ``arguments``, asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--algorithm", action="append", choices=sorted(SETUPS), default=[])
    parser.add_argument("--all", action="store_true", help="every algorithm")
    parser.add_argument("--seeds", default="0,1,2", help="with commas")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--report", action="store_true", help="write docs/learning.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--small", action="store_true", help="two small steps: does it run at all?")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = list(SETUPS) if asked.all else asked.algorithm
    if not names and not asked.report:
        parser.error("name --algorithm NAME, or --all, or --report")
    if asked.small and asked.results == RESULTS:
        parser.error(f"--small proves nothing that belongs into {RESULTS}: name another --results")
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    setups = {name: SETUPS[name].small() if asked.small else SETUPS[name] for name in names}
    for line in measured(setups, seeds, asked.results, again=asked.again):
        shown = {key: line[key] for key in ("algorithm", "seed", "reached", "best", "cpu_s")}
        print(json.dumps(shown), flush=True)
    if asked.report:
        write_report(read_results(asked.results), ROOT / "docs")


def measured(
    setups: Mapping[str, Setup], seeds: Sequence[int], results: Path, *, again: bool
) -> Iterator[dict[str, Any]]:
    """Run what has no result yet, append each result to the file as it comes, and yield it."""
    lines = read_results(results)
    known = {(line["algorithm"], line["seed"], line["setup"]): line for line in lines}
    skipped = 0
    for (name, setup), seed in product(setups.items(), seeds):
        recorded = known.get((name, seed, setup.digest))
        if recorded is not None and not again:
            skipped += 1
            to_stderr(f"{name}, seed {seed}: {told(recorded)}; skipped")
            continue
        line = measure(name, setup, seed)
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        yield line
    if skipped:
        to_stderr(f"{skipped} results stand in {results}; --again runs them again")


def told(line: Mapping[str, Any]) -> str:
    """Return what a result says, in words."""
    if line["reached"]:
        said = f"reached {line['threshold']} at step {line['reached']}"
    else:
        said = f"{line['best']} at most, not {line['threshold']}"
    return f"recorded at {line['commit']} ({said})"


def measure(name: str, setup: Setup, seed: int) -> dict[str, Any]:
    """Run an algorithm from one seed and return its result."""
    small = setup != SETUPS[name]
    teacher = trained_teacher(KEPT, small=small) if setup.teacher else None
    command = f"python benchmarks/learning.py --algorithm {name} --seeds {seed} --again"
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(name, setup, seed, Path(folder), teacher)
    return {
        "algorithm": name,
        "seed": seed,
        "setup": setup.digest,
        "task": setup.task,
        "threshold": setup.threshold,
        "max_steps": setup.max_steps,
        "reached": outcome.reached,
        "best": max(accuracy for _, accuracy in outcome.curve),
        "cpu_s": round(outcome.cpu_s, 1),
        **provenance(command + " --small" * small, seed),
        "curve": outcome.curve,
    }


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results so far, oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
