"""Plain files: one per call of ``write``, renamed into place; readers list the folder.

A file is a line of JSON and the arrays' own bytes, which is the limit of the approach; what
trainers write instead is in `files_of_lists`. Nothing is synced to the disk, there is one reader of
each folder, and where it has come to is known to it alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from typing_extensions import override

from benchmarks.peers.protocol import Job, StoreClient
from benchmarks.peers.rollouts import Array, Batch, Groups, Rollout, padded, scores

Stage = Literal["written", "decided"]
STAGES: tuple[Stage, ...] = ("written", "decided")


class Row(NamedTuple):
    """A rollout, with its advantage once that is known."""

    rollout: Rollout
    advantage: float | None


@contextmanager
def serving(folder: Path, job: Job) -> Iterator[Path]:  # noqa: ARG001
    """Make the folders; yield the one around them."""
    for stage in STAGES:
        (folder / stage).mkdir()
    yield folder


class Client(StoreClient):
    """Reads each file once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Stage, set[str]] = {stage: set() for stage in STAGES}
        self._groups = Groups[Rollout]()
        self._ready: list[Row] = []

    @override
    def write(self, rollouts: Sequence[Rollout], advantages: Array | None = None) -> None:
        if advantages is None:
            self._put("written", [Row(one, None) for one in rollouts])
        else:
            both = zip(rollouts, advantages.tolist(), strict=True)
            self._put("decided", [Row(one, value) for one, value in both])

    @override
    def decide(self, limit: int) -> int:
        came = [row.rollout for row in self._next("written")]
        complete = list(chain.from_iterable(self._groups.add(one.task, one) for one in came))
        if complete:
            self.write(complete, scores([one.reward for one in complete]))
        return len(complete)

    @override
    def read(self, rows: int) -> Batch | None:
        while len(self._ready) < rows:
            more = self._next("decided")
            if not more:
                return None
            self._ready += more
        some, self._ready = self._ready[:rows], self._ready[rows:]
        return padded(
            (one.tokens, one.logprobs, one.mask, advantage or 0.0, one.written_at)
            for one, advantage in some
        )

    def _put(self, stage: Stage, rows: Sequence[Row]) -> None:
        path = self._folder / stage / f"{time.monotonic_ns():020d}-{os.getpid()}"
        path.write_bytes(self.packed(rows))
        path.rename(path.with_suffix(".ready"))

    def _next(self, stage: Stage) -> list[Row]:
        """Return the rows of the next file, none where there is none."""
        names = {path.name for path in (self._folder / stage).glob("*.ready")} - self._seen[stage]
        if not names:
            return []
        name = min(names)
        self._seen[stage].add(name)
        return list(self.unpacked((self._folder / stage / name).read_bytes()))

    def packed(self, rows: Sequence[Row]) -> bytes:
        """Return what a file holds."""
        return _packed(rows)

    def unpacked(self, data: bytes) -> Iterator[Row]:
        """Yield the rows of a file."""
        return _unpacked(data)


def _packed(rows: Sequence[Row]) -> bytes:
    head = [
        (
            one.number,
            one.reward,
            one.text,
            one.written_at,
            len(one.tokens),
            len(one.mask),
            advantage,
        )
        for one, advantage in rows
    ]
    arrays = ((one.tokens, one.logprobs, one.mask) for one, _ in rows)
    parts = (array.tobytes() for three in arrays for array in three)
    return json.dumps(head).encode() + b"\n" + b"".join(parts)


def _unpacked(data: bytes) -> Iterator[Row]:
    at = data.index(b"\n") + 1
    for number, reward, text, written_at, long, answer, advantage in json.loads(data[:at]):
        arrays = []
        for dtype, size in ((np.int32, long), (np.float32, answer), (np.bool_, answer)):
            arrays.append(np.frombuffer(data, dtype, size, at))
            at += arrays[-1].nbytes
        tokens, logprobs, mask = arrays
        yield Row(Rollout(number, tokens, logprobs, mask, reward, text, written_at), advantage)
