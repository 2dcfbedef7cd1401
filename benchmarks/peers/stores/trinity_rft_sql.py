"""Trinity-RFT's SQL storage on SQLite, in each process itself: its default has an actor of Ray's.

Its advantages are computed before its store; here its own operator takes rows out of one file and
writes them with advantages into another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trinity.algorithm.advantage_fn.grpo_advantage import GRPOGroupedAdvantage
from trinity.buffer import get_buffer_reader, get_buffer_writer
from typing_extensions import override

from benchmarks.peers.protocol import Job, StoreClient
from benchmarks.peers.rollouts import Array, Batch, Rollout
from benchmarks.peers.stores.trinity_rft import batch, experiences, sql


@contextmanager
def serving(folder: Path, job: Job) -> Iterator[Path]:  # noqa: ARG001
    """Yield the folder of the files, which the first writer makes."""
    yield folder


class Client(StoreClient):
    """Writers and readers of both files."""

    def __init__(self, folder: Path) -> None:
        logging.disable(logging.WARNING)
        self._runner = asyncio.Runner()
        written, decided = sql(folder, "written"), sql(folder, "decided")
        self._written, self._decided = get_buffer_writer(written), get_buffer_writer(decided)
        self._to_decide, self._to_train = get_buffer_reader(written), get_buffer_reader(decided)
        self._grpo = GRPOGroupedAdvantage()
        self._runner.run(self._written.acquire())
        self._runner.run(self._decided.acquire())

    @override
    def write(self, rollouts: Sequence[Rollout], advantages: Array | None = None) -> None:
        writer = self._written if advantages is None else self._decided
        self._runner.run(writer.write(experiences(rollouts, advantages)))

    @override
    def decide(self, limit: int) -> int:
        came = self._runner.run(self._to_decide.read(limit))
        decided, _ = self._grpo.process(came)
        self._runner.run(self._decided.write(decided))
        return len(decided)

    @override
    def read(self, rows: int) -> Batch | None:
        return batch(self._runner.run(self._to_train.read(rows)))

    @override
    def close(self) -> None:
        self._runner.close()
