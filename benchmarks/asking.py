"""How long each answer and each page takes, and what `serve` and `stats` cost: a line for each.

python -m benchmarks.asking                       # a million experiences; again: goes on, or asks
python -m benchmarks.asking --experiences 200000 --store postgresql
python -m benchmarks.asking --only page           # or: answer, as-of, serve, stats, start, streamed

A store is filled as `benchmarks.verify` fills its own, and a file is kept for the next time.
Questions go through `trinity_buffer.inspector`, pages through the application in this process; each
is asked once before it counts. Beside the seconds of the clock stand those of the processor, which
a busy machine changes less; what a PostgreSQL server computes is not among them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import torch
from starlette.testclient import TestClient

from benchmarks.measuring import Cost, percentile, run_measured
from benchmarks.performance import RECORD, record
from benchmarks.provenance import provenance
from benchmarks.streaming_answers import halfway, streamed
from benchmarks.verify import EXPERIMENT, RUNS, STORE, TASKS, fill
from tests.postgres import PostgresServer
from trinity_buffer import inspector as ask
from trinity_buffer.inspector.compare import comparing
from trinity_buffer.inspector.doctor import examine
from trinity_buffer.inspector.source import Source, as_of, now
from trinity_buffer.inspector.step_lines import rows_of_step
from trinity_buffer.pipeline.store import Experiment, Store, open_store
from trinity_buffer.web.app import inspector

ONE, LIST, FOLDED = 0.2, 1.0, 60.0
"""Limits in seconds: about one rollout or step, of any other answer, and as of a position."""
HERE = "http://127.0.0.1:8500"
KINDS = ("answer", "as-of", "page", "serve", "stats", "start", "streamed")

Line = dict[str, Any]
Ask = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Names:
    """What can be asked about, drawn by chance.

    Attributes:
        batches, steps: how many there are.
    """

    batches: int
    steps: int
    chance: random.Random

    def uid(self) -> str:
        """Return the name of a rollout."""
        batch, task, run = (self.chance.randrange(size) for size in (self.batches, TASKS, RUNS))
        return f"e0-{batch}/{task}/{run}/0/"

    def step(self) -> int:
        """Return the number of a gradient step."""
        return self.chance.randint(1, self.steps)


def answers(
    store: Store, experiment: Experiment, names: Names, then: Source | None = None
) -> dict[str, tuple[float, Ask]]:
    """Return name -> its limit, and what asks it."""
    source = then or now(experiment)
    return {
        "stats": (LIST, lambda: ask.overview(store)),
        "doctor": (LIST, lambda: examine(store)),
        "steps": (LIST, lambda: ask.steps(source, after=names.step() - 1)),
        "groups": (LIST, lambda: ask.groups(source)),
        "groups --step": (LIST, lambda: _groups_of(source, names.step())),
        "show": (ONE, lambda: ask.show(source, names.uid())),
        "show --tokens": (ONE, lambda: ask.tokens(source, names.uid())),
        "why": (ONE, lambda: ask.why(source, names.uid())),
        "blame": (ONE, lambda: ask.blame(source, names.step())),
        "rejected": (LIST, lambda: ask.rejections(source)),
        "leases": (LIST, lambda: ask.leases(source)),
        "staleness": (LIST, lambda: ask.staleness(source)),
        "events": (LIST, lambda: _last_events(experiment)),
        "search, first result": (LIST, lambda: _first(ask.search(source, "1 2 3"))),
        "diff, first result": (LIST, lambda: _first(comparing(source, "grpo", "grpo"))),
    }


async def _groups_of(source: Source, step: int) -> None:
    rows = await rows_of_step(source, step)
    named = dict.fromkeys((str(row.eid.batch), str(row.eid.task)) for row in rows)
    await ask.groups(source, named=list(named))


async def _last_events(experiment: Experiment) -> None:
    after = await ask.position_before(experiment, 20)
    async for _ in ask.event_lines(experiment, after=after):
        pass


async def _first(some: AsyncIterator[object]) -> None:
    await anext(some)


def pages(names: Names) -> dict[str, tuple[float, Callable[[], str]]]:
    """Return name -> its limit, and what makes its path."""
    return {
        "overview": (LIST, lambda: ""),
        "steps": (LIST, lambda: f"steps?after={names.step() - 1}"),
        "step": (LIST, lambda: f"steps/{names.step()}"),
        "groups": (LIST, lambda: "groups"),
        "batch": (LIST, lambda: f"groups?batch={names.uid().partition('/')[0]}"),
        "rollout": (LIST, lambda: f"rollout?uid={names.uid()}&overlay=advantage"),
        "rejected": (LIST, lambda: "rejected"),
        "staleness": (LIST, lambda: f"staleness?after={names.step() - 1}"),
        "diff": (LIST, lambda: "diff?first=grpo&second=grpo"),
        "search": (LIST, lambda: "search?text=1+2+3"),
        "search of what nobody said": (LIST, lambda: "search?text=zebra"),
        "events": (LIST, lambda: "events"),
        "metrics": (LIST, lambda: "../metrics"),
    }


def seconds_of(once: Callable[[], object], repetitions: int) -> Line:
    """Return percentiles of the seconds of ``once``, of the clock and of this process."""
    wall, cpu = [], []
    for number in range(repetitions + 1):
        began, worked = time.perf_counter(), time.process_time()
        once()
        if number:  # the first one warms caches, as a server has them
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - worked)
    shares = {"p50": 0.5, "p95": 0.95}
    told = {f"{name}_s": round(percentile(wall, share), 4) for name, share in shares.items()}
    told |= {f"cpu_{name}_s": round(percentile(cpu, share), 4) for name, share in shares.items()}
    return {**told, "repetitions": repetitions}


def asked(url: str, names: Names, repetitions: int) -> Iterator[Line]:
    """Yield a line for each answer of the query layer."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        store = runner.run(stack.enter_async_context(open_store(url, read_only=True)))
        try:
            experiment = runner.run(store.experiment(EXPERIMENT))
            for name, (limit, question) in answers(store, experiment, names).items():
                found = seconds_of(lambda q=question: runner.run(_awaited(q)), repetitions)  # type: ignore[misc]
                yield {"case": f"answer: {name}", "limit_s": limit, **found}
        finally:
            runner.run(stack.aclose())


AS_OF = ("steps", "groups", "show", "show --tokens", "why", "blame", "leases", "staleness")


def asked_then(url: str, names: Names, repetitions: int) -> Iterator[Line]:
    """Yield a line for each answer as of an earlier position, which is opened each time."""
    names = Names(max(1, names.batches // 2), max(1, names.steps // 2), names.chance)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        store = runner.run(stack.enter_async_context(open_store(url, read_only=True)))
        try:
            experiment = runner.run(store.experiment(EXPERIMENT))
            position = runner.run(halfway(now(experiment), names.steps))
            for name in AS_OF:

                async def once(name: str = name) -> None:
                    async with as_of(experiment, position) as then:
                        await answers(store, experiment, names, then)[name][1]()

                found = seconds_of(lambda once=once: runner.run(once()), repetitions)  # type: ignore[misc]
                yield {"case": f"answer: {name} --as-of", "limit_s": FOLDED, **found}
        finally:
            runner.run(stack.aclose())


async def _awaited(question: Ask) -> None:
    await question()


def shown(url: str, names: Names, repetitions: int) -> Iterator[Line]:
    """Yield a line for each page of the inspector, made in this process."""
    with TestClient(inspector(url), base_url=HERE) as client:
        for name, (limit, path) in pages(names).items():
            found = seconds_of(lambda p=path: _page(client, p()), repetitions)  # type: ignore[misc]
            yield {"case": f"page: {name}", "limit_s": limit, **found}


def _page(client: Any, path: str) -> None:
    answer = client.get("/metrics" if path == "../metrics" else f"/{EXPERIMENT}/{path}")
    if answer.status_code != 200:
        raise SystemExit(f"{path}: {answer.status_code}: {answer.text[:500]}")


def served(url: str, names: Names, repetitions: int) -> Iterator[Line]:
    """Yield the memory that `serve` takes after each page was asked for ``repetitions`` times."""
    command = (sys.executable, "-m", "trinity_buffer", "serve", "--port", "0", "--store", url)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None  # a pipe
            base = server.stdout.readline().rpartition(": ")[2].strip()
            with httpx2.Client(base_url=base, timeout=120) as client:
                for _ in range(repetitions):
                    for _, path in pages(names).values():
                        _page(client, path())
            peak = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
        finally:
            server.terminate()
    yield {"case": "serve", "largest_mb": int(peak[0]) // 1024, "limit_mb": 300}


def commanded(url: str, _names: Names, repetitions: int) -> Iterator[Line]:
    """Yield what the command `stats` takes as a whole process, beside its help and any help."""
    ours = (sys.executable, "-m", "trinity_buffer")
    commands = {
        "stats": (*ours, "stats", "--store", url),
        "stats --help": (*ours, "stats", "--help"),
        "--help": (*ours, "--help"),
    }
    took = in_turns(commands, repetitions)
    for name, costs in took.items():
        yield {"case": f"command: {name}", **_medians(costs), "repetitions": repetitions}


IMPORTS = "import sqlalchemy, aiosqlite, rich.console, rich.table"


def started(_url: str, _names: Names, repetitions: int) -> Iterator[Line]:
    """Yield how long commands take to start, beside what nobody can be quicker than."""
    python = (sys.executable, "-c")
    with TemporaryDirectory() as folder:
        small = str(Path(folder) / "small.db")
        asyncio.run(fill(small, TASKS * RUNS, Path(folder) / "acks"))
        ours = (sys.executable, "-m", "trinity_buffer")
        commands = {
            "--help": (*ours, "--help"),
            "import typer": (*python, "import typer"),
            "question": (*ours, "stats", "--store", small),
            "imports of a question": (*python, IMPORTS),
        }
        took = in_turns(commands, repetitions)
    for name, beside, limit in (
        ("--help", "import typer", 2.0),
        ("question", "imports of a question", 1.5),
    ):
        pairs = zip(took[name], took[beside], strict=True)
        ratio = statistics.median(one.wall_s / other.wall_s for one, other in pairs)
        found = {"ratio": round(ratio, 2), "limit": limit, "beside": beside}
        yield {
            "case": f"start: {name}",
            **_medians(took[name]),
            **found,
            "repetitions": repetitions,
        }


def in_turns(commands: Mapping[str, tuple[str, ...]], repetitions: int) -> dict[str, list[Cost]]:
    """Return name -> what each run of its command took; one after the other, and again."""
    took: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(repetitions):
        for name, words in commands.items():
            _, cost = run_measured(words)
            took[name].append(cost)
    return took


def _medians(costs: Sequence[Cost]) -> Line:
    wall = statistics.median(cost.wall_s for cost in costs)
    cpu = statistics.median(cost.cpu_s for cost in costs)
    return {"p50_s": round(wall, 3), "cpu_p50_s": round(cpu, 3)}


MEASURES = dict(
    zip(KINDS, (asked, asked_then, shown, served, commanded, started, streamed), strict=True)
)


async def sizes_of(url: str) -> tuple[int, int, int]:
    """Return how many experiences, batches and committed steps there are."""
    async with open_store(url, read_only=True) as store:
        (one,) = (await ask.overview(store, EXPERIMENT)).experiments
        return one.experiences, one.batches, one.trainers[0].committed


@contextmanager
def filled(where: str, wanted: int) -> Iterator[str]:
    """Open a store with ``wanted`` experiences: a file or a URL, or a server of its own."""
    with ExitStack() as stack:
        url, folder = where, Path(where).with_suffix(".acks")
        if where == "postgresql":
            url = stack.enter_context(PostgresServer()).create_database("asking")
        if "://" in url:
            folder = Path(stack.enter_context(TemporaryDirectory()))
        asyncio.run(fill(url, wanted, folder))
        yield url


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--experiences", type=int, default=1_000_000)
    parser.add_argument(
        "--store", default=STORE, help="a file, a URL, or postgresql: a server that is started"
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--only", default=",".join(KINDS), help="some of " + ", ".join(KINDS))
    parser.add_argument("--record", action="store_true", help=f"append to {RECORD}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python -m benchmarks.asking --experiences {given.experiences} --record"
    with filled(given.store, given.experiences) as url:
        experiences, batches, steps = asyncio.run(sizes_of(url))
        names = Names(batches, steps, random.Random(0))
        backend = "postgresql" if url.startswith("postgresql") else "sqlite"
        origin = provenance(command if backend == "sqlite" else f"{command} --store postgresql")
        for kind in given.only.split(","):
            for line in MEASURES[kind](url, names, given.repetitions):
                row = {"op": "ask", "backend": backend, "experiences": experiences, **line}
                print(json.dumps(row), flush=True)
                if given.record:
                    record({**row, **origin})


if __name__ == "__main__":
    main()
