"""Processes that cost milliseconds: forked from a server that has imported everything already."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path

from trinity_buffer import faultpoints

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = (
    "asyncpg",
    "torch._dynamo",  # two seconds, which the first optimizer of a process would take
    "tests.crash.roles",
    "tests.torture.roles",
    # what the package imports only when it is needed
    "trinity_buffer.pipeline.write.writer",
    "trinity_buffer.pipeline.load.experiences",
    "trinity_buffer.pipeline.train.stream",
)
CONTEXT.set_forkserver_preload(list(IMPORTED))

LIMIT_S = 300.0
_PR_SET_PDEATHSIG = 1


def become(
    log: str,
    crash_at: str | None,
    last_words: Callable[[str], None] = faultpoints.nothing,
) -> None:
    """Turn the forked process into one life: say everything to ``log``, die at ``crash_at``.

    It arms the crash point itself, as they were imported before the fork. It dies with the server
    that it was forked from, and that one with the process that started it: a server ends when
    nobody has its pipe open any more, so what is born of it must let go of the pipe.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    before = faultpoints.reached
    armed = faultpoints.nothing if crash_at is None else faultpoints.armed(crash_at, last_words)
    for module in list(sys.modules.values()):
        if getattr(module, "reached", None) is before:
            module.reached = armed  # type: ignore[attr-defined]  # the modules that imported it


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


def _live(log: str, crash_at: str | None, main: Callable[..., None], *given: str) -> None:
    become(log, crash_at)
    main(*given)
