"""Many addresses in little memory: those that follow one another are kept as runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

AT_ONCE = 1 << 18
"""Numbers that are looked up in one go: each takes 24 bytes meanwhile."""


def packed(addresses: Integers) -> bytes:
    """Return ``addresses`` as first addresses and lengths of runs, or as they are if that is less.

    An event names experiences of few groups, whose runs lie side by side: a byte an address.
    """
    breaks = np.flatnonzero(np.diff(addresses) != 1) + 1
    if 2 * len(breaks) + 2 >= len(addresses):
        return b"\0" + addresses.tobytes()
    starts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([starts, [len(addresses)]]))
    return b"\1" + np.concatenate([addresses[starts], lengths]).tobytes()


def unpacked(data: bytes) -> Integers:
    """Return what was `packed`, in its order."""
    numbers = np.frombuffer(data, np.int64, offset=1)
    if data[0] == 0:
        return numbers
    firsts, lengths = numbers.reshape(2, -1)
    ends = np.cumsum(lengths)
    found: Integers = np.repeat(firsts - ends + lengths, lengths) + np.arange(ends[-1])
    return found


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
        found = np.empty(self._count, np.int64)
        end = 0
        for part in self._parts:
            some = unpacked(part)
            found[end : end + len(some)] = some
            end += len(some)
        return found


def lacking(known: Integers, wanted: Integers) -> npt.NDArray[np.bool_]:
    """Return for each of ``wanted`` whether it is not in ``known``, which is in order."""
    found = np.ones(len(wanted), np.bool_)
    for begin in range(0, len(wanted) if len(known) else 0, AT_ONCE):
        some = wanted[begin : begin + AT_ONCE]
        place = np.minimum(np.searchsorted(known, some), len(known) - 1)
        found[begin : begin + AT_ONCE] = known[place] != some
    return found
