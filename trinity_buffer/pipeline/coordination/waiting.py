"""Who is there, who waits for whom, and when a wait, or a consumer that rejects everything, ends.

Processes send heartbeats. A long wait logs which process would end it, and ends itself when the run
has stalled. A consumer that rejects every row logs a warning, and ends if only a fault in the rows
can explain it.

A process of this machine is also checked directly, by its number and start time. Process numbers
are comparable only within one PID namespace: containers have their own, so a host is identified by
more than its name.

What goes on beside a wait: tasks that end with the body of a context.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
from anyio.abc import TaskGroup

from trinity_buffer import errors
from trinity_buffer.events import now_us
from trinity_buffer.identity import TURNS
from trinity_buffer.store import leases, log, writer_queries
from trinity_buffer.store.connection import Database
from trinity_buffer.store.leases import PresenceRow
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.writer import INVALID, OVERSIZE

T = TypeVar("T")


@cache
def settle_imports() -> None:
    """Collect garbage once, before the process waits for work.

    The first full collection walks everything imported, with torch for 0.1 to 0.3 s. Left alone, it
    would happen in the middle of work, after some tens of calls; the next one comes only after the
    number of objects has grown by a quarter.
    """
    gc.collect()


@asynccontextmanager
async def task_group(*tasks: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[TaskGroup]:
    """Run ``tasks`` during the body; its end cancels them.

    Without tasks, the end of the body waits for what it has started in the group. An error, of the
    body or of a task, cancels the others. The first error is raised bare, not inside an exception
    group: callers catch errors by type.
    """
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            for task in tasks:
                group.start_soon(task)
            try:
                yield group
            except Exception as error:  # noqa: BLE001 - re-raised below, bare of the group
                failure = error
            if tasks or failure is not None:
                group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:  # KeyboardInterrupt included
        failure = failure or errors
        # The other errors of a group are most often consequences of its first.
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
    if failure is not None:
        raise failure


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


@dataclass(eq=False)
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

    database: Database
    experiment: int
    role: str
    name: str
    waiting_for: str | None = field(default=None, init=False)
    _started_at: int = field(default=0, init=False)
    _reported: str | None = field(default=None, init=False)
    _next: float = field(default_factory=lambda: time.monotonic() + FIRST_AFTER_S, init=False)

    @property
    def due_s(self) -> float:
        """Seconds until the next heartbeat."""
        return math.inf if self.database.read_only else max(0.0, self._next - time.monotonic())

    async def seen(self, *, at_once: bool = False) -> None:
        """Record a heartbeat if one is due or `waiting_for` has changed.

        If the store is busy, the heartbeat is left to the next call.

        Args:
            at_once: record the first heartbeat now, even if the process may end soon.
        """
        if (row := self.due_row(at_once=at_once)) is not None:
            with suppress(errors.StoreBusyError):
                await self.database.write(leases.record_presence, self.experiment, row)

    def first(self) -> PresenceRow:
        """Return the row of a heartbeat that is written in the caller's transaction."""
        self._started_at = self._started_at or now_us()
        self._reported, self._next = self.waiting_for, time.monotonic() + SEEN_EVERY_S
        return self._row()

    async def keep(self) -> None:
        """Record heartbeats until cancelled, also while the process is busy elsewhere.

        Errors of the store are left to the code that works with it.
        """
        while True:
            await anyio.sleep(min(self.due_s, SEEN_EVERY_S))
            with suppress(errors.StoreError):
                await self.seen()

    @asynccontextmanager
    async def heartbeats(self) -> AsyncIterator[None]:
        """Record heartbeats inside the context, and remove the row at the end."""
        try:
            async with task_group(self.keep):
                yield
        finally:
            await self.gone()

    async def gone(self) -> None:
        """Remove the row; if the store cannot be reached, it expires by itself."""
        if self._started_at:
            leave = leases.remove_presence
            with anyio.CancelScope(shield=True):
                await self.database.try_to_write(leave, self.experiment, self._row())
        self._started_at = 0

    async def keep_at_work(self, is_under_way: Callable[[], bool], every_s: float) -> None:
        """Record that the process is at work, so that its run does not count as stalled.

        Until cancelled, it looks every ``every_s`` seconds whether work is under way; the row of
        the role `AT_WORK` is removed when it is not.
        """
        presence = Presence(self.database, self.experiment, AT_WORK, f"{self.role} {self.name}")
        try:
            while True:
                await anyio.sleep(min(every_s, SEEN_EVERY_S))
                with suppress(errors.StoreError):  # the code that uses the store reports its errors
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

    def due_row(self, *, at_once: bool = False) -> PresenceRow | None:
        """Return the heartbeat that is due and count it as sent; None if none is due."""
        due = time.monotonic() >= self._next or self.waiting_for != self._reported
        first = at_once and not self._started_at
        return self.first() if (due or first) and not self.database.read_only else None

    def _row(self) -> PresenceRow:
        process, times = (this_host(), os.getpid()), (self._started_at, now_us())
        return PresenceRow(self.role, self.name, *process, *times, self.waiting_for)


def is_here(row: PresenceRow) -> bool:
    """Return whether a process is alive, as far as this machine can tell.

    On this machine, a process that started after the last heartbeat only has the same number.
    """
    if not is_this_host(row.host):
        return not was_silent(row)
    if not lives(row.pid):
        return False
    if not (ticks := start_of(row.pid)):
        return True
    lines = (PROC / "stat").read_text().splitlines()
    boot_s = next((int(line.split()[1]) for line in lines if line.startswith("btime ")), 0)
    started_us = boot_s * _SECOND_US + int(ticks) * _SECOND_US // os.sysconf("SC_CLK_TCK")
    # btime in /proc/stat has whole seconds, and moves with the clock; `started_at` stays as it is
    # where a process takes over the row of one that had its number, as in a restarted container.
    return started_us <= max(row.started_at, row.last_seen) + 2 * _SECOND_US


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
    """Return why a process waits, without its description of the processes it waits for.

    They quote it in turn: with the whole text, each line would contain the last one and grow.
    """
    return (row.waiting_for or "").partition("; ")[0]


def describe_process(row: PresenceRow) -> str:
    """Describe where a process runs and when its last heartbeat was."""
    ago = max(0.0, (now_us() - row.last_seen) / 1e6)
    return f"pid {row.pid} on host {leases.name_of(row.host)}, seen {ago:.0f} s ago"


STALLED_AFTER_S = 1800.0
"""Default of the configuration's key ``stalled_after_s``."""

LOOKS = 4
"""Number of checks during that time: a process may be at work for only a part of it."""

LATE_S = 10.0
"""A check delayed by more than this shows that the machine is overloaded."""

LONGEST_PAUSE_S = 600.0


def is_at_work(row: PresenceRow) -> bool:
    """Return whether a live process computes something that may become an event.

    Explorers, trainers and ranks have a row of their own for it; a strategy is unless it waits.
    """
    if not is_here(row) or was_silent(row):
        return False
    return row.role == AT_WORK or (row.role == "strategy" and row.waiting_for is None)


WAIT_REPORT = "TRINITY_BUFFER_WAIT_REPORT_S"
"""Environment variable: seconds until a wait is reported."""

WAIT_REPORT_S = 5.0
REPEATED_AFTER = 6
"""Reports after the first come by this factor less often: their content is known already."""

_logger = logging.getLogger(__name__)


def wait_report_s() -> float:
    """Return the number of seconds until a wait is reported.

    Raises:
        InvalidArgumentError: the environment variable is not a positive number.
    """
    setting = os.environ.get(WAIT_REPORT)
    try:
        seconds = float(setting) if setting else WAIT_REPORT_S
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise errors.InvalidArgumentError(
            f"{WAIT_REPORT}={setting!r}: it must be a positive number"
        )
    return seconds


def one_line(text: str) -> str:
    """Return ``text`` with unprintable characters escaped.

    Log lines reach a terminal unchanged, and names, hosts and batches come from the store, where
    any SQL client may have put control sequences.
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


@dataclass(eq=False)
class ReportedWait:
    """Waits for commits to a store until the caller has what it needs, and reports long waits.

    After 5 seconds, and every 30 seconds from then on, it logs one line at WARNING, which Python
    prints to standard error unless logging is configured.

    It ends once the experiment has made no progress for ``stalled_after_s``. Progress is an event
    (also a recorder's turn, or an expert's row), an explorer with rollouts under way, or a trainer,
    rank or strategy at work. Time is measured by the waiter's own clock, as those of other machines
    may be wrong. Time without checks does not count: the run was paused too, or the server was
    away.

    Args:
        database: database of the store.
        experiment: key of the experiment; None: the wait never ends by itself.
        tell: describes the wait; called only for a report or an error.
        presence: presence of the waiting process, which shows the reason to others and does not
            count as progress.
        aloud: False if another part of the process reports the wait.
        is_waited_for: whether the result is needed now: False while the process still works on
            earlier results, so that nothing is reported.
    """

    database: Database
    experiment: int | None
    tell: Callable[[], Awaitable[str]]
    presence: Presence | None = None
    _: KW_ONLY
    aloud: bool = True
    is_waited_for: Callable[[], bool] = lambda: True
    _report_at: float | None = field(default=None, init=False)
    _look_at: float | None = field(default=None, init=False)
    _mark: object = field(default=None, init=False)
    _moved_at: float = field(default=0.0, init=False)

    def over(self) -> None:
        """End this wait: the next one is a new one."""
        self._report_at = self._look_at = self._mark = None
        if self.presence is not None:
            self.presence.waiting_for = None

    async def changed(self, state: tuple[int, int], timeout_s: float = math.inf) -> None:
        """Return after a commit later than ``state``, after ``timeout_s``, or spuriously.

        Like ``changes.changed``: the caller checks again, and calls again.

        Raises:
            RunStalledError: no progress for too long.
        """
        if self._report_at is None:
            self._report_at = time.monotonic() + wait_report_s()
        elif time.monotonic() >= self._report_at:
            message = one_line(await self.tell())
            _logger.log(logging.WARNING if self.aloud else logging.DEBUG, "%s", message)
            if self.presence is not None:
                self.presence.waiting_for = message
            self._report_at = time.monotonic() + REPEATED_AFTER * wait_report_s()
        left_s = min(timeout_s, max(0.0, self._report_at - time.monotonic()))
        if self.experiment is not None:
            # While the process works on earlier results, the run is not stalled.
            if not self.is_waited_for():
                self._look_at = self._mark = None
            left_s = min(left_s, await self.require_moving(self.experiment, wait_report_s()))
        if self.presence is not None:
            await self.presence.seen()
            left_s = min(left_s, self.presence.due_s)
        await self.database.changes.changed(state, left_s)

    async def require_moving(self, experiment: int, first_look_s: float) -> float:
        """Return the seconds until the next check, as long as the run may make progress.

        Args:
            experiment: its key.
            first_look_s: length of a new wait before its first check.

        Raises:
            RunStalledError: no progress for too long.
        """
        now = time.monotonic()
        if self._look_at is None:
            self._look_at = now + first_look_s
        if now < self._look_at:
            return self._look_at - now
        mark, at_work, after_s = await self.database.read(self._progress, experiment)
        now = time.monotonic()
        # Time in which this process could not check is not counted against the run.
        self._moved_at += max(0.0, now - self._look_at - LATE_S)
        if at_work or mark != self._mark:
            self._mark, self._moved_at = mark, now
        if now - self._moved_at >= after_s:
            raise errors.RunStalledError(
                f"nothing has moved for {after_s:g} s (stalled_after_s): no event came, and "
                f"no rollout is under way; {one_line(await self.tell())}. `trinity-buffer doctor` "
                "says what would help"
            )
        pause_s = min(self._moved_at + after_s - now, after_s / LOOKS, LONGEST_PAUSE_S)
        self._look_at = now + pause_s
        return pause_s

    def _progress(self, tx: Transaction, experiment: int) -> tuple[object, bool, float]:
        """Return a mark that changes with progress, whether a process works, and the limit."""
        stored = writer_queries.config_of(tx, experiment)
        config = {} if stored is None else stored[0]
        after_s: float | None = config.get("stalled_after_s", STALLED_AFTER_S)
        own = self.presence
        rows = [r for r in leases.processes(tx, experiment) if own is None or not own.is_own(r)]
        names = [log.experiment_name(tx, experiment) + TURNS]  # a recorder writes there
        if isinstance(expert := config.get("expert_experiment"), str):
            names.append(expert)
        beside = {log.find_experiment(tx, name) for name in names}
        # Heads only grow, so their sum changes with every event.
        head = sum(log.head(tx, key) for key in {experiment, *beside} if key is not None)
        # A changed heartbeat is progress, however wrong the clock of its process may be.
        mark = head, frozenset(row for row in rows if row.role == AT_WORK)
        return mark, any(map(is_at_work, rows)), math.inf if after_s is None else after_s


WARN_AFTER_STEPS = 3
"""Consecutive fully rejected steps until the first warning."""

MAX_REJECTED_STEPS = 6
"""So many in a row end the consumer if the rows themselves are at fault."""

USUAL_GROUPS_PER_STEP = 16
"""Groups that count as a step if its size is unknown: a filter may reject a few in a row."""

FAULTS = (INVALID, "damaged")
"""Prefixes of reasons that are faults of the rows, unlike those of a filter or of staleness."""

UNREAD = frozenset({"stale", OVERSIZE})
"""Reasons that are assigned without reading the row."""


@dataclass(eq=False)
class RejectionWatch:
    """Counts rejected groups since the last accepted one.

    Args:
        who: name of the consumer in messages.
        groups_per_step: number of groups that count as a step. None: 1 if the reason is a fault,
            else `USUAL_GROUPS_PER_STEP`.
        max_rejected_steps: see `MAX_REJECTED_STEPS`.
        counts: the unit that messages count, as a strategy has no steps.
    """

    who: str
    groups_per_step: int | None = 1
    max_rejected_steps: int = MAX_REJECTED_STEPS
    _: KW_ONLY
    counts: Literal["steps", "groups"] = "steps"
    _groups: dict[bool, int] = field(default_factory=dict, init=False)
    _reasons: set[str] = field(default_factory=set, init=False)
    _first: str = field(default="", init=False)
    _warned: bool = field(default=False, init=False)

    def accepted(self) -> None:
        """Note that at least one row was accepted."""
        self._groups, self._reasons, self._first, self._warned = {}, set(), "", False

    def rejected(self, groups: int, reasons: Collection[str], uid: Callable[[], str]) -> None:
        """Note that all rows of ``groups`` groups were rejected.

        Args:
            groups: number of groups.
            reasons: reasons of the rejections.
            uid: returns the uid of one of the rows; called only for the first rejection.

        Raises:
            TrainingError: nothing was accepted for too long, and a fault is the reason.
        """
        read = not UNREAD.issuperset(reasons)
        self._groups[read] = self._groups.get(read, 0) + groups
        self._reasons |= set(reasons)
        self._first = self._first or uid()
        faulty = all(reason.startswith(FAULTS) for reason in self._reasons - UNREAD)
        per_step = self.groups_per_step or (1 if faulty else USUAL_GROUPS_PER_STEP)
        number = sum(self._groups.values())
        if number // per_step < min(WARN_AFTER_STEPS, self.max_rejected_steps):
            return
        counted = number if self.counts == "groups" else number // per_step
        message = (
            f"{self.who} has rejected everything of {counted} {self.counts} in a row as "
            f"{', '.join(sorted(self._reasons))} (first {self._first}); `trinity-buffer show "
            f"{self._first}` tells what the row holds"
        )
        if faulty and self._groups.get(True, 0) // per_step >= self.max_rejected_steps:
            raise errors.TrainingError(f"{message}; fix these rows, and start it again")
        if not self._warned:
            self._warned = True
            _logger.warning("%s", one_line(message))
