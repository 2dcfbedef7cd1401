"""Metrics of many groups, reduced to a few numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    reducers = {"mean": lambda v: math.fsum(v) / len(v), "max": max, "min": min}
    return {
        f"{prefix}/{name}/{stat}": float(reducers[stat](values))
        for name, values in columns.items()
        for stat in output_stats
    }


def _number(value: Any) -> float | None:
    """Return ``value`` as a float, or None for NaN and for what is not one number."""
    if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float(value) if isinstance(value, bool) else None
    return None if math.isnan(value) else float(value)
