"""Ranks in processes of their own, forked from one that has imported all they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.crash.forking import CONTEXT, IMPORTED, become

LIMIT_S = 300.0

# Each has ``main``. transformers and FSDP take some seconds, in every process that imports them.
CONTEXT.set_forkserver_preload(
    [
        *IMPORTED,
        "tests.trainer.numbers_rank",
        "tests.trainer.rank_process",
        "tests.trainer.sharded_rank",
        "tests.trainer.wrapped_rank",
    ]
)


def said_by_ranks(
    main: Callable[..., None], of_rank: Sequence[Sequence[str]], folder: Path
) -> list[str]:
    """Run ``main`` in a process for each arguments ``of_rank``; return what each said.

    It begins with how the process ended, "0" if well.
    """
    logs = [folder / f"rank-{number}.log" for number in range(len(of_rank))]
    processes = [
        CONTEXT.Process(target=_live, args=(str(log), main, *given), daemon=True)
        for log, given in zip(logs, of_rank, strict=True)
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


def _live(log: str, main: Callable[..., None], *given: str) -> None:
    become(log, None)
    main(*given)
