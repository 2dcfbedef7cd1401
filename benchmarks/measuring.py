"""Measurements that can be compared: ours and the limit in turns, and medians."""

from __future__ import annotations

import gc
import re
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal


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


def interleaved(
    ours: Callable[[], float], limit: Callable[[], float], repetitions: int
) -> tuple[list[float], list[float]]:
    """Return the seconds that both took, as `in_turns` does."""
    first, second = in_turns((ours, limit), repetitions)
    return first, second


def in_turns(runs: Sequence[Callable[[], float]], repetitions: int) -> list[list[float]]:
    """Return the seconds that each took, in turns; who begins changes, one round is for warmth."""
    seconds: list[list[float]] = [[] for _ in runs]
    order = range(len(runs))
    with frozen():
        for round_number in range(repetitions + 1):
            for which in order if round_number % 2 else reversed(order):
                seconds[which].append(runs[which]())
    return [some[1:] for some in seconds]


@contextmanager
def frozen() -> Iterator[None]:
    """Keep the collector from looking at what is there: experiences that no real process has."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process took.

    Attributes:
        wall_s, cpu_s: seconds of the clock, and of the processor.
        largest_mb: the most memory that it held, as seen every 20 ms.
    """

    wall_s: float
    cpu_s: float
    largest_mb: int


def run_measured(command: Sequence[str]) -> tuple[str, Cost]:
    """Run a command to its end; return what it printed, and what it took.

    Raises:
        CalledProcessError: it ended with another exit code than 0.
    """
    peak, before = 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryFile("w+") as said:
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=said) as process:
            # The greatest memory of ended children counts what they shared with this process.
            while process.poll() is None:
                peak = peak_kb(process.pid) or peak
                time.sleep(0.02)
        seconds = time.perf_counter() - began
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        said.seek(0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return said.read(), Cost(seconds, cpu, peak // 1024)


def peak_kb(pid: int | Literal["self"]) -> int:
    """Return the most memory that a process held, 0 if it has ended."""
    return _status_kb(pid, "VmHWM")


def memory_kb() -> int:
    """Return the memory that this process holds."""
    return _status_kb("self", "VmRSS")


def _status_kb(pid: int | Literal["self"], name: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    return int(found[1]) if found else 0


def commit() -> str:
    """Return the commit of the code that runs; "" outside of a checkout, or without git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with suppress(FileNotFoundError):  # a borrowed machine may have none
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def percentile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of ``values`` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
