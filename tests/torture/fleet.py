"""The processes of a round: born again whenever they end, until they may end for good."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.crash.forking import CONTEXT
from tests.torture.roles import REFUSED, Life, live


@dataclass(slots=True)
class Slot:
    """One place in the fleet, filled by one process after the other.

    Attributes:
        killed_by_us: the process was sent SIGKILL from outside.
    """

    name: str
    role: str
    arguments: Mapping[str, Any]
    lives: Iterator[Life]
    log: Path
    process: Any = None
    life: Life = field(default_factory=Life)
    killed_by_us: bool = False
    done: bool = False

    @property
    def pid(self) -> int | None:
        """Process id, or None while nobody lives here."""
        alive = self.process is not None and self.process.exitcode is None
        return self.process.pid if alive else None


class Fleet:
    """Starts processes, notes how they end, and starts them again.

    Attributes:
        counts: how often what happened.
        unexpected: ends that no fault explains, told with the last lines of the log.
        calm: who is born brings no faults along; so it is at first, until `become_wild`.
        may_end: the experiment is finished, so who follows it may end.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.counts: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.calm = True
        self.may_end = False
        self._resume_at: dict[int, float] = {}

    def start(self) -> None:
        """Start every process."""
        for slot in self.slots.values():
            self._bear(slot)

    def _bear(self, slot: Slot) -> None:
        slot.life = Life() if self.calm else next(slot.lives)
        slot.killed_by_us = False
        arguments = (slot.role, dict(slot.arguments), slot.life, str(slot.log))
        slot.process = CONTEXT.Process(target=live, args=arguments, daemon=True)
        slot.process.start()
        self.counts["lives"] += 1
        if slot.life.clock_s or slot.life.clock_jump:
            self.counts["clock moved"] += 1

    def tend(self, until: float) -> None:
        """Until ``until`` (monotonic), or until all have ended for good: bury and bear.

        What nobody expected ends the round: it would only happen again and again.
        """
        while not self.unexpected:
            self._continue_paused()
            living = {s.process.sentinel: s for s in self.slots.values() if not s.done}
            pause_s = min([until, *self._resume_at.values()]) - time.monotonic()
            if not living or until <= time.monotonic():
                return
            for sentinel in wait(list(living), max(pause_s, 0.0)):
                self._ended(living[sentinel])

    def _continue_paused(self) -> None:
        now = time.monotonic()
        for pid, at in list(self._resume_at.items()):
            if at <= now:
                del self._resume_at[pid]
                _signal(pid, signal.SIGCONT)

    def kill(self, name: str) -> None:
        """SIGKILL the process of a slot."""
        slot = self.slots[name]
        if slot.pid is not None:
            slot.killed_by_us = True
            _signal(slot.pid, signal.SIGKILL)

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP the process of a slot, and SIGCONT after ``seconds``."""
        pid = self.slots[name].pid
        if pid is not None:
            _signal(pid, signal.SIGSTOP)
            self._resume_at[pid] = time.monotonic() + seconds
            self.counts["pause"] += 1

    def become_wild(self) -> None:
        """From here on who is born brings faults along."""
        self.calm = False

    def become_calm(self) -> None:
        """From here on nobody brings faults along: who lives with one is killed."""
        self.calm = True
        self._resume_at = dict.fromkeys(self._resume_at, 0.0)
        self._continue_paused()
        for slot in self.slots.values():
            if slot.life != Life():
                self.kill(slot.name)

    def stop(self) -> list[str]:
        """Kill who is left; return their names."""
        left = [slot for slot in self.slots.values() if not slot.done]
        for slot in left:
            slot.process.kill()
            slot.process.join()
        return [slot.name for slot in left]

    def _ended(self, slot: Slot) -> None:
        slot.process.join()
        code = slot.process.exitcode
        if code == 0:
            slot.done = True
            if not self.may_end:
                self.unexpected.append(f"{slot.name}: ended before the experiment was finished")
            return
        if code == -signal.SIGKILL:
            at_point = slot.life.crash_at is not None and not slot.killed_by_us
            self.counts["kill at a crash point" if at_point else "kill"] += 1
            if not at_point and not slot.killed_by_us:
                self.unexpected.append(f"{slot.name}: killed by somebody else")
        elif code == REFUSED:
            self._note_error(slot)
        else:
            self.unexpected.append(f"{slot.name}: exit code {code}\n{_tail(slot.log)}")
        self._bear(slot)

    def _note_error(self, slot: Slot) -> None:
        said = [line for line in slot.log.read_text().splitlines() if line.startswith("ENDED ")]
        kind = said[-1].split()[1].rstrip(":") if said else "?"
        full = "disk is full" in said[-1] if said else False
        if full and slot.life.pages is not None:
            self.counts["disk full"] += 1
        self.counts[f"ended by {kind}"] += 1


def _signal(pid: int, which: signal.Signals) -> None:
    try:
        os.kill(pid, which)
    except ProcessLookupError:
        return  # it has just ended by itself


def _tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-12:])
