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
LOOKED_EVERY_S = 2.0
"""Who waits for a lease looks at it oftener."""


def owner_name() -> str:
    """Return ``host:pid:start:random``, by which others on this machine see whether we live."""
    name = f"{this_host()}:{os.getpid()}:{start_of(os.getpid())}:{uuid.uuid4().hex[:8]}"
    _OWNERS.add(name)
    return name


_OWNERS = set[str]()
"""The owners of this process that may hold a lease."""


def forget_owner(owner: str) -> None:
    """Note that an owner of this process has ended: a lease that it could not give back is free."""
    _OWNERS.discard(owner)


def owner_of_process() -> str:
    """Return the `owner_name` that all of this process share."""
    return _owner_of(os.getpid())


@cache
def _owner_of(_pid: int) -> str:  # a forked child has another name
    return owner_name()


def is_dead(owner: str) -> bool:
    """Return whether ``owner`` is of this machine and certainly gone: its process, or its stream.

    A process that is only paused is not dead: its lease runs out by itself.
    """
    host, pid, start, _ = owner.rsplit(":", 3)
    if not is_this_host(host) or not pid.isdigit():
        return False
    if int(pid) == os.getpid() and start == start_of(os.getpid()):
        return owner not in _OWNERS
    return not lives(int(pid), start)


Held: TypeAlias = tuple[str, int, int] | None
"""(owner, token, expires_at) of a lease, as `promises.holder` returns it."""


class LeaseWatch:
    """Judges, by the monotonic clock of who watches, whether the holder of a lease fell silent."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._seen: Held = None
        self._since = self._looked = time.monotonic()
        self._renewed = False

    def is_silent(self, held: Held) -> bool:
        """Return whether the lease was ``held`` just so for at least its time to live.

        While nobody could look, as with a server that was away, its holder could not renew it.
        """
        now = time.monotonic()
        if held != self._seen:
            self._renewed = self._seen is not None
            self._seen, self._since = held, now
        elif now - self._looked > self._ttl_s / HEARTBEATS_PER_TTL + LOOKED_EVERY_S:
            self._since = now
        self._looked = now
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
