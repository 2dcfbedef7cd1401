"""One process of the latency benchmark: it says ``ready``, then a line for each write it got.

python -m benchmarks.latency_role strategy URL
python -m benchmarks.latency_role trainer URL          # position of the write, time of delivery
python -m benchmarks.latency_role bare-strategy PATH   # the same, polling a bare sqlite3
python -m benchmarks.latency_role bare-trainer PATH
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare import connect
from benchmarks.throughput import EXPERIMENT, GRPO
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.sync_stream import open_train_stream
from trinity_buffer.store.rows import position_of

BARE_POLL_S = 0.001


def _say(*words: object) -> None:
    print(*words, flush=True)


def strategy(url: str) -> None:
    """Annotate whatever comes, until the experiment is finished."""

    async def follow() -> None:
        async with open_store(url) as store:
            experiment = await store.experiment(EXPERIMENT)
            _say("ready")
            await run_strategy(experiment, "grpo", GRPO, follow=True)

    asyncio.run(follow())


def trainer(url: str) -> None:
    """Say when each group was delivered as a micro-batch; nothing is trained or committed."""
    with open_train_stream(
        url, experiment=EXPERIMENT, strategy="grpo", groups_per_step=1, follow=True
    ) as stream:
        _say("ready")
        for step in stream:
            _say(position_of(step.manifest.experiences[0]), time.monotonic())


def _rows_of(connection: Any, table: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a bare table as they come."""
    seen, version = 0, None
    while True:
        now = connection.execute("PRAGMA data_version").fetchone()[0]
        if now == version:
            time.sleep(BARE_POLL_S)
            continue
        version = now
        query = f"SELECT id, data FROM {table} WHERE id > ? ORDER BY id"
        for row in connection.execute(query, (seen,)).fetchall():
            seen = row[0]
            yield row


def bare_strategy(path: str) -> None:
    """Insert a row for each that comes."""
    with closing(connect(Path(path))) as connection:
        reader = connect(Path(path))  # its own commits must not hide behind data_version
        _say("ready")
        for number, _ in _rows_of(reader, "written"):
            connection.execute("INSERT INTO scored VALUES (?, ?)", (number, b"\0" * 32))


def bare_trainer(path: str) -> None:
    """Read the bytes of each row that was scored."""
    with closing(connect(Path(path))) as connection:
        _say("ready")
        for number, _ in _rows_of(connection, "scored"):
            connection.execute("SELECT data FROM written WHERE id = ?", (number,)).fetchone()
            _say(number, time.monotonic())


ROLES: dict[str, Callable[[str], None]] = {
    "strategy": strategy,
    "trainer": trainer,
    "bare-strategy": bare_strategy,
    "bare-trainer": bare_trainer,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    ROLES[sys.argv[1]](sys.argv[2])
