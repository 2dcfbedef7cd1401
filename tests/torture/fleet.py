"""The processes of a round: born again whenever they end, until they may end for good."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.crash.forking import CONTEXT
from tests.torture import effects
from tests.torture.roles import REFUSED, Life, live

LEASE_TTL_S = 1.0
"""Of the trainers; a pause that is no longer than that is none."""


@dataclass(slots=True)
class Slot:
    """One place in the fleet, filled by one process after the other.

    Attributes:
        owes: a kind of fault, and the life that brings it along until it has taken effect once.
        killed: SIGKILL was sent from outside.
        killed_as: the kind of fault which that was; None if it was to clean up.
        gone: nobody is born here again.
    """

    name: str
    role: str
    arguments: Mapping[str, Any]
    lives: Iterator[Life]
    log: Path
    process: Any = None
    life: Life = field(default_factory=Life)
    owes: tuple[str, Life] | None = None
    killed: bool = False
    killed_as: str | None = None
    gone: bool = False
    done: bool = False

    @property
    def pid(self) -> int | None:
        """Process id, or None while nobody lives here."""
        alive = self.process is not None and self.process.exitcode is None
        return self.process.pid if alive else None


class Pause(NamedTuple):
    """A process that is stopped, monotonic times, and the kind of fault that this is."""

    process: psutil.Process
    since: float
    until: float
    kind: str | None


class Fleet:
    """Starts processes, notes how they end, and starts them again.

    Attributes:
        lives: how many processes were started.
        own_kills: how many were killed only to clean up, or to be born with a fault.
        ended: how many ended with one of our own errors, by its name.
        unexpected: ends that no fault explains, told with the last lines of the log.
        calm: who is born brings no faults along; so it is at first, until `become_wild`.
        may_end: the experiment is finished, so who follows it may end.
    """

    def __init__(self, slots: list[Slot], folder: Path) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.lives = 0
        self.own_kills = 0
        self.ended: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.calm = True
        self.may_end = False
        self._folder = folder
        self._pauses: dict[str, Pause] = {}

    def start(self) -> None:
        """Start every process."""
        for slot in self.slots.values():
            self._bear(slot)

    def _bear(self, slot: Slot) -> None:
        slot.life = Life() if self.calm else self._next_life(slot)
        slot.killed = False
        arguments = (slot.role, dict(slot.arguments), slot.life, str(slot.log))
        slot.process = CONTEXT.Process(target=live, args=arguments, daemon=True)
        slot.process.start()
        self.lives += 1

    def _next_life(self, slot: Slot) -> Life:
        if slot.owes is not None and slot.owes[0] not in effects.seen(self._folder):
            return slot.owes[1]
        return next(slot.lives)

    def tend(self, until: float) -> None:
        """Until ``until`` (monotonic), or until all have ended for good: bury and bear.

        What nobody expected ends the round: it would only happen again and again.
        """
        while not self.unexpected:
            self._resume_due(time.monotonic())
            living = {s.process.sentinel: s for s in self.slots.values() if not s.done}
            next_s = min([until, *(pause.until for pause in self._pauses.values())])
            if not living or until <= time.monotonic():
                return
            for sentinel in wait(list(living), max(next_s - time.monotonic(), 0.0)):
                self._ended(living[sentinel])

    def kill(self, name: str, kind: str | None = None) -> None:
        """SIGKILL the process of a slot, as a fault of ``kind`` or to clean up."""
        slot = self.slots[name]
        if slot.pid is not None:
            slot.killed, slot.killed_as = True, kind
            slot.process.kill()

    def kill_for_good(self, name: str, kind: str) -> None:
        """SIGKILL the process of a slot that stays empty."""
        if self.slots[name].pid is not None:
            self.slots[name].gone = True
            self.kill(name, kind)

    def pause(self, name: str, kind: str | None, seconds: float) -> None:
        """SIGSTOP the process of a slot, and SIGCONT after ``seconds``."""
        pid = self.slots[name].pid
        if pid is None or name in self._pauses:
            return
        with suppress(psutil.NoSuchProcess):  # it has just ended by itself
            process = psutil.Process(pid)
            process.suspend()
            now = time.monotonic()
            self._pauses[name] = Pause(process, now, now + seconds, kind)

    def is_stopped(self, name: str) -> bool:
        """Return whether a process is paused and alive."""
        return name in self._pauses and _is_stopped(self._pauses[name].process)

    def resume(self) -> None:
        """SIGCONT everybody."""
        self._resume_due(float("inf"))

    def _resume_due(self, due: float) -> None:
        for name, pause in list(self._pauses.items()):
            if pause.until > due:
                continue
            del self._pauses[name]
            is_long = time.monotonic() - pause.since > LEASE_TTL_S
            if pause.kind and is_long and _is_stopped(pause.process):  # so it was all the time
                effects.note(self._folder, pause.kind)
            with suppress(psutil.NoSuchProcess):
                pause.process.resume()

    def become_wild(self, owed: Mapping[str, tuple[str, Life]]) -> None:
        """From here on who is born brings faults along: first of all, by slot, what it owes."""
        self.calm = False
        for name, owes in owed.items():
            self.slots[name].owes = owes
            self.kill(name)

    def become_calm(self) -> None:
        """From here on nobody brings faults along: who lives with one is killed."""
        self.calm = True
        self.resume()
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
            self._note_kill(slot)
        elif code == REFUSED:
            said = [line for line in slot.log.read_text().splitlines() if line.startswith("ENDED ")]
            self.ended[said[-1].split()[1].rstrip(":")] += 1
        else:
            self.unexpected.append(f"{slot.name}: exit code {code}\n{_tail(slot.log)}")
        slot.done = slot.gone
        if not slot.gone:
            self._bear(slot)

    def _note_kill(self, slot: Slot) -> None:
        if not slot.killed:
            if slot.life.crash_at is None:
                self.unexpected.append(f"{slot.name}: killed by somebody else")
        elif slot.killed_as is None:
            self.own_kills += 1
        else:
            effects.note(self._folder, slot.killed_as)


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-12:])
