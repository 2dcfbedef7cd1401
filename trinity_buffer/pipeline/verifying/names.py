"""Many texts in little memory, to find out which come twice and which are not there."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from trinity_buffer.pipeline.verifying.addresses import Integers, lacking


class Names:
    """A set of many texts, kept as 64-bit hashes: 8 bytes each instead of a hundred.

    Hashes are salted per process; that two of 10 million texts share one has a chance of 1 in
    400,000, and what is found here is looked up again before it is told.
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
        found = np.frombuffer(self._hashes, np.int64)
        if not self._in_order:
            found.sort()
            self._in_order = True
        return found

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
