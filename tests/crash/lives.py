"""Processes that die at a named place and are born again, until their list of places is through."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from typing_extensions import override

from tests.crash import roles
from tests.crash.forking import CONTEXT, become

LIFE_S = 300.0
"""Until a life that goes nowhere is ended: it takes a second or two, on a machine at rest."""
_ONE_AT_A_TIME = threading.Lock()
"""`Process.start` reads the ends of all processes: read by two threads, an end becomes a 255."""


def live(role: str, arguments: Mapping[str, Any], crash_at: str | None, log: str) -> None:
    """Be ``role`` until the crash point is reached, or to the end."""
    become(log, crash_at)
    getattr(roles, role)(**arguments)


class Lives(threading.Thread):
    """Lives of one role: one per crash point, each of which must end in SIGKILL, and a last."""

    def __init__(
        self, role: str, arguments: Mapping[str, Any], points: Sequence[str], log: Path
    ) -> None:
        super().__init__(name=role)
        self._call = (role, dict(arguments))
        self._points = list(points)
        self._log = log
        self.survived: list[str] = []
        self.crashed: list[str] = []
        self.through = threading.Event()
        self.exit_code: int | None = None

    @override
    def run(self) -> None:
        """Live and die."""
        for point in self._points:
            code = self._one(point, LIFE_S)
            (self.crashed if code == -signal.SIGKILL else self.survived).append(f"{point}: {code}")
        self.through.set()
        self.exit_code = self._one(None, 2 * LIFE_S)

    def _one(self, point: str | None, limit_s: float) -> int | None:
        process = CONTEXT.Process(target=live, args=(*self._call, point, str(self._log)))
        with _ONE_AT_A_TIME:
            process.start()
        ended = wait([process.sentinel], limit_s)
        with _ONE_AT_A_TIME:
            if not ended:
                process.kill()
            process.join()
        return process.exitcode if ended else None


def run_all(lives: Sequence[Lives], when_through: Callable[[], None]) -> None:
    """Start all, call ``when_through`` once every crash point was reached, wait for the ends."""
    for one in lives:
        one.start()
    for one in lives:
        one.through.wait(LIFE_S * 4)
    when_through()
    for one in lives:
        one.join()
