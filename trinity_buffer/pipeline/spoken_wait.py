"""A wait that says what it waits for, and who would bring it, once it takes long."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.presence import Presence
from trinity_buffer.pipeline.stall import Stall
from trinity_buffer.store.changes import Changes

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
    said = os.environ.get(WAIT_REPORT)
    try:
        seconds = float(said) if said else WAIT_REPORT_S
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InvalidArgumentError(f"{WAIT_REPORT}={said!r}: it must be a positive number")
    return seconds


def one_line(said: str) -> str:
    """Return ``said`` with everything spelled out that a terminal would obey.

    A log line goes to a terminal as it is; names, hosts and batches come out of the store, where
    whoever writes SQL can put anything.
    """
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in said)


class SpokenWait:
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

    async def _told(self) -> str:
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
            said = await self._told()
            _logger.log(logging.WARNING if self._aloud else logging.DEBUG, "%s", said)
            if self._presence is not None:
                self._presence.waiting_for = said
            self._due = time.monotonic() + REPEATED_AFTER * wait_report_s()
        left_s = max(0.0, self._due - time.monotonic())
        if self._stall is not None:
            if not self.is_waited_for():
                self._stall.begin()
            left_s = min(left_s, await self._stall.require_moving(self._told, wait_report_s()))
        if self._presence is not None:
            await self._presence.seen()
            left_s = min(left_s, self._presence.due_s)
        await self._changes.changed(state, left_s if timeout_s is None else min(left_s, timeout_s))
