"""Compact sets of addresses, names and planned runs, for logs of many millions of rows.

Addresses that follow one another are kept as runs; names and runs as 64-bit hashes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from trinity_buffer.identity import Key

Integers = npt.NDArray[np.int64]

AT_ONCE = 1 << 18
"""Numbers that are looked up in one go: each takes 24 bytes meanwhile."""


def packed(addresses: Integers) -> bytes:
    """Return ``addresses`` as first addresses and lengths of runs, or as they are if that is less.

    An event names experiences of few groups, whose runs lie side by side: a byte an address.
    """
    breaks = np.flatnonzero(np.diff(addresses) != 1) + 1
    # A run takes two numbers, so that short ones would be larger than their addresses.
    if 2 * len(breaks) + 2 >= len(addresses):
        return b"\0" + addresses.tobytes()
    starts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([starts, [len(addresses)]]))
    return b"\1" + np.concatenate([addresses[starts], lengths]).tobytes()


def unpacked(data: bytes) -> Integers:
    """Return the addresses that were `packed`, in their order."""
    numbers = np.frombuffer(data, np.int64, offset=1)
    if data[0] == 0:
        return numbers
    firsts, lengths = numbers.reshape(2, -1)
    ends = np.cumsum(lengths)
    addresses: Integers = np.repeat(firsts - ends + lengths, lengths) + np.arange(ends[-1])
    return addresses


class Addresses:
    """Addresses, packed as they come, in this order."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, addresses: Integers) -> None:
        """Add ``addresses`` behind the others."""
        self._parts.append(packed(addresses))
        self._count += len(addresses)

    def all(self) -> Integers:
        """Return all of them, 8 bytes each."""
        return together(self._count, map(unpacked, self._parts))

    def below(self, end: int) -> Iterator[Integers]:
        """Yield those below ``end``, a stretch at a time, of addresses that were added in order."""
        stretch: list[Integers] = []
        count = 0
        for part in map(unpacked, self._parts):
            stretch.append(part[: np.searchsorted(part, end)])
            count += len(stretch[-1])
            if len(stretch[-1]) < len(part):
                break
            if count >= AT_ONCE:
                yield np.concatenate(stretch)
                stretch, count = [], 0
        if stretch:
            yield np.concatenate(stretch)


def together(count: int, parts: Iterable[Integers]) -> Integers:
    """Return ``count`` addresses that come in parts, one behind the other."""
    addresses = np.empty(count, np.int64)
    end = 0
    for part in parts:
        addresses[end : end + len(part)] = part
        end += len(part)
    return addresses


def repeated(addresses: Integers) -> list[int]:
    """Return those that come once more, of addresses in order."""
    again: list[int] = []
    for begin in range(1, len(addresses), AT_ONCE):
        page = addresses[begin : begin + AT_ONCE]
        again += page[page == addresses[begin - 1 : begin + AT_ONCE - 1][: len(page)]].tolist()
    return again


def beside(stretches: Iterable[Integers], others: Integers) -> Iterator[tuple[Integers, Integers]]:
    """Yield each stretch, and which of ``others`` lie up to its end; at last, those behind all.

    Both are in order.
    """
    at = 0
    for stretch in stretches:
        if len(stretch):
            end = int(np.searchsorted(others, stretch[-1], "right"))
            yield stretch, others[at:end]
            at = end
    yield np.empty(0, np.int64), others[at:]


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
        self._in_order = True

    def add(self, texts: Iterable[object]) -> None:
        """Add hashable ``texts``."""
        self._hashes.extend(map(hash, texts))
        self._in_order = False

    @property
    def hashes(self) -> Integers:
        """All of them in order, as often as they were added; of no use once there are more."""
        hashes = np.frombuffer(self._hashes, np.int64)
        if not self._in_order:
            hashes.sort()
            self._in_order = True
        return hashes

    @property
    def number(self) -> int:
        """How many different ones were added."""
        hashes = self.hashes
        return len(hashes) - int((hashes[1:] == hashes[:-1]).sum())

    def repeated(self) -> set[int]:
        """Return the hashes that were added more than once."""
        hashes = self.hashes
        return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())

    def lacking(self, wanted: Integers) -> npt.NDArray[np.bool_]:
        """Return for each of ``wanted`` whether it was never added."""
        return lacking(self.hashes, wanted)


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
        # Nothing can be added to a batch that has all it planned: a number is enough from here on.
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
