"""Compact sets of addresses, names and batches, for logs of many millions of rows.

Addresses are kept as their differences, compressed; names and runs as 64-bit hashes.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from zlib import compress, decompress

import numpy as np
import numpy.typing as npt

from trinity_buffer.identity import Key

Integers = npt.NDArray[np.int64]

AT_ONCE = 1 << 18
"""Numbers that are looked up in one go: each takes 24 bytes meanwhile."""


def packed(addresses: Integers | Sequence[int]) -> bytes:
    """Return ``addresses`` compressed: of groups that lie side by side, less than a byte each."""
    # Most differ by 1 from the one before.
    return compress(np.diff(np.asarray(addresses, np.int64), prepend=0).tobytes(), 1)


def unpacked(data: bytes) -> Integers:
    """Return the addresses that were `packed`, in their order."""
    return np.cumsum(np.frombuffer(decompress(data), np.int64))


def together(parts: Iterable[Integers]) -> Integers:
    """Return addresses that come in parts, one behind the other."""
    whole = bytearray()  # it grows where it is; joined arrays would be there twice meanwhile
    for part in parts:
        whole += part.tobytes()
    return np.frombuffer(whole, np.int64)


def repeated(addresses: Integers) -> list[int]:
    """Return those that come once more, of addresses in order."""
    again: list[int] = addresses[1:][addresses[1:] == addresses[:-1]].tolist()
    return again


def lacking(known: Integers, wanted: Integers) -> npt.NDArray[np.bool_]:
    """Return for each of ``wanted`` whether it is not in ``known``, which is in order."""
    missing = np.ones(len(wanted), np.bool_)
    for begin in range(0, len(wanted) if len(known) else 0, AT_ONCE):
        page = wanted[begin : begin + AT_ONCE]
        place = np.minimum(np.searchsorted(known, page), len(known) - 1)
        missing[begin : begin + AT_ONCE] = known[place] != page
    return missing


class Names:
    """A set of many texts, kept as 64-bit hashes: 8 bytes each instead of a hundred.

    Hashes are salted per process; that two of 10 million texts share one has a chance of 1 in
    400,000, and what looks repeated is looked up again before it is reported.
    """

    def __init__(self) -> None:
        self._hashes = array("q")  # it grows where it is; parts would be copied to be joined

    def add(self, texts: Iterable[object]) -> None:
        """Add hashable ``texts``."""
        self._hashes.extend(map(hash, texts))

    @property
    def hashes(self) -> Integers:
        """All of them in order, as often as they were added; of no use once there are more."""
        hashes = np.frombuffer(self._hashes, np.int64)
        hashes.sort()
        return hashes

    @property
    def number(self) -> int:
        """How many different ones were added."""
        hashes = self.hashes
        return len(hashes) - len(repeated(hashes))

    def repeated(self) -> set[int]:
        """Return the hashes that were added more than once."""
        return set(repeated(self.hashes))

    def unknown_to(self, other: Names) -> set[int]:
        """Return the hashes of what was added here and not to ``other``."""
        hashes = self.hashes
        return set(hashes[lacking(other.hashes, hashes)].tolist())


@dataclass(slots=True)
class _Batch:
    """What was planned, recorded and sealed of a batch.

    Attributes:
        planned: hashes of its runs that are planned, as far as they are not `complete`.
        runs: of those that were recorded, refused ones included.
        complete: how many planned runs it had when it was sealed with all of them.
        held: experiences that were not refused as late.
    """

    planned: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    runs: array[int] = field(default_factory=lambda: array("q"))
    complete: int = 0
    held: int = 0
    is_planned: bool = False
    is_sealed: bool = False

    def stored(self) -> int:
        """Return how many planned runs there are experiences of."""
        if not len(self.planned):
            return self.complete
        return int(np.isin(self.planned, np.frombuffer(self.runs, np.int64)).sum())


class Batches:
    """Takes in plans, experiences and seals; knows runs by 64-bit hashes, as `Names` does.

    Attributes:
        by_name: name of a batch -> what is known of it.
    """

    def __init__(self) -> None:
        self.by_name = defaultdict[str, _Batch](_Batch)

    def __len__(self) -> int:
        return sum(batch.is_planned or batch.is_sealed for batch in self.by_name.values())

    def plan(self, name: str, tasks: Iterable[Key], rollouts_per_group: int) -> None:
        """Take in the plan of a batch."""
        runs = product((name,), map(str, tasks), range(rollouts_per_group))
        batch = self.by_name[name]
        batch.planned = np.unique(np.array([*map(hash, runs)], np.int64))
        batch.is_planned = True

    def record(
        self, names: Sequence[str], tasks: Iterable[Key], runs: Iterable[int], late: Collection[int]
    ) -> list[int]:
        """Take in experiences, refused ones included; return which of them seals contradict.

        Args:
            names: of their batches.
            tasks, runs: of each.
            late: places of those that were refused as late.
        """
        hashes = [*map(hash, zip(names, map(str, tasks), runs, strict=True))]
        places_of = defaultdict[str, list[int]](list)
        for place, name in enumerate(names):
            places_of[name].append(place)
        contradicted: list[int] = []
        for name, places in places_of.items():
            batch, late_here = self.by_name[name], set(late).intersection(places)
            batch.runs.extend([hashes[place] for place in places])
            batch.held += len(places) - len(late_here)
            contradicted += set(places) - late_here if batch.is_sealed else late_here
        return sorted(contradicted)

    def seal(self, name: str) -> int:
        """Take in that a batch was sealed; return how many experiences it holds."""
        batch = self.by_name[name]
        batch.is_sealed = True
        # Nothing can be added to a batch that has all it planned: a number is enough from here on.
        if (stored := batch.stored()) == len(batch.planned) > 0:
            batch.complete, batch.planned, batch.runs = stored, batch.planned[:0].copy(), array("q")
        return batch.held

    def stored(self, *, sealed_only: bool = False) -> int:
        """Return how many planned runs there are experiences of."""
        batches = self.by_name.values()
        return sum(batch.stored() for batch in batches if batch.is_sealed or not sealed_only)
