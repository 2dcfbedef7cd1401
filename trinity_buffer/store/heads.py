"""The chain over a log: each event's head is a digest over the head before it and the event.

Whoever kept one head can prove all of the past up to it. The bytes are in ``docs/events.md``.
"""

from __future__ import annotations

import struct
from hashlib import sha256

_ORIGIN = b"trinity-buffer log\0"
_NUMBERS = struct.Struct(">qqII")


def origin(experiment: str) -> bytes:
    """Return what stands before the head of the first event of the experiment of this name."""
    return sha256(_ORIGIN + experiment.encode()).digest()


def head_of(
    previous: bytes, position: int, kind: str, actor: str, recorded_at: int, body: bytes
) -> bytes:
    """Return the head of an event: SHA-256 over ``previous`` and all that the event says."""
    what, who = kind.encode(), actor.encode()
    numbers = _NUMBERS.pack(position, recorded_at, len(what), len(who))
    return sha256(b"".join((previous, numbers, what, who, body))).digest()
