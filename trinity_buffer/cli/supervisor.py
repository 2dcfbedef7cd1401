"""Keeps the processes of a run alive, and, when asked to, kills them."""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_buffer import errors

RESTARTS_WITHOUT_CHAOS = 3
FRIENDLY_EXIT_S = 1.2
"""Time for a process to end by itself; being killed after it loses nothing either."""

LAST_BYTES = 4_096
"""How much of a log is read for its last line."""

ENDS_WITH_PARENT = "TRINITY_BUFFER_ENDS_WITH_PARENT"
"""Environment variable with the id of the parent: when that is gone, end as with Ctrl-C."""

GIVEN_UP = 3
"""Exit code of a supervised process that a restart would not help; only its supervisor sees it."""

STALLED = 3
"""Exit code of a command whose run has stalled."""

_FINAL = (2, GIVEN_UP)  # 2: the command itself was refused

_BEYOND_RESTART = (
    *(errors.InvalidArgumentError, errors.ConflictError, errors.TrainingError),
    *(errors.CodecVersionError, errors.SchemaOutdatedError, errors.SchemaTooNewError),
    *(errors.UnknownStoreError, errors.UnknownExperimentError, errors.UnsafeStoreError),
    *(errors.ReadOnlyStoreError, errors.StoreReplacedError),
)

_PR_SET_PDEATHSIG = 1


def exit_code_of(error: errors.TrinityBufferError | OSError) -> int:
    """Return the exit code for ``error``: 1 failed, 2 refused, 3 the run has stalled.

    The code of a supervised command instead decides whether its supervisor restarts it.
    """
    if os.environ.get(ENDS_WITH_PARENT):
        return GIVEN_UP if isinstance(error, _BEYOND_RESTART) else 1
    if isinstance(error, errors.RunStalledError):
        return STALLED
    return 1 if isinstance(error, errors.TrainingError | OSError) else 2


def end_with_parent() -> None:
    """Ask the kernel to interrupt this process when its parent dies, if the environment says so.

    Linux only.

    Raises:
        SystemExit: the parent died while this process was importing.
    """
    parent = os.environ.get(ENDS_WITH_PARENT)
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != int(parent):  # it died before prctl, which then never signals
        raise SystemExit(128 + signal.SIGINT)


@dataclass(slots=True)
class Child:
    """One process of a run, across its restarts."""

    name: str
    command: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    kills: int = 0
    _log_start: int = 0

    def start(self) -> None:
        """Start it; it appends to its log."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # the processes share few cores
            "PYTHONUNBUFFERED": "1",
            ENDS_WITH_PARENT: str(os.getpid()),
        }
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            # In a session of its own, so that Ctrl-C only reaches the supervisor, which then asks
            # the children one by one.
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(
                self.command, env=environment, start_new_session=True, **streams
            )

    @property
    def alive(self) -> bool:
        """Whether it runs right now."""
        return self.process is not None and self.process.poll() is None

    @property
    def at_work(self) -> bool:
        """Whether it has done something since its start: printed a second line.

        An annotator only prints a first one.
        """
        with self.log.open("rb") as handle:
            handle.seek(self._log_start)
            lines = handle.read().count(b"\n")
        return self.alive and lines > (0 if "annotate" in self.command else 1)

    def last_line(self) -> str:
        """Return the last line of its log."""
        try:
            with self.log.open("rb") as handle:
                handle.seek(max(0, self.log.stat().st_size - LAST_BYTES))
                lines = handle.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line for line in reversed(lines) if line.strip()), "")


@dataclass(slots=True)
class Supervisor:
    """Starts the processes of a run and restarts those that die.

    Attributes:
        chaos_every_s: kill a random process with SIGKILL about so often; None: never.
    """

    commands: Mapping[str, Sequence[str]]
    logs: Path
    chaos_every_s: float | None = None
    seed: int = 0
    children: list[Child] = field(default_factory=list)
    _random: random.Random = field(default_factory=random.Random)
    _next_kill: float = math.inf

    def start(self) -> None:
        """Start every process."""
        self._random.seed(self.seed)
        self.logs.mkdir(parents=True, exist_ok=True)
        for name, command in self.commands.items():
            child = Child(name, command, self.logs / f"{name}.log")
            child.log.write_text("")
            self.children.append(child)
            child.start()
        self._plan_kill()

    def _plan_kill(self) -> None:
        if self.chaos_every_s is not None:
            self._next_kill = time.monotonic() + self._random.uniform(0.5, 1.5) * self.chaos_every_s

    @property
    def kills(self) -> int:
        """Number of processes that were killed on purpose."""
        return sum(child.kills for child in self.children)

    def tend(self) -> Child | None:
        """Restart dead processes, kill one if due; return one that cannot be kept alive.

        A process that was refused, or whose exit code says that a restart would not help, is not
        started again.
        """
        if time.monotonic() >= self._next_kill:
            # Only those at work: on a machine where starting a process takes longer than the time
            # between two kills, the run would otherwise never make progress.
            if victims := [child for child in self.children if child.at_work]:
                victim = self._random.choice(victims)
                assert victim.process is not None
                victim.process.kill()
                victim.process.wait()
                victim.kills += 1
            self._plan_kill()
        for child in self.children:
            code = None if child.process is None else child.process.poll()
            if not code:  # it runs, or has ended well
                continue
            if code in _FINAL or child.restarts - child.kills >= RESTARTS_WITHOUT_CHAOS:
                return child
            child.restarts += 1
            child.start()
        return None

    @property
    def running(self) -> int:
        """Number of processes that are alive."""
        return sum(child.alive for child in self.children)

    def stop(self, friendly_s: float = FRIENDLY_EXIT_S) -> None:
        """Interrupt every process, as Ctrl-C does; kill those that still run after ``friendly_s``.

        Ctrl-C is ignored meanwhile, or processes would be left behind.
        """
        # Python only lets the main thread set handlers of signals.
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
        try:
            running = [child.process for child in self.children if child.alive and child.process]
            for process in running:
                process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + friendly_s
            for process in running:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        finally:
            if in_main_thread:
                signal.signal(signal.SIGINT, before)


def command_of(*words: str) -> list[str]:
    """Return the command line of ``trinity-buffer words`` under this interpreter."""
    return [sys.executable, "-m", "trinity_buffer", *words]
