"""One learning run: the demo of an algorithm, in processes of its own, then its replay."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

import trinity_buffer as tb
from trinity_buffer.demo.recipes import RECIPES

Curve = list[tuple[int, float]]
"""(gradient step, greedy accuracy on fresh problems) of every evaluation."""


class LearningError(RuntimeError):
    """A run did not come to its end; the message holds the last thing that it said."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        curve: of the trainer's own evaluations.
        lost, duplicated: as the demo's `verify` counted them.
        identical: whether a replay ended with the same weights, bit for bit.
    """

    curve: Curve
    lost: int
    duplicated: int
    identical: bool

    def reached(self, threshold: float) -> int | None:
        """Return the first step after which ``threshold`` was reached; None: it never was."""
        return next((step for step, accuracy in self.curve if accuracy >= threshold), None)


def to_stderr(line: str) -> None:
    """Print ``line`` where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


def run(
    name: str,
    seed: int,
    folder: Path,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = to_stderr,
) -> Outcome:
    """Train ``name`` from random weights and return how far it came.

    Args:
        name: of the algorithm.
        seed: of weights, problems and rollouts.
        folder: for the store and what lies beside it.
        overrides: of the configuration, such as ``max_steps=2``.
        say: takes each line that the demo says.

    Raises:
        LearningError: the demo, or the replay, failed.
    """
    store = f"sqlite:///{folder / name}.db"
    target = f"evaluation.target_accuracy={RECIPES[name].threshold}"
    options = [word for one in (target, *overrides) for word in ("--set", one)]
    named = ("--algorithm", name, "--name", name, "--seed", str(seed), "--store", store)
    said = _said(("demo", *named, *options), say)
    found = re.fullmatch(r"lost (\d+), duplicated (\d+)", said[-1])
    if found is None:
        raise LearningError(f"{name}, seed {seed}: the demo ended with {said[-1]!r}")
    replayed = _said(("replay", "--store", store, "--experiment", name, "--json"), lambda _: None)
    curve = anyio.run(curve_of, store, name)
    return Outcome(curve, int(found[1]), int(found[2]), json.loads(replayed[-1])["identical"])


async def curve_of(store: str, experiment: str) -> Curve:
    """Return what the trainer of a run measured, from the log."""
    async with tb.open_store(store, read_only=True) as opened:
        events = (await opened.experiment(experiment)).events(kinds=("StepsCommitted",))
        return [
            (event.body["steps"][-1], event.body["metrics"]["accuracy"])
            async for event in events
            if "accuracy" in event.body["metrics"]
        ]


def _said(words: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Run a command and return its lines."""
    command = [sys.executable, "-m", "trinity_buffer", *words]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            say(lines[-1])
    if process.returncode or not lines:
        last = lines[-1] if lines else "nothing"
        raise LearningError(f"{' '.join(words)} ended with {process.returncode}: {last}")
    return lines
