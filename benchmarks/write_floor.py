"""How quick a write could be if all that we do in Python took no time.

python -m benchmarks.write_floor                  # a line for each size of call, medians in turns

The floor is the bare transaction of `benchmarks.run`, and before it, for the same experiences, what
no writer with our promises can leave out, each in the fewest calls: the fields of each experience
are looked up, the tensors of each field are copied into one block, and each row goes through
SHA-256. It checks nothing, makes no event, and never leaves its thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare import Transaction, merged
from benchmarks.measuring import in_turns
from benchmarks.sites import SQLiteSite
from benchmarks.throughput import write_once, written_store
from benchmarks.workload import TASKS, calls, experiences
from trinity_buffer.experience import FAMILIES, Experience

CASES = ((64, 1), (64, 4), (8, 1))
"""(experiences per call, concurrent callers), those of which there are goals."""

TENSORS = ("tokens", "logprobs", "action_mask")
_fields = attrgetter("eid", *(name for names in FAMILIES.values() for name in names))
_address = attrgetter("batch", "task", "run", "step", "suffix")
_tensors = attrgetter(*TENSORS)


def unavoidable(some: Sequence[Experience], memory: dict[str, Any]) -> None:
    """Look up, copy and digest what is written of ``some``.

    Args:
        memory: field -> a tensor for all of its elements, kept from one call to the next.
    """
    eids, *_ = zip(*map(_fields, some), strict=True)
    list(zip(*map(_address, eids), strict=True))
    rows = []
    for name, tensors in zip(TENSORS, zip(*map(_tensors, some), strict=True), strict=True):
        size = sum(tensor.numel() for tensor in tensors)
        if name not in memory or memory[name].numel() < size:
            memory[name] = torch.empty(size, dtype=tensors[0].dtype)
        flat = torch.cat(tensors, out=memory[name][:size])
        rows.append(flat.view(len(some), -1).view(torch.uint8).numpy())
    for row in zip(*rows, strict=True):
        sha256(b"".join(row)).digest()


class _Prepared:
    """Does what is unavoidable for each transaction; ``ahead``: beside the one before it."""

    def __init__(self, given: Sequence[Sequence[Experience]], *, ahead: bool) -> None:
        self._given = given
        self._memory: dict[str, Any] = {}
        self._thread = ThreadPoolExecutor(1) if ahead else None
        self._next: Future[None] | None = None

    def __call__(self, number: int) -> None:
        if self._thread is None:
            unavoidable(self._given[number], self._memory)
            return
        (self._next or self._begin(number)).result()
        self._next = self._begin(number + 1) if number + 1 < len(self._given) else None

    def _begin(self, number: int) -> Future[None]:
        assert self._thread is not None
        return self._thread.submit(unavoidable, self._given[number], self._memory)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def floor_once(
    site: SQLiteSite, url: str, transactions: Sequence[Transaction], given: Sequence[Experience]
) -> float:
    """Return the seconds in which ``given`` is prepared and its ``transactions`` are committed."""
    size = len(given) // len(transactions)
    with closing(_Prepared(calls(given, size), ahead=size > 64)) as prepared:
        return site.time_writes(url, transactions, prepared)


def measure(site: SQLiteSite, tasks: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each case: the ratios of ours and of the floor to bare SQLite."""
    every = experiences(tasks)
    for per_call, callers in CASES:
        some = every if per_call * callers >= 64 else every[: len(every) * per_call // 16]
        given = calls(some, per_call)
        with written_store(site, given, callers=callers) as url:
            events = site.written(url, "ExperiencesRecorded", "experience")
            transactions = merged(events, max(1, callers * len(events) // len(given)))
            runs = (
                partial(write_once, site, given, callers),
                partial(floor_once, site, url, transactions, some),
                partial(site.time_writes, url, transactions),
            )
            ours, floor, limit = in_turns(runs, repetitions)
        yield {
            "op": "write floor",
            "case": f"{per_call} per call, {callers} callers",
            "ours": _ratio(limit, ours),
            "floor": _ratio(limit, floor),
            "bare_per_s": round(len(some) / statistics.median(limit)),
            "repetitions": repetitions,
        }


def _ratio(limit: Sequence[float], seconds: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(limit, seconds, strict=True)), 3)


def main() -> None:
    """Print the lines that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=TASKS, help="groups of 8 runs each")
    parser.add_argument("--repetitions", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(SQLiteSite(Path(folder)), asked.tasks, asked.repetitions):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
