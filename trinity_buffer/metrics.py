"""Metrics of many groups, reduced to a few numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any


def gather_metrics(
    metric_list: Sequence[Mapping[str, Any]],
    prefix: str,
    output_stats: Sequence[str] = ("mean", "max", "min"),
) -> dict[str, float]:
    """Return ``{prefix/name/stat: value}``: unweighted statistics over the groups that have it.

    Not-a-number values are left out of a statistic, as are values that are not numbers; a name
    without any number yields nothing.

    Raises:
        ValueError: the list is empty (the reference does the same; callers that may have none catch
            it).
    """
    if not metric_list:
        raise ValueError("gather_metrics: the list of metrics is empty")
    columns: dict[str, list[float]] = {}
    for metrics in metric_list:
        for name, value in metrics.items():
            number = _number(value)
            if number is not None:
                columns.setdefault(name, []).append(number)
    reducers: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "max": max, "min": min}
    return {
        f"{prefix}/{name}/{stat}": float(reducers[stat](values))
        for name, values in columns.items()
        for stat in output_stats
    }


def _number(value: Any) -> float | None:
    """Return ``value`` as a float, or None for NaN and for what is not one number."""
    if hasattr(value, "tolist"):  # of torch and of NumPy: a number if there is just one
        value = value.tolist()
    if not isinstance(value, (bool, int, float)) or math.isnan(value):
        return None
    return float(value)
