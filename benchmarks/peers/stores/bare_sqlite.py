"""Bare ``sqlite3`` without a store: two inserts a rollout, one transaction a call.

Library, page size, pragmas and checkpoints are ours (`benchmarks.bare`). There are no digests, no
leases, no idempotence and no log; where the reader has come to is known to it alone. Whoever waits
asks each millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from benchmarks.bare import connect, empty_copy
from benchmarks.peers.protocol import Job, StoreClient
from benchmarks.peers.rollouts import RUNS, Array, Batch, Groups, Rollout, padded, scores
from trinity_buffer.store.sqlite import Checkpointer

TABLES = (
    "CREATE TABLE rollout (id INTEGER PRIMARY KEY, number INTEGER UNIQUE, reward REAL, "
    "written_at REAL, tokens INTEGER, info TEXT)",
    "CREATE TABLE content (number INTEGER PRIMARY KEY, data BLOB)",
    "CREATE TABLE decided (id INTEGER PRIMARY KEY, number INTEGER, advantage REAL)",
)
READ = (
    "SELECT decided.id, tokens, written_at, advantage, data FROM decided "
    "JOIN rollout USING (number) JOIN content USING (number) "
    "WHERE decided.id > ? ORDER BY decided.id LIMIT ?"
)


@contextmanager
def serving(folder: Path, job: Job) -> Iterator[Path]:  # noqa: ARG001
    """Make the file; yield its path."""
    path = folder / "bare.db"
    empty_copy(path)
    with closing(connect(path)) as connection:
        for statement in TABLES:
            connection.execute(statement)
    yield path


class Client(StoreClient):
    """A connection."""

    def __init__(self, path: Path) -> None:
        self._connection = connect(path)
        self._checkpointer = Checkpointer(path)
        self._groups = Groups[tuple[int, float]]()
        self._looked_at = self._read = 0

    @override
    def write(self, rollouts: Sequence[Rollout], advantages: Array | None = None) -> None:
        info = json.dumps({"model_version": 0, "temperature": 1.0})
        facts = [
            (one.number, one.reward, one.written_at, len(one.tokens), info) for one in rollouts
        ]
        contents = [(one.number, _packed(one)) for one in rollouts]
        numbers = [one.number for one in rollouts]
        decided = [] if advantages is None else zip(numbers, advantages.tolist(), strict=True)
        columns = "number, reward, written_at, tokens, info"
        self._commit(
            (f"INSERT INTO rollout ({columns}) VALUES (?, ?, ?, ?, ?)", facts),
            ("INSERT INTO content VALUES (?, ?)", contents),
            ("INSERT INTO decided (number, advantage) VALUES (?, ?)", decided),
        )

    @override
    def decide(self, limit: int) -> int:
        query = "SELECT id, number, reward FROM rollout WHERE id > ? ORDER BY id LIMIT ?"
        rows = self._connection.execute(query, (self._looked_at, limit)).fetchall()
        if not rows:
            return 0
        self._looked_at = rows[-1][0]
        added = (self._groups.add(number // RUNS, (number, reward)) for _, number, reward in rows)
        complete = list(chain.from_iterable(added))
        values = scores([reward for _, reward in complete]).tolist()
        decided = zip((number for number, _ in complete), values, strict=True)
        self._commit(("INSERT INTO decided (number, advantage) VALUES (?, ?)", decided))
        return len(complete)

    @override
    def read(self, rows: int) -> Batch | None:
        found = self._connection.execute(READ, (self._read, rows)).fetchall()
        if len(found) < rows:
            return None
        self._read = found[-1][0]
        return padded(
            (*_unpacked(data, tokens), advantage, written_at)
            for _, tokens, written_at, advantage, data in found
        )

    @override
    def close(self) -> None:
        self._checkpointer.close()
        self._connection.close()

    def _commit(self, *inserts: tuple[str, Any]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        for statement, rows in inserts:
            self._connection.executemany(statement, rows)
        self._connection.execute("COMMIT")
        self._checkpointer.notify()


def _packed(one: Rollout) -> bytes:
    mask = np.packbits(one.mask)
    arrays = (one.tokens, one.logprobs, mask)
    sizes = np.array([len(one.mask)], np.int32)
    return b"".join(array.tobytes() for array in (sizes, *arrays)) + one.text.encode()


def _unpacked(data: bytes, tokens: int) -> tuple[Array, Array, Array]:
    """Return tokens, log-probs and mask."""
    answer = int(np.frombuffer(data, np.int32, 1)[0])
    at = 4 + 4 * tokens
    bits = np.frombuffer(data, np.uint8, (answer + 7) // 8, at + 4 * answer)
    return (
        np.frombuffer(data, np.int32, tokens, 4),
        np.frombuffer(data, np.float32, answer, at),
        np.unpackbits(bits, count=answer).view(np.bool_),
    )
