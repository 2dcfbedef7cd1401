"""Many rows in 24 bytes: equal rows have equal fingerprints, in whatever order they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from math import isnan
from typing import Any

BITS = 128


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """How many rows there are, and the sum of their digests."""

    count: int
    total: int

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, ...]]) -> Fingerprint:
        """Take in rows of numbers, texts, bytes and None.

        As in SQL on both backends, True is 1, 1.0 is 1, and NaN is nothing.
        """
        count = total = 0
        for row in rows:
            told = repr([*map(_plain, row)]).encode(errors="surrogatepass")
            total += int.from_bytes(blake2b(told, digest_size=BITS // 8).digest(), "big")
            count += 1
        return cls(count, total % (1 << BITS))

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of the rows of both."""
        return Fingerprint(self.count + other.count, (self.total + other.total) % (1 << BITS))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if isnan(value):
            return None
        return int(value) if value.is_integer() else value
    return int(value) if isinstance(value, bool) else value
