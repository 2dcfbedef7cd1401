"""How quick a write and a stream could be if all that we do in Python took no time.

python -m benchmarks.floors                  # a line for each case, medians in turns

The floor of a write is the bare transaction of `benchmarks.run`, and before it, for the same
experiences, what no writer with our promises can leave out, each in the fewest calls: the fields of
each experience are looked up, the tensors of each field are copied into one block, and each row
goes through SHA-256. It checks nothing and makes no event. Of several callers, a
second thread does this beside the transaction before.

The floor of a stream is the bare read, and for each step the checksums of its bytes, the tensors of
a padded batch filled from them, and a transaction with a row as long as the event of a lease.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from hashlib import sha256
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_digest

from benchmarks import bare
from benchmarks.bare import Transaction
from benchmarks.measuring import in_turns
from benchmarks.sites import SQLiteSite
from benchmarks.throughput import (
    READ_FAMILIES,
    STORED_PER_CALL,
    keys_of_steps,
    stream_once,
    write_once,
    written_calls,
    written_store,
)
from benchmarks.workload import PROMPT, RESPONSE, ROWS_PER_STEP, RUNS, TASKS, calls, experiences
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
        with written_calls(site, every, per_call, callers) as (url, given, transactions):
            some = list(chain.from_iterable(given))
            runs = (
                partial(write_once, site, given, callers),
                partial(floor_once, site, url, transactions, some),
                partial(site.time_writes, url, transactions),
            )
            found = in_turns(runs, repetitions)
        yield _line("write floor", f"{per_call} per call, {callers} callers", len(some), found)


def _collated(blobs: Sequence[bytes], batch: Mapping[str, Any]) -> None:
    """Check the bytes of a step, and fill the tensors of a padded batch from them."""
    row, length = 0, PROMPT + RESPONSE
    for blob in blobs:
        xxh3_64_digest(blob)
        tokens, logprobs = STORED_PER_CALL * length, STORED_PER_CALL * RESPONSE
        if len(blob) < 4 * (tokens + logprobs):
            continue  # of the light family
        rows = slice(row, row + STORED_PER_CALL)
        batch["input_ids"][rows] = np.frombuffer(blob, np.int32, tokens).reshape(-1, length)
        values = np.frombuffer(blob, np.float32, logprobs, 4 * tokens).reshape(-1, RESPONSE)
        batch["rollout_logprob"][rows, PROMPT:] = values
        row = rows.stop
    batch["attention_mask"][:] = True
    batch["action_mask"][:, PROMPT:] = True
    np.multiply(batch["action_mask"], batch["scores"], out=batch["advantages"])


def stream_floor_once(
    folder: Path, path: Path, steps: Sequence[Sequence[bytes]], leases: Sequence[bytes]
) -> float:
    """Return the seconds in which the ``steps`` are read, collated and leased."""
    shape, other = (ROWS_PER_STEP, PROMPT + RESPONSE), folder / "leases.db"
    numbers = {"input_ids": np.int64, "rollout_logprob": np.float32, "advantages": np.float32}
    masks = dict.fromkeys(("attention_mask", "action_mask"), np.bool_)
    batch = {name: np.zeros(shape, kind) for name, kind in (numbers | masks).items()}
    batch["scores"] = np.ones((ROWS_PER_STEP, 1), np.float32)
    bare.empty_copy(other)
    with closing(bare.connect(path)) as connection, closing(bare.connect(other)) as leasing:
        leasing.execute("CREATE TABLE lease (body BLOB)")
        began = time.perf_counter()
        for keys, body in zip(steps, leases, strict=True):
            _collated(bare.read(connection, keys, READ_FAMILIES), batch)
            leasing.execute("BEGIN IMMEDIATE")
            leasing.execute("INSERT INTO lease VALUES (?)", (body,))
            leasing.execute("COMMIT")
        seconds = time.perf_counter() - began
    for name in (other, Path(f"{other}-wal"), Path(f"{other}-shm")):
        name.unlink(missing_ok=True)
    return seconds


def measure_stream(
    site: SQLiteSite, folder: Path, tasks: int, repetitions: int
) -> Iterator[dict[str, Any]]:
    """Yield a line: the ratios of ours and of the floor to bare reads."""
    with written_store(site, calls(experiences(tasks), STORED_PER_CALL), grpo=True) as url:
        steps, path = keys_of_steps(site, url), site.path(url)
        stream_once(url, "first", "padded", tasks * RUNS)
        with closing(bare.connect(path)) as connection:
            found = connection.execute("SELECT body FROM event WHERE kind = 'BatchLeased'")
            leases = [body for (body,) in found]
        names = (f"floor-{number}" for number in range(repetitions + 1))
        runs = (
            lambda: stream_once(url, next(names), "padded", tasks * RUNS),
            partial(stream_floor_once, folder, path, steps, leases),
            partial(site.time_reads, url, steps, READ_FAMILIES),
        )
        case, number = f"batches of {ROWS_PER_STEP}, padded", tasks * RUNS
        yield _line("stream floor", case, number, in_turns(runs, repetitions))


def _line(op: str, case: str, number: int, seconds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the line of ``number`` experiences that took so many (ours, floor, bare)."""
    ours, floor, limit = seconds
    return {
        "op": op,
        "case": case,
        "ours": _ratio(limit, ours),
        "floor": _ratio(limit, floor),
        "bare_per_s": round(number / statistics.median(limit)),
        "repetitions": len(limit),
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
        site, sizes = SQLiteSite(Path(folder)), (asked.tasks, asked.repetitions)
        for line in chain(measure(site, *sizes), measure_stream(site, Path(folder), *sizes)):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
