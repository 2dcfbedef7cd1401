"""The content digest: what tells "the same again" from "the same address, other content"."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from trinity_buffer.blob import Buffer

DIGEST_SIZE = 16


def content_digest(pieces: Iterable[Buffer]) -> bytes:
    """Return the first 16 bytes of SHA-256 of a canonical head and the buffers that it describes.

    Processors have instructions for it: it takes two thirds of the time of BLAKE2b, and is the
    longest part of a write all the same.
    """
    # Joined first: one call instead of one for each piece, at the price of a copy in the cache.
    return sha256(b"".join(pieces)).digest()[:DIGEST_SIZE]
