"""What a learning run is doing, told while it lasts: a run that waits says what it waits for."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable

import anyio

SILENT_S = 15.0
"""What lasts longer than this is told, again and again."""

STUCK_S = 300.0
"""A run that has done nothing but wait for its stream for so long is given up."""


class StuckError(RuntimeError):
    """A learning run got no further; the message says what it waited for."""


def to_stderr(line: str) -> None:
    """Print ``line`` where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Says what a run does.

    Args:
        run: how its lines begin.
        say: takes a line.
    """

    def __init__(self, run: str, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._doing, self._since = "begins", time.monotonic()
        self._waits = False
        self.stuck: str | None = None

    def tell(self, line: str) -> None:
        """Say something at once."""
        self._say(f"{self._run}: {line}")

    def enter(self, doing: str, *, waits: bool = False) -> None:
        """Note what is done from now on, and whether it is mere waiting."""
        self._doing, self._waits, self._since = doing, waits, time.monotonic()

    async def watch(self, give_up: Callable[[str], Awaitable[None]]) -> None:
        """Tell whatever lasts; call ``give_up`` with the reason when the run waits in vain."""
        while self.stuck is None:
            await anyio.sleep(SILENT_S)
            lasted = time.monotonic() - self._since
            if lasted >= SILENT_S:
                self.tell(f"{self._doing}, for {lasted:.0f} s now")
            if self._waits and lasted >= STUCK_S:
                self.stuck = f"{self._run}: {self._doing} for {lasted:.0f} s: given up"
                await give_up(self.stuck)
