"""Leases as all who hold one see them: who holds it, whether he lives, whether he fell silent."""

from __future__ import annotations

import os
import time
import uuid
from functools import cache
from typing import TypeAlias

from trinity_buffer.pipeline.events import now_us
from trinity_buffer.pipeline.processes import is_this_host, lives, start_of, this_host

TTL_S = 30.0
HEARTBEATS_PER_TTL = 4


def owner_name() -> str:
    """Return ``host:pid:start:random``, by which others on this machine see whether we live."""
    return f"{this_host()}:{os.getpid()}:{start_of(os.getpid())}:{uuid.uuid4().hex[:8]}"


def owner_of_process() -> str:
    """Return the `owner_name` that all of this process share."""
    return _owner_of(os.getpid())


@cache
def _owner_of(_pid: int) -> str:  # a forked child has another name
    return owner_name()


def is_dead(owner: str) -> bool:
    """Return whether ``owner`` is a process of this machine that is certainly gone.

    A process that is only paused is not dead: its lease runs out by itself.
    """
    host, pid, start, _ = owner.rsplit(":", 3)
    if not is_this_host(host) or not pid.isdigit():
        return False
    return not lives(int(pid), start)


Held: TypeAlias = tuple[str, int, int] | None
"""(owner, token, expires_at) of a lease, as `promises.holder` returns it."""


class LeaseWatch:
    """Judges, by the monotonic clock of who watches, whether the holder of a lease fell silent."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._seen: Held = None
        self._since = time.monotonic()
        self._renewed = False

    def is_silent(self, held: Held) -> bool:
        """Return whether the lease was ``held`` just so for at least its time to live."""
        if held != self._seen:
            self._renewed = self._seen is not None
            self._seen, self._since = held, time.monotonic()
        return self.silent_s >= self._ttl_s

    @property
    def silent_s(self) -> float:
        """For how many seconds the lease was held just as it is."""
        return time.monotonic() - self._since

    @property
    def renewed_s(self) -> float:
        """How many seconds ago it was renewed; by its holder's clock where we did not see it."""
        if self._renewed or self._seen is None:
            return self.silent_s
        return max(self.silent_s, (now_us() - self._seen[2]) / 1e6 + self._ttl_s)
