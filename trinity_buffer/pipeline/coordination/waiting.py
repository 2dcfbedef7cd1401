"""A wait that says what it waits for, and who would bring it, once it takes long.

A consumer that rejects everything says so aloud, and ends where only a fault explains it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Literal

from trinity_buffer.errors import InvalidArgumentError, TrainingError
from trinity_buffer.pipeline.coordination.presence import Presence
from trinity_buffer.pipeline.coordination.stall import Stall
from trinity_buffer.store.notify import Changes
from trinity_buffer.writer import INVALID, OVERSIZE

WAIT_REPORT = "TRINITY_BUFFER_WAIT_REPORT_S"
"""Environment variable: after so many seconds a wait speaks."""

WAIT_REPORT_S = 5.0
REPEATED_AFTER = 6
"""Times as long passes until it speaks again: what is known already is said less often."""

_logger = logging.getLogger(__name__)


def wait_report_s() -> float:
    """Return after how many seconds a wait speaks.

    Raises:
        InvalidArgumentError: the environment variable holds no positive number.
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
    """Return ``text`` with everything spelled out that a terminal would obey.

    A log line goes to a terminal as it is; names, hosts and batches come out of the store, where
    whoever writes SQL can put anything.
    """
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


class ReportedWait:
    """Waits for commits to a store on behalf of somebody who needs more than any one commit.

    After 5 seconds, and every 30 seconds from then on, it says so in one line at WARNING, which
    Python prints to standard error where nobody has set up logging.

    Args:
        changes: of the store.
        tell: returns the sentence; asked only when it is said.
        presence: of who waits, which tells others of it too.
        aloud: False where somebody else of the process speaks for it.
        stall: ends the wait where nothing moves any more; None: nothing does.

    Attributes:
        is_waited_for: whether anybody needs what is waited for: nobody does, as long as what is
            there already is worked on.
    """

    def __init__(
        self,
        changes: Changes,
        tell: Callable[[], Awaitable[str]],
        presence: Presence | None = None,
        *,
        aloud: bool = True,
        stall: Stall | None = None,
    ) -> None:
        self._aloud = aloud
        self._stall = stall
        self.is_waited_for: Callable[[], bool] = lambda: True
        self._changes = changes
        self._tell = tell
        self._presence = presence
        self._due: float | None = None

    def over(self) -> None:
        """Note that what was waited for came: the next wait is a new one."""
        self._due = None
        if self._stall is not None:
            self._stall.begin()
        if self._presence is not None:
            self._presence.waiting_for = None

    async def _describe(self) -> str:
        return one_line(await self._tell())

    async def changed(self, state: tuple[int, int], timeout_s: float | None = None) -> None:
        """Return once there was a commit after ``state``, or after ``timeout_s``, or early.

        As `Changes.changed` does: whoever calls looks again, and calls again.

        Raises:
            RunStalledError: nothing has moved for too long.
        """
        if self._due is None:
            self._due = time.monotonic() + wait_report_s()
        elif time.monotonic() >= self._due:
            message = await self._describe()
            _logger.log(logging.WARNING if self._aloud else logging.DEBUG, "%s", message)
            if self._presence is not None:
                self._presence.waiting_for = message
            self._due = time.monotonic() + REPEATED_AFTER * wait_report_s()
        left_s = max(0.0, self._due - time.monotonic())
        if self._stall is not None:
            if not self.is_waited_for():
                self._stall.begin()
            left_s = min(left_s, await self._stall.require_moving(self._describe, wait_report_s()))
        if self._presence is not None:
            await self._presence.seen()
            left_s = min(left_s, self._presence.due_s)
        await self._changes.changed(state, left_s if timeout_s is None else min(left_s, timeout_s))


WARN_AFTER_STEPS = 3
"""Steps in a row of which everything was rejected, before that is said."""

MAX_REJECTED_STEPS = 6
"""So many in a row end the consumer, where the rows themselves are at fault."""

USUAL_GROUPS_PER_STEP = 16
"""Groups of a step where nobody says how many: a filter may reject a few of them in a row."""

FAULTS = (INVALID, "damaged")
"""How reasons begin that more rows of the same kind will not mend; a filter or an age may."""

UNREAD = frozenset({"stale", OVERSIZE})
"""Reasons that say nothing of what a row holds: nobody looked."""


class RejectionWatch:
    """Counts what was rejected since anything was kept.

    Args:
        who: the consumer, as a message names it.
        groups_per_step: so many groups count as a step. None: one where a fault is the reason, else
            `USUAL_GROUPS_PER_STEP`.
        max_rejected_steps: see `MAX_REJECTED_STEPS`.
        counts: what a message counts: a strategy has no steps.
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
        """Note that something was kept."""
        self._groups, self._reasons, self._first, self._warned = {}, set(), "", False

    def rejected(self, groups: int, reasons: Collection[str], uid: Callable[[], str]) -> None:
        """Note that of ``groups`` groups nothing was kept.

        Args:
            groups: how many.
            reasons: of the rejections.
            uid: returns the name of one row of theirs; asked for the first ones alone.

        Raises:
            TrainingError: nothing was kept for too long, and a fault is the reason.
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
        message = self._describe(number if self._counts == "groups" else number // per_step)
        if faulty and self._groups.get(True, 0) // per_step >= self._most:
            raise TrainingError(f"{message}; give the rows what is lacking, and start it again")
        if not self._warned:
            self._warned = True
            _logger.warning("%s", one_line(message))

    def _describe(self, number: int) -> str:
        return (
            f"{self._who} has rejected everything of {number} {self._counts} in a row as "
            f"{', '.join(sorted(self._reasons))} (first {self._first}); `trinity-buffer show "
            f"{self._first}` tells what the row holds"
        )
