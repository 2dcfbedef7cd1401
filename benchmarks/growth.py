"""Does what a run costs grow with the run? One store, from 10,000 experiences to 10,000,000.

python -m benchmarks.growth --experiences 10000000 --record    # begin with fewer: the run goes on

The run is explored, annotated and trained as in `benchmarks.verify`. Its last batches before each
power of ten are those of processes of their own (`benchmarks.growth_role`), in rounds: an explorer,
a strategy, a trainer that leaves a step leased, and one that asks; in turns with the same in a run
of the first size. Then it is folded again and verified. What was found lies beside the store, so
that a later call knows it. A line for each operation at each size has the median, and the ratio of
neighbouring rounds; the last lines say which of the largest size keep to their limits.
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
from typing import Any, NamedTuple

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
QUESTIONS = 10
"""Of each kind in a round."""
PASSES = 3_000_000
"""Experiences that `rebuild` and `verify` go through, once or up to three times."""
LIMIT, MEMORY_LIMIT = 1.3, 1.1
"""Times what it was at the first size."""
PASS_LIMIT_S = 60.0
"""Seconds for a million."""
SCALES = {"ms": 1e3, "µs": 1e6}


Took = dict[str, list[tuple[float, float]]]
"""Operation -> what it took each time, of the clock and of the processor; or memory, twice."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an operation took at one size.

    Attributes:
        case: the operation.
        unit: of the values.
        here: one for each round, of the run: what it took each time.
        small: the same of a run of the smallest size, in turns; none of what needs no turns.
    """

    case: str
    unit: str
    here: Sequence[Sequence[tuple[float, float]]]
    small: Sequence[Sequence[tuple[float, float]]] = ()

    def line(self, experiences: int) -> dict[str, Any]:
        """Return the line of it; ``ratio`` is the median over neighbouring rounds."""
        scale = SCALES.get(self.unit, 1.0)
        wall = [one[0] * scale for some in self.here for one in some]
        cpu = [one[1] * scale for some in self.here for one in some]
        line: dict[str, Any] = {
            "op": "growth",
            "case": self.case,
            "experiences": experiences,
            "unit": self.unit,
            "median": _short(statistics.median(wall)),
            "low": _short(min(wall)),
            "high": _short(max(wall)),
            "repetitions": len(wall),
        }
        if self.small:
            line["ratio"] = self._ratio(0)
        if self.unit != "MB":
            line["cpu_median"] = _short(statistics.median(cpu))
        if self.small and self.unit != "MB":
            line["cpu_ratio"] = self._ratio(1)
        return line

    def _ratio(self, place: int) -> float:
        pairs = zip(self.here, self.small, strict=True)
        return _short(statistics.median(_middle(a, place) / _middle(b, place) for a, b in pairs))


def _middle(values: Sequence[tuple[float, float]], place: int) -> float:
    return statistics.median(one[place] for one in values)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def measured(
    url: str, small: str, sizes: tuple[int, int], rounds: int, batches: int
) -> Iterator[Found]:
    """Let the run in ``url`` grow; yield what each operation takes there, and in ``small``.

    Args:
        small: a store that is not there yet, for a run of the smallest size.
        sizes: of the run, and of the smallest.
        rounds: so many processes of each role work at the end of both, one after the other.
        batches: each of them goes through so many.
    """
    both = (url, small)
    for where, size in zip(both, sizes, strict=True):
        _work("fill", where, max(0, size - rounds * batches * TASKS * RUNS))
    took: tuple[list[Took], list[Took]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            took[which].append(_round(both[which], batches))
    for case in took[0][0]:
        unit = "MB" if case.startswith("memory") else "µs" if "per experience" in case else "ms"
        yield Found(case, unit, *([one[case] for one in some] for some in took))
    there = asyncio.run(sizes_of(url))[0]
    passes = max(1, min(3, rounds, PASSES // there))
    for command in ("rebuild", "verify"):
        yield from _passed(command, url, there, passes)


def _round(url: str, batches: int) -> Took:
    """Let a process of each role go on with a run, and one ask about it; return what it took."""
    took, memory = Took(), Took()
    for role in ("explorer", "strategy", "trainer", "reader"):
        said = _work(role, url, QUESTIONS if role == "reader" else batches)
        for case, values in said["seconds"].items():
            took.setdefault(case, []).extend(values)
        memory[f"memory of {role}"] = [(said["largest_mb"],) * 2]
    return took | memory


def _work(role: str, url: str, number: int) -> Any:
    command = (sys.executable, "-m", "benchmarks.growth_role", role, url, str(number))
    return json.loads(run_measured(command)[0])


def _passed(command: str, url: str, there: int, passes: int) -> Iterator[Found]:
    """Yield what a command takes that goes through the whole run, as a user starts it."""
    words = (sys.executable, "-m", "trinity_buffer", command, "--store", url, "--json")
    costs = [run_measured(words)[1] for _ in range(passes)]
    rates = [(cost.wall_s / there * 1e6, cost.cpu_s / there * 1e6) for cost in costs]
    yield Found(command, "s per million", [rates])
    yield Found(f"memory of {command}", "MB", [[(cost.largest_mb,) * 2 for cost in costs]])


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
        last = by_size[sizes[-1]]
        what, limit = _limit(case, last)
        yield {
            **last,
            "sizes": sizes,
            "medians": [by_size[size]["median"] for size in sizes],
            "limited": what,
            "limit": limit,
            "kept": last[what] <= limit,
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


def _lines_at(size: int, place: Place, asked: argparse.Namespace, origin: Row) -> Iterator[Row]:
    url, small = place.url, place.small(size)
    there = asyncio.run(experiences_of(url))
    if there > size:
        print(f"not measured at {size}: the run has {there} already", file=sys.stderr)
        return
    backend = "postgresql" if url.startswith("postgresql") else "sqlite"
    for found in measured(url, small, (size, asked.first), asked.rounds, asked.batches):
        yield {**found.line(size), "backend": backend, **origin}


async def experiences_of(url: str) -> int:
    """Return how many experiences a run has, 0 where there is none yet."""
    try:
        return (await sizes_of(url))[0]
    except UnknownStoreError:
        return 0


class Place(NamedTuple):
    """Where runs are.

    Attributes:
        url: of the run that grows.
        kept: file with the lines about it, if it outlives this process.
        small: makes the URL of a new store.
    """

    url: str
    kept: Path | None
    small: Callable[[int], str]


@contextmanager
def _place(where: str) -> Iterator[Place]:
    if where == "postgresql":
        with PostgresServer() as server:
            url = server.create_database("growth")
            yield Place(url, None, lambda size: server.create_database(f"beside_{size}"))
        return
    path = Path(where)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        kept = path.with_suffix(".growth.jsonl")
        yield Place(where, kept, lambda size: str(Path(folder) / f"beside_{size}.db"))


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
        "--store", default=str(STORE), help="a file, or postgresql: a server that is started"
    )
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}, renew {PAGE}")
    asked = parser.parse_args()
    more = f" --store {asked.store}" if "postgresql" in asked.store else ""
    command = f"python -m benchmarks.growth --experiences {asked.experiences}{more} --record"
    origin = provenance(command)
    sizes = powers(asked.first, asked.experiences)
    with _place(asked.store) as place:
        lines = grown(place.kept, sizes, lambda size: _lines_at(size, place, asked, origin))
    for row in summed_up(lines):
        print(json.dumps(row), flush=True)
        if asked.record:
            record(row)


if __name__ == "__main__":
    main()
