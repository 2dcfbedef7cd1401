"""Processes that cost milliseconds: forked from a server that has imported everything already."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any

import pytest

from tests.crash import points
from trinity_buffer.cli import supervisor

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = (
    "psycopg",
    "torch._dynamo",  # two seconds, which the first optimizer of a process would take
    "tests.crash.roles",
    "tests.torture.roles",
    "trinity_buffer.cli.roles",
    # what the package imports only when it is needed
    "trinity_buffer.pipeline.write.writer",
    "trinity_buffer.pipeline.load.columns",
    "trinity_buffer.pipeline.train.stream",
)
CONTEXT.set_forkserver_preload(list(IMPORTED))

LIMIT_S = 300.0
_PR_SET_PDEATHSIG = 1


def become(
    log: str, crash_at: str | None, last_words: Callable[[str], None] = lambda _: None
) -> None:
    """Turn the forked process into one life: say everything to ``log``, die at ``crash_at``.

    It dies with the server that it was forked from, and that one with the process that started it:
    a server ends when nobody has its pipe open any more, so what is born of it must let go of the
    pipe.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if crash_at is not None:
        killing = points.killing(crash_at, last_words)
        points.install(killing)
        points.install_steps(killing)


def said_by(
    main: Callable[..., None],
    of_each: Sequence[Sequence[str]],
    folder: Path,
    crash_at: str | None = None,
) -> list[str]:
    """Run ``main`` in a process for each arguments ``of_each``; return what each said.

    It begins with how the process ended: "0: " if well, "-9: " if it was killed.
    """
    logs = [folder / f"forked-{number}.log" for number in range(len(of_each))]
    processes = [
        CONTEXT.Process(target=_live, args=(str(log), crash_at, main, *given), daemon=True)
        for log, given in zip(logs, of_each, strict=True)
    ]
    for log in logs:
        log.unlink(missing_ok=True)
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        process.kill()  # what is late is waited for no more
        process.join()
    return [
        f"{process.exitcode}: {log.read_text() if log.exists() else ''}"
        for process, log in zip(processes, logs, strict=True)
    ]


def as_module(module: str, *arguments: str) -> None:
    """Do what ``python -m module arguments`` does, for `said_by`."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class ForkedChild:
    """In place of the `subprocess.Popen` of a supervisor: ``python -m module words``, forked."""

    def __init__(self, command: Sequence[str], *, stdout: IO[bytes], env: dict[str, str], **_: Any):
        interpreter, option, *words = command
        assert (interpreter, option) == (sys.executable, "-m")
        log = str(Path(f"/proc/self/fd/{stdout.fileno()}").readlink())
        given = (log, env, str(Path.cwd()), words)
        self._process = CONTEXT.Process(target=_as_child, args=given, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked child", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the supervisor of a demo fork its processes: each saves two seconds of imports."""
    monkeypatch.setattr(supervisor, "subprocess", _WithForks)


class _WithForks:
    Popen = ForkedChild
    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired


def _as_child(log: str, environment: dict[str, str], folder: str, words: list[str]) -> None:
    environment.pop(supervisor.ENDS_WITH_PARENT, None)  # the parent is the server
    become(log, environment.get(points.VARIABLE))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    as_module(*words)


def _live(log: str, crash_at: str | None, main: Callable[..., None], *given: str) -> None:
    become(log, crash_at)
    main(*given)
