"""Reverb: one server that keeps everything in memory; FIFO tables, each item sampled once.

Reverb computes no advantages: the strategy here is a user's, which takes rows out of one table and
puts them with their advantage into another.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
import torch
from typing_extensions import override

from benchmarks.peers.protocol import Job, Role, StoreClient
from benchmarks.peers.rollouts import (
    PROMPT,
    RESPONSE,
    RUNS,
    TEXT,
    Array,
    Batch,
    Groups,
    Rollout,
    scores,
)

WRITTEN = {
    "tokens": tf.TensorSpec([1, PROMPT + RESPONSE], tf.int32),
    "logprobs": tf.TensorSpec([1, RESPONSE], tf.float32),
    "mask": tf.TensorSpec([1, RESPONSE], tf.bool),
    "text": tf.TensorSpec([1, len(TEXT)], tf.uint8),
    "facts": tf.TensorSpec([1, 3], tf.float64),
}
"""``facts`` are number, reward and moment of writing."""
TABLES = {"written": WRITTEN, "decided": WRITTEN | {"advantage": tf.TensorSpec([1], tf.float32)}}
START_LIMIT_S = 120.0


@contextmanager
def serving(folder: Path, job: Job) -> Iterator[str]:  # noqa: ARG001
    """Run a server in a process of its own; yield its address."""
    ports: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=_serve, args=(ports,), daemon=True)
    server.start()
    try:
        yield f"localhost:{ports.get(timeout=START_LIMIT_S)}"
    finally:
        server.kill()
        server.join()


def _serve(ports: Any) -> None:
    fifo = reverb.selectors.Fifo
    tables = [
        reverb.Table(
            name,
            fifo(),
            fifo(),
            max_size=1_000_000,
            max_times_sampled=1,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=signature,
        )
        for name, signature in TABLES.items()
    ]
    server = reverb.Server(tables=tables)
    ports.put(server.port)
    server.wait()


class Client(StoreClient):
    """A connection, with a writer and a sampler for each table that it uses."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = reverb.Client(address)
        self._writers: dict[str, Any] = {}
        self._samples: dict[str, Iterator[dict[str, Array]]] = {}
        self._groups = Groups[dict[str, Array]]()

    @override
    def prepare(self, role: Role, rows: int) -> None:
        if role != "writer":
            self._sampler("written" if role == "strategy" else "decided", rows)

    @override
    def write(self, rollouts: Sequence[Rollout], advantages: Array | None = None) -> None:
        rows = [_row(one) for one in rollouts]
        self._put("written", rows) if advantages is None else self._decided(rows, advantages)

    @override
    def decide(self, limit: int) -> int:
        came = next(self._sampler("written", limit))
        rows = ({name: values[at] for name, values in came.items()} for at in range(limit))
        added = (self._groups.add(int(row["facts"][0]) // RUNS, row) for row in rows)
        complete = list(chain.from_iterable(added))
        self._decided(complete, scores([row["facts"][1] for row in complete]))
        return len(complete)

    @override
    def read(self, rows: int) -> Batch | None:
        came = next(self._sampler("decided", rows))
        columns = {name: torch.from_numpy(came[name]) for name in ("tokens", "logprobs", "mask")}
        advantages = torch.from_numpy(came["advantage"])[:, None] * columns["mask"]
        return Batch(**columns, advantages=advantages, written_at=came["facts"][:, 2].tolist())

    @override
    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _decided(self, rows: Sequence[dict[str, Array]], advantages: Array) -> None:
        both = zip(rows, advantages, strict=True)
        self._put("decided", [row | {"advantage": value} for row, value in both])

    def _put(self, table: str, rows: Sequence[Mapping[str, Array]]) -> None:
        """Insert an item each, and return when the server has confirmed all of them."""
        writer = self._writer(table)
        for row in rows:
            writer.append(row)
            writer.create_item(table, 1.0, {name: writer.history[name][-1:] for name in row})
        writer.flush()

    def _writer(self, table: str) -> Any:
        if table not in self._writers:
            writer = self._writers[table] = self._client.trajectory_writer(num_keep_alive_refs=1)
            for name in TABLES[table]:
                writer.configure((name,), num_keep_alive_refs=1, max_chunk_length=1)
        return self._writers[table]

    def _sampler(self, table: str, rows: int) -> Iterator[dict[str, Array]]:
        if table not in self._samples:
            items = reverb.TrajectoryDataset.from_table_signature(
                self._address,
                table,
                max_in_flight_samples_per_worker=2 * rows,
                rate_limiter_timeout_ms=-1,
            )
            single = items.map(
                lambda item: {name: values[0] for name, values in item.data.items()},
                num_parallel_calls=2,
            )
            self._samples[table] = single.batch(rows).prefetch(1).as_numpy_iterator()
        return self._samples[table]


def _row(one: Rollout) -> dict[str, Array]:
    return {
        "tokens": one.tokens,
        "logprobs": one.logprobs,
        "mask": one.mask,
        "text": np.frombuffer(one.text.encode(), np.uint8),
        "facts": np.array([one.number, one.reward, one.written_at]),
    }
