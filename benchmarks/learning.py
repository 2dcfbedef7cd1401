"""Does every algorithm learn? Each is trained by the demo, with three seeds, and replayed.

python benchmarks/learning.py --algorithm grpo             # three seeds of one algorithm
python benchmarks/learning.py --all                        # what is not in the results yet
python benchmarks/learning.py --report                     # docs/proofs/learning.md and its plots
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that it runs as a script too

from benchmarks.learning_report import digest_of, write_report  # noqa: E402
from benchmarks.learning_run import LearningError, Outcome, run, to_stderr  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402
from trinity_buffer.demo.recipes import RECIPES  # noqa: E402

RESULTS = ROOT / "docs" / "proofs" / "learning.jsonl"

SMALL = ("max_steps=2", "evaluation.every_steps=1", "model.width=8", "groups_per_batch=3")
"""Overrides for two small steps, which teach nothing but run everything."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line, or ``arguments``, asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--algorithm", action="append", choices=sorted(RECIPES), default=[])
    parser.add_argument("--all", action="store_true", help="every algorithm, where none is named")
    parser.add_argument("--seeds", default="0,1,2", help="with commas")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--report", action="store_true", help="write docs/proofs/learning.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--small", action="store_true", help="two small steps: does it run at all?")
    asked = parser.parse_args(arguments)
    names = asked.algorithm or (list(RECIPES) if asked.all else [])
    if not names and not asked.report:
        parser.error("name --algorithm NAME, or --all, or --report")
    if asked.small and asked.results == RESULTS:
        parser.error(f"--small proves nothing that belongs into {RESULTS}: name another --results")
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    overrides = SMALL if asked.small else ()
    failed = 0
    for line in measured(names, seeds, asked.results, overrides, again=asked.again):
        if isinstance(line, LearningError):
            failed += 1
            to_stderr(f"no result: {line}")
            continue
        shown = {key: line[key] for key in ("algorithm", "seed", "reached", "best", "identical")}
        print(json.dumps(shown), flush=True)
    if asked.report:
        write_report(read_results(asked.results), RESULTS.parent)
    if failed:
        parser.exit(1, f"{failed} runs came to no result; the same command tries them again\n")


def measured(
    names: Sequence[str],
    seeds: Sequence[int],
    results: Path,
    overrides: Sequence[str] = (),
    *,
    again: bool,
) -> Iterator[dict[str, Any] | LearningError]:
    """Run what has no result yet, append each result to the file as it comes, and yield it.

    What comes to no result is yielded as its error; all else is still run. Every algorithm is run
    with the first seed before any is run with the next.
    """
    lines = read_results(results)
    known = {(line["algorithm"], line["seed"], line["setup"]): line for line in lines}
    skipped = 0
    for seed, name in product(seeds, names):
        recorded = known.get((name, seed, setup_of(name, overrides)))
        if recorded is not None and not again:
            skipped += 1
            to_stderr(f"{name}, seed {seed}: {told(recorded)}; skipped")
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                outcome = run(name, seed, Path(folder), overrides)
        except LearningError as error:
            yield error
            continue
        line = result_of(name, seed, outcome, overrides)
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


def setup_of(name: str, overrides: Sequence[str] = ()) -> str:
    """Return what tells results of a recipe, and of overrides of it, from those of another."""
    return digest_of(RECIPES[name]) + "-small" * bool(overrides)


def result_of(
    name: str, seed: int, outcome: Outcome, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the line that is kept of a run."""
    recipe = RECIPES[name]
    command = f"python benchmarks/learning.py --algorithm {name} --seeds {seed} --again"
    return {
        "algorithm": name,
        "seed": seed,
        "setup": setup_of(name, overrides),
        "task": recipe.task,
        "threshold": recipe.threshold,
        "max_steps": recipe.max_steps,
        "reached": outcome.reached(recipe.threshold),
        "best": max((accuracy for _, accuracy in outcome.curve), default=0.0),
        "lost": outcome.lost,
        "duplicated": outcome.duplicated,
        "identical": outcome.identical,
        **provenance(command + " --small" * bool(overrides), seed),
        "curve": outcome.curve,
    }


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results so far, oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
