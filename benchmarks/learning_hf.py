"""Does a model of transformers learn, from random weights? The demo of one, and then its replay.

python -m benchmarks.learning_hf --seeds 0,1   # five minutes of two cores each

With --record each result is appended to docs/proofs/learning_hf.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from benchmarks.learning_run import curve_of
from benchmarks.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
RECORD = "docs/proofs/learning_hf.jsonl"
THRESHOLD = 0.9
SMALL = ("max_steps=2", "evaluation.every_steps=1", "groups_per_step=2", "groups_per_batch=2")
"""Overrides for two small steps, which teach nothing but run everything."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line, or ``arguments``, asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", default="0", help="with commas")
    parser.add_argument("--small", action="store_true", help="two small steps: does it run at all?")
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}")
    asked = parser.parse_args(arguments)
    if asked.small and asked.record:
        parser.error("--small proves nothing that belongs into a record")
    good = True
    for seed in map(int, asked.seeds.split(",")):
        line = measured(seed, SMALL if asked.small else ())
        print(json.dumps(line), flush=True)
        good &= line["identical"] and not line["lost"] and not line["duplicated"]
        good &= asked.small or line["reached"] is not None
        if asked.record:
            with (ROOT / RECORD).open("a") as file:
                file.write(json.dumps(line) + "\n")
    return int(not good)


def measured(seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train with ``seed``, replay, and return the line that is kept of it.

    Raises:
        CalledProcessError: the demo, or the replay, failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{Path(folder) / 'hf.db'}"
        options = [word for one in overrides for word in ("--set", one)]
        conserved = _last_line(
            "demo", "--model", "hf", "--seed", str(seed), "--store", store, *options
        )
        replayed = json.loads(_last_line("replay", "--store", store, "--json"))
        curve = anyio.run(curve_of, store, "demo-hf")
    return {
        "seed": seed,
        "threshold": THRESHOLD,
        "reached": next((step for step, accuracy in curve if accuracy >= THRESHOLD), None),
        "lost": int(conserved.split()[1].rstrip(",")),
        "duplicated": int(conserved.split()[-1]),
        "identical": replayed["identical"],
        **provenance(f"python -m benchmarks.learning_hf --seeds {seed} --record", seed),
        "curve": curve,
    }


def _last_line(*words: str) -> str:
    """Run a command, show what it says, and return the last line of it."""
    command = [sys.executable, "-m", "trinity_buffer", *words]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            print(lines[-1], file=sys.stderr, flush=True)
    if process.returncode or not lines:
        raise subprocess.CalledProcessError(process.returncode, command)
    return lines[-1]


if __name__ == "__main__":
    sys.exit(main())
