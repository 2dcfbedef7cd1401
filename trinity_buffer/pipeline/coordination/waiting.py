"""Waits that report, a watch for consumers that reject everything, and the end of a stalled run.

A long wait logs which process would end it. A consumer that rejects every row logs a warning, and
ends if only a fault in the rows can explain it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Literal

from trinity_buffer.errors import InvalidArgumentError, RunStalledError, TrainingError
from trinity_buffer.identity import TURNS
from trinity_buffer.pipeline.coordination.presence import AT_WORK, Presence, is_here, was_silent
from trinity_buffer.store import leases, log, writer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.leases import PresenceRow
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.writer import INVALID, OVERSIZE

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
        raise InvalidArgumentError(f"{WAIT_REPORT}={setting!r}: it must be a positive number")
    return seconds


def one_line(text: str) -> str:
    """Return ``text`` with unprintable characters escaped.

    Log lines reach a terminal unchanged, and names, hosts and batches come from the store, where
    any SQL client may have put control sequences.
    """
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


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

    Attributes:
        is_waited_for: whether the result is needed now: False while the process still works on
            earlier results, so that nothing is reported.
    """

    def __init__(
        self,
        database: Database,
        experiment: int | None,
        tell: Callable[[], Awaitable[str]],
        presence: Presence | None = None,
        *,
        aloud: bool = True,
    ) -> None:
        self._database = database
        self._experiment = experiment
        self._tell = tell
        self._presence = presence
        self._level = logging.WARNING if aloud else logging.DEBUG
        self.is_waited_for: Callable[[], bool] = lambda: True
        self._report_at: float | None = None
        self._look_at: float | None = None
        self._mark: object = None
        self._moved_at = 0.0

    def over(self) -> None:
        """End this wait: the next one is a new one."""
        self._report_at = self._look_at = self._mark = None
        if self._presence is not None:
            self._presence.waiting_for = None

    async def changed(self, state: tuple[int, int], timeout_s: float = math.inf) -> None:
        """Return after a commit later than ``state``, after ``timeout_s``, or spuriously.

        Like `Changes.changed`: the caller checks again, and calls again.

        Raises:
            RunStalledError: no progress for too long.
        """
        if self._report_at is None:
            self._report_at = time.monotonic() + wait_report_s()
        elif time.monotonic() >= self._report_at:
            message = one_line(await self._tell())
            _logger.log(self._level, "%s", message)
            if self._presence is not None:
                self._presence.waiting_for = message
            self._report_at = time.monotonic() + REPEATED_AFTER * wait_report_s()
        left_s = min(timeout_s, max(0.0, self._report_at - time.monotonic()))
        if self._experiment is not None:
            # While the process works on earlier results, the run is not stalled.
            if not self.is_waited_for():
                self._look_at = self._mark = None
            left_s = min(left_s, await self.require_moving(self._experiment, wait_report_s()))
        if self._presence is not None:
            await self._presence.seen()
            left_s = min(left_s, self._presence.due_s)
        await self._database.changes.changed(state, left_s)

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
        mark, at_work, after_s = await self._database.read(self._progress, experiment)
        now = time.monotonic()
        # Time in which this process could not check is not counted against the run.
        self._moved_at += max(0.0, now - self._look_at - LATE_S)
        if at_work or mark != self._mark:
            self._mark, self._moved_at = mark, now
        if now - self._moved_at >= after_s:
            raise RunStalledError(
                f"nothing has moved for {after_s:g} s (stalled_after_s): no event came, and "
                f"no rollout is under way; {one_line(await self._tell())}. `trinity-buffer doctor` "
                "says what would help"
            )
        pause_s = min(self._moved_at + after_s - now, after_s / LOOKS, LONGEST_PAUSE_S)
        self._look_at = now + pause_s
        return pause_s

    def _progress(self, tx: Transaction, experiment: int) -> tuple[object, bool, float]:
        """Return what changes with progress, whether a process is at work, and the limit."""
        stored = writer_queries.config_of(tx, experiment)
        config = {} if stored is None else stored[0]
        after_s: float | None = config.get("stalled_after_s", STALLED_AFTER_S)
        own = self._presence
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


class RejectionWatch:
    """Counts rejected groups since the last accepted one.

    Args:
        who: name of the consumer in messages.
        groups_per_step: number of groups that count as a step. None: 1 if the reason is a fault,
            else `USUAL_GROUPS_PER_STEP`.
        max_rejected_steps: see `MAX_REJECTED_STEPS`.
        counts: the unit that messages count, as a strategy has no steps.
    """

    def __init__(
        self,
        who: str,
        groups_per_step: int | None = 1,
        max_rejected_steps: int = MAX_REJECTED_STEPS,
        *,
        counts: Literal["steps", "groups"] = "steps",
    ) -> None:
        self._who = who
        self._per_step = groups_per_step
        self._most = max_rejected_steps
        self._counts = counts
        self._groups: dict[bool, int] = {}
        self._reasons: set[str] = set()
        self._first = ""
        self._warned = False

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
        per_step = self._per_step or (1 if faulty else USUAL_GROUPS_PER_STEP)
        number = sum(self._groups.values())
        if number // per_step < min(WARN_AFTER_STEPS, self._most):
            return
        counted = number if self._counts == "groups" else number // per_step
        message = (
            f"{self._who} has rejected everything of {counted} {self._counts} in a row as "
            f"{', '.join(sorted(self._reasons))} (first {self._first}); `trinity-buffer show "
            f"{self._first}` tells what the row holds"
        )
        if faulty and self._groups.get(True, 0) // per_step >= self._most:
            raise TrainingError(f"{message}; fix these rows, and start it again")
        if not self._warned:
            self._warned = True
            _logger.warning("%s", one_line(message))
