"""Does what a run costs grow with the run? One store, from 10,000 experiences to 10,000,000.

python -m benchmarks.growth --experiences 1000000       # again, with more: the run goes on
python -m benchmarks.growth --experiences 10000000 --record

The run is explored, annotated and trained as in `benchmarks.verify`. Its last batches before each
power of ten are those of processes of their own (`benchmarks.growth_role`), in rounds: an explorer,
a strategy, a trainer that leaves a step leased. Then it is asked, folded again and verified. What
was found lies beside the store, so that a later call knows it. A line for each operation at each
size has the median; the last lines say how much more it is at the largest size than at the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.asking import sizes_of
from benchmarks.measuring import run_measured
from benchmarks.performance import PAGE, RECORD, Row, record
from benchmarks.provenance import provenance
from benchmarks.verify import RUNS, TASKS
from tests.postgres import PostgresServer
from trinity_buffer.errors import UnknownStoreError

STORE = Path(tempfile.gettempdir()) / "trinity-buffer-growth.db"
BATCHES = 24
"""Of a round: 1,536 experiences."""
PASSES = 3_000_000
"""Experiences that `rebuild` and `verify` go through, once or several times."""
LIMIT, MEMORY_LIMIT = 1.3, 1.1
"""Times what it was at the first size."""
PASS_LIMIT_S = 60.0
"""Seconds for a million."""
SCALES = {"ms": 1e3, "µs": 1e6}


@dataclass(frozen=True, slots=True)
class Found:
    """What an operation took at one size.

    Attributes:
        case: the operation.
        unit: of the values.
        values: one of each time that it was done.
        cpu: the same of the processor, if it is a time.
    """

    case: str
    unit: str
    values: Sequence[float]
    cpu: Sequence[float] = ()

    def line(self, experiences: int) -> Row:
        """Return the line of it."""
        line: dict[str, Any] = {
            "op": "growth",
            "case": self.case,
            "experiences": experiences,
            "unit": self.unit,
            "median": _short(statistics.median(self.values)),
            "low": _short(min(self.values)),
            "high": _short(max(self.values)),
            "repetitions": len(self.values),
        }
        cpu = {"cpu_median": _short(statistics.median(self.cpu))} if self.cpu else {}
        return line | cpu


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def measured(url: str, size: int, rounds: int, batches: int) -> Iterator[Found]:
    """Let the run in ``url`` grow to ``size``; yield what each operation takes there.

    Args:
        rounds: so many processes of each role work at the end, one after the other.
        batches: each of them goes through so many.
    """
    before = max(0, size - rounds * batches * TASKS * RUNS)
    seconds: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, list[float]] = {}
    steps = [("fill", before), *[(role, batches) for role in ROLES] * rounds]
    for role, number in [*steps, ("reader", rounds * 10)]:
        said = _work(role, url, number)
        memory.setdefault(role, []).append(said["largest_mb"])
        for case, values in said["seconds"].items():
            seconds.setdefault(case, []).extend(values)
    for case, values in seconds.items():
        unit = "µs" if "per experience" in case else "ms"
        wall, cpu = ([value * SCALES[unit] for value in some] for some in zip(*values, strict=True))
        yield Found(case, unit, wall, cpu)
    del memory["fill"], memory["reader"]
    for role, values in memory.items():
        yield Found(f"memory of {role}", "MB", values)
    there = asyncio.run(sizes_of(url))[0]
    for command in ("rebuild", "verify"):
        yield from _passed(command, url, there)


ROLES = ("explorer", "strategy", "trainer")


def _work(role: str, url: str, number: int) -> Any:
    command = (sys.executable, "-m", "benchmarks.growth_role", role, url, str(number))
    return json.loads(run_measured(command)[0])


def _passed(command: str, url: str, there: int) -> Iterator[Found]:
    """Yield what a command takes that goes through the whole run, as a user starts it."""
    words = (sys.executable, "-m", "trinity_buffer", command, "--store", url, "--json")
    costs = [run_measured(words)[1] for _ in range(max(1, min(3, PASSES // there)))]
    wall = [cost.wall_s / there * 1e6 for cost in costs]
    yield Found(command, "s per million", wall, [cost.cpu_s / there * 1e6 for cost in costs])
    yield Found(f"memory of {command}", "MB", [float(cost.largest_mb) for cost in costs])


def summed_up(lines: Iterable[Row]) -> Iterator[Row]:
    """Yield a line for each operation: its medians by size, and what they are limited by.

    Args:
        lines: of all sizes; of several about the same, the last one counts.
    """
    by_case: dict[str, dict[int, Row]] = {}
    for line in lines:
        by_case.setdefault(line["case"], {})[line["experiences"]] = line
    for case, by_size in by_case.items():
        sizes = sorted(by_size)
        first, last = by_size[sizes[0]], by_size[sizes[-1]]
        ratio = last["median"] / first["median"]
        cpu = {}
        if "cpu_median" in last:
            cpu["cpu_ratio"] = round(last["cpu_median"] / first["cpu_median"], 2)
        what, limit = _limit(case, last)
        yield {
            **last,
            "sizes": sizes,
            "medians": [by_size[size]["median"] for size in sizes],
            "ratio": round(ratio, 2),
            **cpu,
            "limited": what,
            "limit": limit,
            "kept": (ratio if what == "ratio" else last["median"]) <= limit,
        }


def _limit(case: str, last: Row) -> tuple[str, float]:
    """Return what of an operation is limited, its ratio or its median, and how."""
    if last["unit"] == "s per million":
        return "median", PASS_LIMIT_S
    if case in {"memory of rebuild", "memory of verify"}:
        return "median", 100 + 60e-6 * last["experiences"]
    return "ratio", MEMORY_LIMIT if last["unit"] == "MB" else LIMIT


def powers(first: int, last: int) -> list[int]:
    """Return ``first``, ten times as many, and again, up to ``last``."""
    sizes = [first]
    while sizes[-1] * 10 <= last:
        sizes.append(sizes[-1] * 10)
    return sizes


def grown(
    kept: Path | None, sizes: Sequence[int], measure: Callable[[int], Iterable[Row]]
) -> list[Row]:
    """Measure at those of ``sizes`` that were not measured; return all lines there are.

    Args:
        kept: file with the lines of earlier calls, to which those of a size are added together;
            None: nothing is kept.
    """
    text = kept.read_text() if kept is not None and kept.exists() else ""
    lines: list[Row] = [json.loads(line) for line in text.splitlines()]
    known = {line["experiences"] for line in lines}
    for size in sizes:
        if size in known:
            continue
        new = []
        for line in measure(size):
            print(json.dumps(line), flush=True)
            new.append(line)
        lines += new
        if kept is not None:
            with kept.open("a") as file:
                file.write("".join(f"{json.dumps(line)}\n" for line in new))
    return lines


def _lines_at(size: int, url: str, asked: argparse.Namespace, origin: Row) -> Iterator[Row]:
    there = asyncio.run(experiences_of(url))
    if there > size:
        print(f"not measured at {size}: the run has {there} already", file=sys.stderr)
        return
    backend = "postgresql" if url.startswith("postgresql") else "sqlite"
    for found in measured(url, size, asked.rounds, asked.batches):
        yield {**found.line(size), "backend": backend, **origin}


async def experiences_of(url: str) -> int:
    """Return how many experiences a run has, 0 where there is none yet."""
    try:
        return (await sizes_of(url))[0]
    except UnknownStoreError:
        return 0


@contextmanager
def _place(where: str) -> Iterator[tuple[str, Path | None]]:
    """Yield the URL of a store, and where the lines about it are kept."""
    if where == "postgresql":
        with PostgresServer() as server:
            yield server.create_database("growth"), None
    else:
        yield where, None if "://" in where else Path(where).with_suffix(".growth.jsonl")


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--experiences", type=int, default=1_000_000, help="the largest size")
    parser.add_argument("--first", type=int, default=10_000, help="the smallest size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=BATCHES, help="of 64, of each round")
    parser.add_argument(
        "--store", default=str(STORE), help="a file, a URL, or postgresql: a server that is started"
    )
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}, renew {PAGE}")
    asked = parser.parse_args()
    more = f" --store {asked.store}" if "postgresql" in asked.store else ""
    command = f"python -m benchmarks.growth --experiences {asked.experiences}{more} --record"
    origin = provenance(command)
    sizes = powers(asked.first, asked.experiences)
    with _place(asked.store) as (url, kept):
        lines = grown(kept, sizes, lambda size: _lines_at(size, url, asked, origin))
    for row in summed_up(lines):
        print(json.dumps(row), flush=True)
        if asked.record:
            record(row)


if __name__ == "__main__":
    main()
