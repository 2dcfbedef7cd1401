"""TorchRL: a `TensorDictReplayBuffer` over a memory map, which all processes share.

The strategy writes the column of advantages in place. Rows are read when they have theirs, which no
sampler waits for: the reader has a cursor of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from typing_extensions import override

from benchmarks.peers.protocol import Job, StoreClient
from benchmarks.peers.rollouts import RUNS, Array, Batch, Rollout, rollouts, scores


@contextmanager
def serving(folder: Path, job: Job) -> Iterator[Any]:
    """Make the memory map; yield the buffer, which is sent to the processes."""
    yield shared(LazyMemmapStorage(job.experiences, scratch_dir=folder), job)


def shared(storage: Any, job: Job) -> TensorDictReplayBuffer:
    """Return an empty buffer over ``storage``, made so that processes can share it."""
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=job.per_read, shared=True)
    # Before it is shared: otherwise each process would make a storage of its own.
    buffer.extend(_columns(rollouts(RUNS), None))
    buffer.empty()
    return buffer


class Client(StoreClient):
    """The shared buffer, and where this process has come to in it."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._decided = self._read = 0

    @override
    def write(self, rollouts: Sequence[Rollout], advantages: Array | None = None) -> None:
        self._buffer.extend(_columns(rollouts, advantages))

    @override
    def decide(self, limit: int) -> int:
        stop = min(self._written(), self._decided + limit)
        stop -= (stop - self._decided) % RUNS
        if stop == self._decided:
            return 0
        rows = self._buffer.storage.get(slice(self._decided, stop))
        facts = rows["facts"].numpy()
        tasks = facts[:, 0].astype(int).reshape(-1, RUNS) // RUNS
        assert (tasks == tasks[:, :1]).all(), "two writers share a group"
        rows["advantage"].copy_(torch.from_numpy(scores(facts[:, 1])))
        self._decided = stop
        return len(facts)

    @override
    def read(self, rows: int) -> Batch | None:
        stop = self._read + rows
        if self._written() < stop:
            return None
        # A view of the file costs nothing until somebody looks at it: a trainer gets its own rows.
        given = self._buffer.storage.get(slice(self._read, stop)).clone()
        if given["advantage"].isnan().any():
            return None
        self._read = stop
        return Batch(
            given["tokens"],
            given["logprobs"],
            given["mask"],
            given["advantage"][:, None] * given["mask"],
            given["facts"][:, 2].tolist(),
        )

    def _written(self) -> int:
        """Return how many rows are there, all of each."""
        number = len(self._buffer)  # it grows before the rows are there
        self._buffer.can_sample(1)  # this waits for the lock, under which they are written
        return number


def _columns(some: Sequence[Rollout], advantages: Array | None) -> TensorDict:
    """Return the rows as columns; ``facts`` are number, reward and moment of writing."""
    if advantages is None:
        advantages = np.full(len(some), np.nan, np.float32)
    columns = {
        "tokens": np.stack([one.tokens for one in some]),
        "logprobs": np.stack([one.logprobs for one in some]),
        "mask": np.stack([one.mask for one in some]),
        "text": np.stack([np.frombuffer(one.text.encode(), np.uint8) for one in some]),
        "facts": np.array([(one.number, one.reward, one.written_at) for one in some]),
        "advantage": advantages,
    }
    found = {name: torch.from_numpy(values) for name, values in columns.items()}
    return TensorDict(found, batch_size=[len(some)])
