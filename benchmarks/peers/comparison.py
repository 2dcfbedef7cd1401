"""Rounds in which each store has its turn, and the figures that are made of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from statistics import median
from tempfile import TemporaryFile

from benchmarks.environments import ROOT
from benchmarks.measuring import Figure
from benchmarks.peers.catalogue import STORES, Store
from benchmarks.peers.measurement import Measured
from benchmarks.peers.protocol import Job

LIMIT_S = 400.0
"""Of one measurement, with the start of its processes and the filling of its store."""
OPERATIONS = {
    "write": Job("", "write", 4096),
    "read": Job("", "read", 4096),
    "uncommitted": Job("", "read", 4096, commits=False),
    "pass": Job("", "pass", 4096, writers=2),
    "latency": Job("", "pass", 1280, writers=2, per_write=8, per_decision=8, per_read=8, rate=200),
}
CASES = {
    "write": "write, 64 a call",
    "read": "read and commit, 256 a step",
    "uncommitted": "read and commit nothing, 256 a step",
    "pass": "end to end, two writers",
    "latency": "write to delivered at 200/s",
}
SHARES = {
    "write": ("",),
    "read": (", steady", ", with the opening"),
    "uncommitted": (", steady",),
    "pass": ("",),
    "latency": (", p50", ", p99"),
}
"""Operation -> which figures it has: of each, the end of its name."""
SHOWN: dict[str, Callable[[Measured], float]] = {
    "": lambda one: one.per_s,
    ", steady": lambda one: one.steady_per_s,
    ", with the opening": lambda one: one.per_s,
    ", p50": lambda one: one.p50_ms,
    ", p99": lambda one: one.p99_ms,
}
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "LOG_LEVEL": "ERROR",
    "TRINITY_LOG_LEVEL": "ERROR",
    "TQ_LOGGING_LEVEL": "ERROR",
}
"""By which other people's packages say less."""


class MeasurementError(Exception):
    """A store came to no result."""


def rounds(job: Job, pythons: Mapping[str, str], repetitions: int) -> dict[str, list[Measured]]:
    """Return what each store took in each round; those that failed once are left out.

    Args:
        pythons: store -> its interpreter.
    """
    found: dict[str, list[Measured]] = {name: [] for name in pythons}
    for number in range(repetitions):
        names = list(found)
        begins = number % max(1, len(names))
        for name in [*names[begins:], *names[:begins]]:
            one = replace(job, module=STORES[name].module)
            try:
                found[name].append(measured_by(one, pythons[name]))
            except MeasurementError as error:
                del found[name]
                _say(f"{name}: FAILED: {error}")
            else:
                _say(f"{number + 1}/{repetitions} {name}: {found[name][-1]}")
    return found


def measured_by(job: Job, python: str) -> Measured:
    """Run one measurement in an interpreter and a session of its own.

    Raises:
        MeasurementError: it came to no result.
    """
    command = [python, "-m", "benchmarks.peers.measurement", json.dumps(asdict(job))]
    with (
        TemporaryFile("w+") as said,
        TemporaryFile("w+") as complained,
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=said,
            stderr=complained,
            env=os.environ | QUIET,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"it took more than {LIMIT_S:g} s") from None
        finally:
            with suppress(ProcessLookupError):  # it left nobody behind
                os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        complained.seek(0)
        lines = [line for line in said.read().splitlines() if line.startswith("{")]
        if code or not lines:
            raise MeasurementError(f"exit code {code}\n{complained.read()[-4000:]}")
        return Measured(**json.loads(lines[-1]))


def figures(
    operation: str, store: Store, backend: str, ours: Sequence[Measured], other: Sequence[Measured]
) -> Iterator[Figure]:
    """Yield ours beside another store, of the same rounds."""
    for share in SHARES[operation]:
        case = f"{CASES[operation]}{share}: {store.title}"
        own, their = ([SHOWN[share](one) for one in some] for some in (ours, other))
        yield _figure(
            case, backend, "ms" if operation == "latency" else "experiences/s", own, their
        )


def _figure(
    case: str, backend: str, unit: str, ours: Sequence[float], other: Sequence[float]
) -> Figure:
    ratios = [own / their for own, their in zip(ours, other, strict=True)]
    digits = 2 if unit == "ms" else None
    return Figure(
        op="peers",
        case=case,
        backend=backend,
        unit=unit,
        ours=round(median(ours), digits),
        limit=round(median(other), digits),
        ratio=round(median(ratios), 3),
        ratio_low=round(min(ratios), 3),
        ratio_high=round(max(ratios), 3),
        repetitions=len(ratios),
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
