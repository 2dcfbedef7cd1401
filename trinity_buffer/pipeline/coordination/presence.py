"""Process heartbeats, so that a waiting process can name the one it waits for.

A process of this machine is also checked directly, by its number and start time. Process numbers
are comparable only within one PID namespace: containers have their own, so a host is identified by
more than its name.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path

import anyio

from trinity_buffer.errors import StoreBusyError, StoreError
from trinity_buffer.pipeline.background import running
from trinity_buffer.pipeline.handle import now_us
from trinity_buffer.store import leases
from trinity_buffer.store.database import Database
from trinity_buffer.store.leases import PresenceRow
from trinity_buffer.store.transaction import Transaction

PROC = Path("/proc")
"""Where Linux describes processes. Without it, as on macOS, only their numbers can be checked."""

_SECOND_US = 1_000_000
_ENDED = ("Z", "X")  # process states: zombie, dead


def this_host() -> str:
    """Return the identity of this machine, ``name#digest``, or just its name without /proc.

    The digest covers the boot id and the PID namespace.
    """
    name = socket.gethostname()
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return name
    return f"{name}#{sha256(f'{boot}:{namespace}'.encode()).hexdigest()[:8]}"


def is_this_host(host: str) -> bool:
    """Return whether process numbers stored with ``host`` are those of this machine.

    Older versions stored the name alone, which then has to suffice.
    """
    return host in (this_host(), socket.gethostname())


def lives(pid: int, start: str = "") -> bool:
    """Return whether process ``pid`` is alive and, where both are known, started at ``start``."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user, so it exists
        pass
    state, started = _stat_of(pid)
    return state not in _ENDED and (not start or not started or start == started)


def is_paused(pid: int) -> bool:
    """Return whether the process ``pid`` is stopped (``kill -STOP``); False without /proc."""
    return _stat_of(pid)[0] == "T"


def start_of(pid: int) -> str:
    """Return the start of a process in ticks since boot; "" without /proc."""
    return _stat_of(pid)[1]


def _stat_of(pid: int) -> tuple[str, str]:
    """Return (state, start) of a process, both "" without /proc."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


FIRST_AFTER_S = 1.0
"""The first heartbeat comes after so long: a shorter task need not announce itself."""

SEEN_EVERY_S = 30.0
UNSEEN_S = 120.0
"""A process of another machine counts as gone after so long without a heartbeat."""


AT_WORK = "at work"
"""Second role of a process while it computes something that will become an event."""


class Presence:
    """Records heartbeats of this process in one role; does nothing in a read-only store.

    Args:
        database: database of the store.
        experiment: key of the experiment.
        role: ``explorer``, ``strategy``, ``trainer`` or ``rank N``; `AT_WORK`.
        name: actor, annotation set or trainer.

    Attributes:
        waiting_for: the reported reason why it waits; None: it works.
    """

    def __init__(self, database: Database, experiment: int, role: str, name: str) -> None:
        self._database = database
        self._experiment = experiment
        self.role, self.name = role, name
        self._started_at = 0
        self.waiting_for: str | None = None
        self._reported: str | None = None
        self._next = time.monotonic() + FIRST_AFTER_S

    @property
    def due_s(self) -> float:
        """Seconds until the next heartbeat."""
        never = self._database.read_only
        return math.inf if never else max(0.0, self._next - time.monotonic())

    async def seen(self, *, at_once: bool = False) -> None:
        """Record a heartbeat if one is due or `waiting_for` has changed.

        If the store is busy, the heartbeat is left to the next call.

        Args:
            at_once: record the first heartbeat now, even if the process may end soon.
        """
        row = self._news(at_once=at_once)
        if row is not None:
            with suppress(StoreBusyError):
                await self._database.write(leases.record_presence, self._experiment, row)

    def first(self) -> PresenceRow:
        """Return the row of a heartbeat that is written in the caller's transaction."""
        self._started_at = self._started_at or now_us()
        self._reported, self._next = self.waiting_for, time.monotonic() + SEEN_EVERY_S
        return self._row()

    def note(self, tx: Transaction) -> None:
        """Record a heartbeat in a transaction that happens anyway."""
        row = self._news()
        if row is not None:
            leases.record_presence(tx, self._experiment, row)

    async def keep(self) -> None:
        """Record heartbeats until cancelled, also while the process is busy elsewhere.

        Errors of the store are left to the code that works with it.
        """
        while True:
            await anyio.sleep(min(self.due_s, SEEN_EVERY_S))
            with suppress(StoreError):
                await self.seen()

    @asynccontextmanager
    async def heartbeats(self) -> AsyncIterator[None]:
        """Record heartbeats inside the context, and remove the row at the end."""
        try:
            async with running(self.keep):
                yield
        finally:
            await self.gone()

    async def gone(self) -> None:
        """Remove the row; if the store cannot be reached, it expires by itself."""
        if self._started_at:
            with anyio.CancelScope(shield=True):
                await self._database.try_to_write(
                    leases.remove_presence, self._experiment, self._row()
                )
        self._started_at = 0

    async def keep_at_work(self, is_under_way: Callable[[], bool], every_s: float) -> None:
        """Record that the process is at work, so that its run does not count as stalled.

        Until cancelled, it looks every ``every_s`` seconds whether work is under way; the row of
        the role `AT_WORK` is removed when it is not.
        """
        name = f"{self.role} {self.name}"
        presence = Presence(self._database, self._experiment, AT_WORK, name)
        try:
            while True:
                await anyio.sleep(min(every_s, SEEN_EVERY_S))
                with suppress(StoreError):  # the code that uses the store reports its errors
                    if is_under_way():
                        await presence.seen(at_once=True)
                    else:
                        await presence.gone()
        finally:
            await presence.gone()

    def is_own(self, row: PresenceRow) -> bool:
        """Return whether this presence wrote ``row``."""
        is_self = is_this_host(row.host) and row.pid == os.getpid()
        return is_self and (row.role, row.name) == (self.role, self.name)

    def is_namesake(self, row: PresenceRow) -> bool:
        """Return whether ``row`` is another live process with the same role and name."""
        same = (row.role, row.name) == (self.role, self.name)
        return same and not self.is_own(row) and is_here(row)

    def _news(self, *, at_once: bool = False) -> PresenceRow | None:
        """Return the heartbeat that is due and count it as sent; None if none is due."""
        due = time.monotonic() >= self._next or self.waiting_for != self._reported
        first = at_once and not self._started_at
        if not (due or first) or self._database.read_only:
            return None
        return self.first()

    def _row(self) -> PresenceRow:
        return PresenceRow(
            self.role,
            self.name,
            this_host(),
            os.getpid(),
            self._started_at,
            now_us(),
            self.waiting_for,
        )


def is_here(row: PresenceRow) -> bool:
    """Return whether a process is alive, as far as this machine can tell.

    On this machine, a process that started after the row was written only has the same number.
    """
    if not is_this_host(row.host):
        return not was_silent(row)
    if not lives(row.pid):
        return False
    ticks = start_of(row.pid)
    if not ticks:
        return True
    lines = (PROC / "stat").read_text().splitlines()
    boot_s = next((int(line.split()[1]) for line in lines if line.startswith("btime ")), 0)
    started_us = boot_s * _SECOND_US + int(ticks) * _SECOND_US // os.sysconf("SC_CLK_TCK")
    return started_us <= row.started_at + 2 * _SECOND_US  # btime in /proc/stat has whole seconds


def was_silent(row: PresenceRow) -> bool:
    """Return whether the last heartbeat is older than any regular interval."""
    return now_us() - row.last_seen >= UNSEEN_S * 1e6


def is_unheard(row: PresenceRow, *, lease_expired: bool = False) -> bool:
    """Return whether a live process sends no heartbeats: it is paused, or hangs.

    Trainers, strategies and ranks send heartbeats beside their work. An explorer may do so only
    when it writes, so it counts only if it is paused.

    Args:
        row: last heartbeat of the process.
        lease_expired: whether its trainer's lease has expired; leases are renewed more often than
            heartbeats, so this shows sooner.
    """
    if lease_expired:
        return now_us() - row.last_seen > SEEN_EVERY_S * 1e6
    pauses = is_this_host(row.host) and is_paused(row.pid)
    return was_silent(row) and (row.role != "explorer" or pauses)


def has_ended(row: PresenceRow) -> bool:
    """Return whether a process of this machine is certainly gone: no process has its number.

    Start times are not compared: after a clock change, live processes would count as gone.
    """
    return is_this_host(row.host) and not lives(row.pid)


def own_wait_of(row: PresenceRow) -> str:
    """Return what a process waits for, without its description of the processes it waits for.

    They quote it in turn: with the whole text, each line would contain the last one and grow.
    """
    return (row.waiting_for or "").partition("; ")[0]


def describe_process(row: PresenceRow) -> str:
    """Describe where a process runs and when its last heartbeat was."""
    ago = max(0.0, (now_us() - row.last_seen) / 1e6)
    return f"pid {row.pid} on host {leases.name_of(row.host)}, seen {ago:.0f} s ago"
