"""A process that follows an experiment with a strategy, and dies or pauses on its way."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from typing_extensions import override

from tests.crash.forking import CONTEXT, become
from tests.small_sizes import resized
from trinity_buffer import open_store, run_strategy
from trinity_buffer.algorithm import GRPOAddStrategy
from trinity_buffer.experience import Experience

NAME = "all"


class Pausing(GRPOAddStrategy):
    """Pauses its process, once, before it scores a group."""

    after = 0  # groups; 0: never

    @override
    async def add(self, exps: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        Pausing.after -= 1
        if Pausing.after == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return await super().add(exps, step)


def decide(url: str, told: str, pause_at: int, crash_at: str | None) -> None:
    """Follow the experiment; write to the file ``told`` how many experiences were annotated."""
    become(f"{told}.log", crash_at)
    Pausing.after = pause_at

    async def main() -> int:
        async with open_store(url) as store:
            experiment = await store.experiment("run")
            report = await run_strategy(experiment, Pausing, name=NAME, follow=True)
            return report.annotated

    with resized(experiences_per_commit=1, experiences_per_live_commit=1):  # groups one by one
        Path(told).write_text(f"{asyncio.run(main())}")


def started(url: str, told: Path, *, pause_at: int = 0, crash_at: str | None = None) -> Any:
    """Return such a process, started.

    Args:
        pause_at: the group before which it pauses; 0: none.
        crash_at: the crash point at which it is killed.
    """
    process = CONTEXT.Process(target=decide, args=(url, str(told), pause_at, crash_at))
    process.start()
    return process
