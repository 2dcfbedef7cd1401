"""Which planned rollouts are stored: of a batch that is complete, only their number is kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np

from trinity_buffer.identity import Key
from trinity_buffer.pipeline.verifying.addresses import Integers


class PlannedRuns:
    """Takes in plans, experiences and seals; knows runs by 64-bit hashes, as `names.Names` does."""

    def __init__(self) -> None:
        self._complete = 0
        self._planned: dict[str, Integers] = {}
        self._recorded: dict[str, array[int]] = {}
        self._sealed: set[str] = set()

    def planned(self, batch: str, tasks: Iterable[Key], rollouts_per_group: int) -> None:
        """Take in the plan of a batch."""
        runs = product((batch,), map(str, tasks), range(rollouts_per_group))
        self._planned[batch] = np.unique(np.array([*map(hash, runs)], np.int64))

    def recorded(self, batches: Sequence[str], tasks: Iterable[Key], runs: Iterable[int]) -> None:
        """Take in experiences, refused ones included."""
        hashes = map(hash, zip(batches, map(str, tasks), runs, strict=True))
        if len(set(batches)) == 1:
            self._recorded.setdefault(batches[0], array("q")).extend(hashes)
            return
        for batch, run in zip(batches, hashes, strict=True):
            self._recorded.setdefault(batch, array("q")).append(run)

    def sealed(self, batch: str) -> None:
        """Take in that a batch was sealed; if all that it planned is stored, forget which."""
        if self._stored(batch) == len(self._planned.get(batch, ())) > 0:
            self._complete += len(self._planned.pop(batch))
            del self._recorded[batch]
        else:
            self._sealed.add(batch)

    def stored_of_sealed(self) -> int:
        """Return how many planned runs of sealed batches there are experiences of."""
        return self._complete + sum(map(self._stored, self._sealed))

    def stored(self) -> int:
        """Return how many planned runs there are experiences of."""
        return self._complete + sum(map(self._stored, self._planned))

    def _stored(self, batch: str) -> int:
        if batch not in self._planned or batch not in self._recorded:
            return 0
        there = np.frombuffer(self._recorded[batch], np.int64)
        return int(np.isin(self._planned[batch], there).sum())
