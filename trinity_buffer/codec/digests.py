"""The content digest: what tells "the same again" from "the same address, other content"."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from trinity_buffer.codec.objects import Buffer

DIGEST_SIZE = 16


def content_digest(head: bytes, buffers: Iterable[Buffer]) -> bytes:
    """Return BLAKE2b-128 of a canonical ``head`` and the raw buffers whose lengths it states."""
    digest = blake2b(head, digest_size=DIGEST_SIZE)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()
