"""Rollouts of several steps: the runs of each task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trinity_buffer.algorithm.annotating import Problem, run_problem
from trinity_buffer.experience import Experience, group_by

Runs = dict[str, list[Experience]]
"""Run id -> its steps."""


def runs_by_task(exps: Sequence[Experience]) -> dict[str, Runs]:
    """Return the steps of every run of every task, each in order of first appearance."""
    return {task: group_by(group, "run") for task, group in group_by(list(exps), "task").items()}


def run_problems(
    exps: Sequence[Experience], rewarded: Callable[[list[Experience]], Experience | None]
) -> Iterator[Problem]:
    """Yield what keeps runs from being scored; ``rewarded`` names the step whose reward counts."""
    for runs in runs_by_task(exps).values():
        for steps in runs.values():
            problem = run_problem(steps, rewarded(steps))
            if problem is not None:
                yield problem
