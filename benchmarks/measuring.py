"""Measurements that can be compared: ours and the limit in turns, medians, and on what machine."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pysqlite3
import torch

import trinity_buffer


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the results: ours beside its limit.

    Attributes:
        op: what was measured.
        case: under which circumstances.
        backend: ``"sqlite"`` or ``"postgresql"``.
        unit: of ``ours`` and ``limit``.
        ours, limit: medians over the repetitions.
        ratio: the median over the repetitions of ours / limit, each from two neighbouring runs.
        ratio_low, ratio_high: the lowest and the highest of them.
        repetitions: how often each was run.
    """

    op: str
    case: str
    backend: str
    unit: str
    ours: float
    limit: float
    ratio: float
    ratio_low: float
    ratio_high: float
    repetitions: int

    def line(self, machine: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is printed and kept."""
        return {**asdict(self), **machine}


def interleaved(
    ours: Callable[[], float], limit: Callable[[], float], repetitions: int
) -> tuple[list[float], list[float]]:
    """Return the seconds that both took, in turns; who begins changes, one round is for warmth."""
    pairs: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.freeze()  # the collector shall not look at the experiences, which no real process has here
    try:
        for round_number in range(repetitions + 1):
            for which in (0, 1) if round_number % 2 else (1, 0):
                pairs[which].append((ours, limit)[which]())
    finally:
        gc.unfreeze()
    return pairs[0][1:], pairs[1][1:]


def figure_of_rates(
    op: str, case: str, backend: str, number: int, seconds: tuple[list[float], list[float]]
) -> Figure:
    """Return the figure of ``number`` experiences that took ``seconds`` (ours, limit)."""
    ours, limit = seconds
    ratios = [bare / own for own, bare in zip(ours, limit, strict=True)]
    return Figure(
        op=op,
        case=case,
        backend=backend,
        unit="experiences/s",
        ours=round(number / statistics.median(ours)),
        limit=round(number / statistics.median(limit)),
        ratio=round(statistics.median(ratios), 3),
        ratio_low=round(min(ratios), 3),
        ratio_high=round(max(ratios), 3),
        repetitions=len(ours),
    )


def machine() -> dict[str, Any]:
    """Return what the figures depend on beside the code."""
    return {
        "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sqlite": pysqlite3.sqlite_version,
        "version": trinity_buffer.__version__,
    }


def commit() -> str:
    """Return the commit of the code that is measured; "" outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def percentile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of ``values`` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
