"""Mean rewards of rows in which each run counts once, however many rows it has. No torch."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[Any]


def rewards_by_run(rewards: Floats, groups: Integers, runs: Integers, steps: Integers) -> Floats:
    """Return the reward of each row's run: the mean over the run's rows, NaN if none has one.

    A row without a reward takes that of the last row of its run.

    Args:
        rewards: of each row, NaN where it has none.
        groups, runs: the two numbers that only the rows of one run have in common.
        steps: of each row within its run.
    """
    order, number, means = _of_runs(rewards, groups, runs, steps)
    rewards_of_rows = np.empty(len(order))
    rewards_of_rows[order] = means[number]
    return rewards_of_rows


def mean_over_runs(
    rewards: Floats, groups: Integers, runs: Integers, steps: Integers
) -> float | None:
    """Return the mean of `rewards_by_run` over the runs that have a reward; None: none has."""
    _, _, means = _of_runs(rewards, groups, runs, steps)
    known = means[~np.isnan(means)]
    return fmean(known.tolist()) if len(known) else None


def _of_runs(
    rewards: Floats, groups: Integers, runs: Integers, steps: Integers
) -> tuple[Integers, Integers, Floats]:
    """Return rows in the order of their runs, the run of each in that order, and runs' rewards."""
    order = np.lexsort((steps, runs, groups))
    if not len(order):
        return order, order, rewards
    ordered = rewards[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (np.diff(groups[order]) != 0) | (np.diff(runs[order]) != 0)
    number = np.cumsum(begins) - 1
    last = ordered[np.append(np.flatnonzero(begins)[1:], len(order)) - 1]
    ordered = np.where(np.isnan(ordered), last[number], ordered)
    counts = np.bincount(number, ~np.isnan(ordered))
    sums = np.bincount(number, np.nan_to_num(ordered))
    return order, number, np.divide(sums, counts, np.full(len(counts), np.nan), where=counts > 0)
