"""Many texts in little memory, to find out which come twice and which are not there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from trinity_buffer.pipeline.verifying.addresses import Integers, joined, lacking


class Names:
    """A set of many texts, kept as 64-bit hashes: 8 bytes each instead of a hundred.

    Hashes are salted per process; that two of 10 million texts share one has a chance of 1 in
    400,000, and what is found here is looked up again before it is told.
    """

    def __init__(self) -> None:
        self._parts: list[Integers] = []
        self._sorted: Integers | None = None

    def add(self, texts: Iterable[object], count: int) -> None:
        """Add ``count`` hashable ``texts``."""
        self._parts.append(np.fromiter(map(hash, texts), np.int64, count))
        self._sorted = None

    @property
    def hashes(self) -> Integers:
        """All of them in order, as often as they were added."""
        if self._sorted is None:
            self._sorted = joined(self._parts)
            self._parts = [self._sorted]
            self._sorted.sort()
        return self._sorted

    def repeated(self) -> set[int]:
        """Return the hashes that were added more than once."""
        hashes = self.hashes
        return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())

    def lacking(self, wanted: Integers) -> npt.NDArray[np.bool_]:
        """Return for each of ``wanted`` whether it was never added."""
        return lacking(self.hashes, wanted)
