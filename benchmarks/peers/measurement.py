"""One measurement of one store, in the interpreter that has its package: prints a line of JSON.

python -m benchmarks.peers.measurement '{"module": "benchmarks.peers.stores.files", ...}'

The fields are those of a `Job`. Imports, connections and the making of rollouts are outside the
clock; the conversion to the store's format, the write until it is acknowledged, and the collation
are inside.
"""

from __future__ import annotations

import json
import multiprocessing
import queue
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

from benchmarks.measuring import percentile
from benchmarks.peers.protocol import Job, Role
from benchmarks.peers.roles import LIMIT_S, START_LIMIT_S, Span, fill, play


@dataclass(frozen=True, slots=True)
class Measured:
    """What one measurement found.

    Attributes:
        per_s: experiences a second.
        steady_per_s: those that came after the first step, which waits for what is opened with it;
            0 where nothing is read alone.
        p50_ms, p99_ms: from the call of ``write`` to the batch; 0 where nothing passed through.
    """

    per_s: float
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    steady_per_s: float = 0.0


class UnfinishedError(Exception):
    """A process of a measurement failed."""


def measured(job: Job) -> Measured:
    """Return what a new store takes for ``job``.

    Raises:
        UnfinishedError: a process failed, or not all of the experiences arrived as they were.
    """
    store = import_module(job.module)
    with (
        tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder,
        store.serving(Path(folder), job) as address,
    ):
        if job.operation == "read":
            _filled(job, address)
        roles = _roles(job, decides=not store.Client.decides_on_its_way)
        return _result(job, _together(roles, job, address))


def _roles(job: Job, *, decides: bool) -> list[Role]:
    """Return the processes of a measurement; ``decides``: advantages have one of their own."""
    writers: list[Role] = ["writer"] * job.writers
    match job.operation:
        case "write":
            return writers
        case "read":
            return ["trainer"]
        case "pass":
            return [*writers, "strategy", "trainer"] if decides else [*writers, "trainer"]


def _result(job: Job, spans: Sequence[Span]) -> Measured:
    """Return the rate from the first beginning to the last row's end, and the delays."""
    last = "writer" if job.operation == "write" else "trainer"
    ends = [span for span in spans if span.role == last]
    seconds = max(span.ended for span in ends) - min(span.began for span in spans)
    if job.operation == "write":
        return Measured(job.experiences / seconds)
    if job.operation == "read":
        (span,) = ends
        later = (span.rows - span.first_rows) / (span.ended - span.first_ended)
        return Measured(job.experiences / seconds, steady_per_s=later)
    delays = [1e3 * delay for span in ends for delay in span.delays]
    return Measured(job.experiences / seconds, percentile(delays, 0.5), percentile(delays, 0.99))


def _filled(job: Job, address: Any) -> None:
    filling = multiprocessing.Process(target=fill, args=(job, address))
    filling.start()
    filling.join()
    if filling.exitcode:
        raise UnfinishedError(f"the process that fills it ended with {filling.exitcode}")


def _together(roles: Sequence[Role], job: Job, address: Any) -> list[Span]:
    """Return what each role did, all of them begun at the same moment."""
    gate = multiprocessing.Barrier(len(roles) + 1)
    results: Any = multiprocessing.Queue()
    processes = []
    try:
        for at, role in enumerate(roles):
            given = (role, at, job, address, gate, results)
            processes.append(multiprocessing.Process(target=play, args=given))
            processes[-1].start()
        with suppress(BrokenBarrierError):  # who broke it says why
            gate.wait(START_LIMIT_S)
        return [_said(results) for _ in processes]
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()
            process.join()


def _said(results: Any) -> Span:
    try:
        said: Span | str = results.get(timeout=LIMIT_S + 30)
    except queue.Empty:
        raise UnfinishedError(f"a process said nothing for {LIMIT_S + 30:g} s") from None
    if isinstance(said, str):
        raise UnfinishedError(said)
    return said


def main() -> None:
    """Measure what the command line describes."""
    # What a package makes of the default context (TorchRL its locks) has to fit our processes.
    multiprocessing.set_start_method("spawn")
    print(json.dumps(asdict(measured(Job(**json.loads(sys.argv[1]))))), flush=True)


if __name__ == "__main__":
    main()
