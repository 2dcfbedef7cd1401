"""Trinity Buffer beside other people's experience stores, in one interleaved run.

python -m benchmarks.peers              # all; the first time, their packages are installed
python -m benchmarks.peers --peers bare_sqlite,files --repetitions 1 --experiences 512
python -m benchmarks.peers --record     # kept, and in docs/proofs/performance.md

Each measurement is of a new store, with processes of its own. In each round each store has its
turn, and another one begins. Prints a line of JSON a figure: ours beside one other store, medians
of all rounds. A store that cannot be installed, or fails in one round, has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import OURS, STORES
from benchmarks.peers.comparison import OPERATIONS, figures, rounds
from benchmarks.peers.measurement import Measured
from benchmarks.peers.protocol import Job
from benchmarks.performance import PAGE, RECORD, record
from benchmarks.provenance import provenance

MULTIPLE = 512
"""Two writers with whole calls each, and two whole steps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    asked = _asked(arguments)
    if asked.folder:
        os.environ["TMPDIR"] = str(asked.folder)  # where measurements make their own
    names = [OURS, *asked.peers]
    pythons = _installed(names)
    failed = len(pythons) < len(names)
    for operation in asked.only:
        origin = provenance(_command(operation, asked))
        job = _sized(OPERATIONS[operation], asked)
        found = rounds(job, pythons, asked.repetitions)
        failed |= len(found) < len(pythons)
        for row in _rows(operation, job, found):
            print(json.dumps(row | origin), flush=True)
            if asked.record:
                record(row | origin)
    return int(failed)


def _sized(job: Job, asked: argparse.Namespace) -> Job:
    number = min(job.experiences, asked.experiences or job.experiences)
    return replace(job, experiences=number, backend=asked.backend)


def _rows(
    operation: str, job: Job, found: Mapping[str, Sequence[Measured]]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of an operation; none where ours failed, and none of others that did."""
    for name in found if OURS in found else ():
        store = STORES[name]
        of = {"experiences": job.experiences, "version": store.version}
        if name != OURS:
            some = figures(operation, store, job.backend, found[OURS], found[name])
            yield from ({**asdict(figure), **of} for figure in some)


def _installed(names: Sequence[str]) -> dict[str, str]:
    """Return store -> interpreter of those that could be installed."""
    found = {}
    for name in names:
        try:
            found[name] = STORES[name].python()
        except subprocess.CalledProcessError as error:
            print(f"{name}: FAILED: cannot be installed: {error}", file=sys.stderr)
    return found


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    others = [name for name in STORES if name != OURS]
    parser.add_argument("--peers", default=",".join(others), help="stores, with commas")
    parser.add_argument("--only", default=",".join(OPERATIONS), help="operations, with commas")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--experiences", type=int, help=f"fewer, a multiple of {MULTIPLE}")
    parser.add_argument("--backend", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--folder", type=Path, help="where the stores' files lie meanwhile")
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}, renew {PAGE}")
    asked = parser.parse_args(arguments)
    asked.peers, asked.only = asked.peers.split(","), asked.only.split(",")
    for given, known in ((asked.peers, others), (asked.only, list(OPERATIONS))):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"no {', '.join(unknown)}: there are {', '.join(known)}")
    if (asked.experiences or 0) % MULTIPLE:
        parser.error(f"--experiences {asked.experiences}: give a multiple of {MULTIPLE}")
    return asked


def _command(operation: str, asked: argparse.Namespace) -> str:
    """Return what records the figures of one operation again."""
    number = f" --experiences {asked.experiences}" if asked.experiences else ""
    return (
        f"python -m benchmarks.peers --only {operation} --peers {','.join(asked.peers)} "
        f"--backend {asked.backend} --repetitions {asked.repetitions}{number} --record"
    )


if __name__ == "__main__":
    sys.exit(main())
