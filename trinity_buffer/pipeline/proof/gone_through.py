"""What weights went through: the chain of the manifests of their steps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import reduce


def chain(previous: bytes, digest: bytes) -> bytes:
    """Return the next link of a checkpoint's chain: blake2b-128(previous || digest)."""
    return hashlib.blake2b(previous + digest, digest_size=16).digest()


FIRST_LINK = bytes(16)

NAMED_MANIFESTS = 256
"""Of so many manifests, the last ones, a checkpoint says each; of those before, their chain."""


@dataclass(frozen=True, slots=True)
class GoneThrough:
    """The manifests that weights went through, in order: the last ones, and the chain of the rest.

    It does not grow with the run, and is the same wherever the run was interrupted.

    Attributes:
        length: how many there are.
        before: link of the chain in front of ``last``.
        last: digests of the last ones.
    """

    length: int = 0
    before: bytes = FIRST_LINK
    last: tuple[bytes, ...] = ()

    @property
    def link(self) -> bytes:
        """The link of the chain after all of them."""
        return reduce(chain, self.last, self.before)

    def after(self, *digests: bytes) -> GoneThrough:
        """Return these manifests and then those of ``digests``."""
        last = (*self.last, *digests)
        gone, kept = last[:-NAMED_MANIFESTS], last[-NAMED_MANIFESTS:]
        return GoneThrough(self.length + len(digests), reduce(chain, gone, self.before), kept)
