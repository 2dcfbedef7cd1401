"""Who is there: each process says so while it works, so that a wait can name who would end it.

Processes of this machine: which machine it is, who lives on it, and who is still the same.

Two processes can look at each other where their numbers mean the same. A container has numbers of
its own, so that a name alone does not tell a machine.
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
from trinity_buffer.store import heartbeats, leases
from trinity_buffer.store.database import Database
from trinity_buffer.store.heartbeats import PresenceRow
from trinity_buffer.store.transaction import Transaction

PROC = Path("/proc")
"""What Linux tells of  Where it is missing, as on macOS, less is known of each."""

_SECOND_US = 1_000_000
_ENDED = ("Z", "X")  # states of what is still listed, but has ended


def this_host() -> str:
    """Return what is stored of this machine: ``name#digest``, or its name where there is no /proc.

    The digest is of the boot and of the namespace in which a process number means a process.
    """
    name = socket.gethostname()
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return name
    return f"{name}#{sha256(f'{boot}:{namespace}'.encode()).hexdigest()[:8]}"


def is_this_host(host: str) -> bool:
    """Return whether process numbers that were stored with ``host`` are those of this machine.

    Older versions stored the name alone: it is taken at its word.
    """
    return host in (this_host(), socket.gethostname())


def lives(pid: int, start: str = "") -> bool:
    """Return whether a process has the number ``pid``, and, where known, ``start`` as its start."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's, and alive
        pass
    state, started = _told_of(pid)
    return state not in _ENDED and (not start or not started or start == started)


def is_paused(pid: int) -> bool:
    """Return whether the process ``pid`` was stopped (``kill -STOP``), where that can be told."""
    return _told_of(pid)[0] == "T"


def start_of(pid: int) -> str:
    """Return when a process started, in ticks since boot; "" where nothing tells."""
    return _told_of(pid)[1]


def process_has_ended(pid: int, seen_us: int) -> bool:
    """Return whether the process that had the number ``pid`` at ``seen_us`` is certainly gone."""
    if not lives(pid):
        return True
    ticks = start_of(pid)
    if not ticks:
        return False
    started_us = _boot_us() + int(ticks) * _SECOND_US // os.sysconf("SC_CLK_TCK")
    return started_us > seen_us + 2 * _SECOND_US  # the boot time is told in whole seconds


def _told_of(pid: int) -> tuple[str, str]:
    """Return (state, start) of a process, both "" where nothing tells."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _boot_us() -> int:
    for line in (PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return int(line.split()[1]) * _SECOND_US
    return 0


FIRST_AFTER_S = 1.0
"""What is over before need not be known to anybody."""

SEEN_EVERY_S = 30.0
UNSEEN_S = 120.0
"""A process of another machine that was silent for so long is said to be gone."""


AT_WORK = "at work"
"""Role, beside its own, of a process that makes something which will become an event."""


class Presence:
    """Says in the store that this process has a role in an experiment; a read-only store is left.

    Args:
        database: of the store.
        experiment: key of the experiment.
        role: ``explorer``, ``strategy``, ``trainer`` or ``rank N``; `AT_WORK`.
        name: actor, annotation set or trainer.

    Attributes:
        waiting_for: what it has said that it waits for; None: it works.
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
        """In how many seconds it is to be said again."""
        never = self._database.read_only
        return math.inf if never else max(0.0, self._next - time.monotonic())

    async def seen(self, *, at_once: bool = False) -> None:
        """Say that this process is there, if that is news or was not said for a while.

        A store that is busy is not waited for twice: it is said the next time.

        Args:
            at_once: say so the first time too, however short it may be there.
        """
        row = self._news(at_once=at_once)
        if row is not None:
            with suppress(StoreBusyError):
                await self._database.write(heartbeats.record, self._experiment, row)

    def first(self) -> PresenceRow:
        """Return what says at once that this process is there; the same again until it is gone."""
        self._started_at = self._started_at or now_us()
        self._reported, self._next = self.waiting_for, time.monotonic() + SEEN_EVERY_S
        return self._row()

    def note(self, tx: Transaction) -> None:
        """Say the same as the last thing in a transaction that is made anyway."""
        row = self._news()
        if row is not None:
            heartbeats.record(tx, self._experiment, row)

    async def keep(self) -> None:
        """Go on saying it until cancelled, also while nothing else of this process gets to it.

        Where the store cannot be reached, whoever works with it hears of that, and not from here.
        """
        while True:
            await anyio.sleep(min(self.due_s, SEEN_EVERY_S))
            with suppress(StoreError):
                await self.seen()

    @asynccontextmanager
    async def heartbeats(self) -> AsyncIterator[None]:
        """Keep saying it inside the context, and take it back at the end."""
        try:
            async with running(self.keep):
                yield
        finally:
            await self.gone()

    async def gone(self) -> None:
        """Take it back; where the store cannot be reached, time will."""
        if self._started_at:
            with anyio.CancelScope(shield=True):
                await self._database.try_to_write(heartbeats.remove, self._experiment, self._row())
        self._started_at = 0

    def at_work(self) -> Presence:
        """Return another one of this process: that it is at work."""
        return Presence(self._database, self._experiment, AT_WORK, f"{self.role} {self.name}")

    def is_own(self, row: PresenceRow) -> bool:
        """Return whether this process has said it, in this role and under this name."""
        is_self = is_this_host(row.host) and row.pid == os.getpid()
        return is_self and (row.role, row.name) == (self.role, self.name)

    def is_namesake(self, row: PresenceRow) -> bool:
        """Return whether another process is there in the same role, under the same name."""
        same = (row.role, row.name) == (self.role, self.name)
        return same and not self.is_own(row) and is_here(row)

    def _news(self, *, at_once: bool = False) -> PresenceRow | None:
        """Return what is to be said now, and counts as said from here on; None if nothing is."""
        due = time.monotonic() >= self._next or self.waiting_for != self._reported
        first = at_once and not self._started_at
        if not (due or first) or self._database.read_only:
            return None
        self._started_at = self._started_at or now_us()
        self._reported, self._next = self.waiting_for, time.monotonic() + SEEN_EVERY_S
        return self._row()

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


class Work:
    """Says in the store, while a process is at work, that it is: its run has not stalled.

    Args:
        of: the presence of the process.
        is_under_way: whether it is at work now.
    """

    def __init__(self, of: Presence, is_under_way: Callable[[], bool]) -> None:
        self._presence = of.at_work()
        self._is_under_way = is_under_way

    async def keep(self, every_s: float) -> None:
        """Look so often until cancelled, and then take it back."""
        try:
            while True:
                await anyio.sleep(min(every_s, SEEN_EVERY_S))
                with suppress(StoreError):  # whoever works with the store hears of it
                    if self._is_under_way():
                        await self._presence.seen(at_once=True)
                    else:
                        await self._presence.gone()
        finally:
            await self._presence.gone()


def is_here(row: PresenceRow) -> bool:
    """Return whether a process is there, as far as can be told from this machine."""
    if is_this_host(row.host):
        return not process_has_ended(row.pid, row.started_at)
    return not was_silent(row)


def was_silent(row: PresenceRow) -> bool:
    """Return whether nothing was heard of a process for longer than it is ever silent."""
    return now_us() - row.last_seen >= UNSEEN_S * 1e6


def is_unheard(row: PresenceRow, *, lease_expired: bool = False) -> bool:
    """Return whether a process that is there says nothing any more: it is paused, or hangs.

    Trainers, strategies and ranks say beside their work that they are there. Not every explorer
    does: a writer may say so only as it writes, so that one counts only if it is paused.

    Args:
        row: of the process.
        lease_expired: it let its trainer's lease run out, which it renews oftener: it is known
            sooner.
    """
    if lease_expired:
        return now_us() - row.last_seen > SEEN_EVERY_S * 1e6
    pauses = is_this_host(row.host) and is_paused(row.pid)
    return was_silent(row) and (row.role != "explorer" or pauses)


def has_ended(row: PresenceRow) -> bool:
    """Return whether a process is certainly gone: of this machine, where none has its number.

    When it started is not asked: a clock that was set forward would end whoever is there.
    """
    return is_this_host(row.host) and not lives(row.pid)


def own_wait_of(row: PresenceRow) -> str:
    """Return what a process waits for, without what it says of the processes that it waits for.

    Those quote it in turn: with all of it, each line would hold the one before, and grow for ever.
    """
    return (row.waiting_for or "").partition("; ")[0]


def describe_process(row: PresenceRow) -> str:
    """Return where a process runs and when it was seen, as people say it."""
    ago = max(0.0, (now_us() - row.last_seen) / 1e6)
    return f"pid {row.pid} on host {leases.name_of(row.host)}, seen {ago:.0f} s ago"
