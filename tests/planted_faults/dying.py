"""Processes that are killed at once, behind what they were told or have recorded."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import anyio

from tests.sample_run import rollout
from trinity_buffer import open_store
from trinity_buffer.explorer.explore import Acknowledgements
from trinity_buffer.pipeline.write.batch import WriteCall
from trinity_buffer.pipeline.write.writer import GroupCommit
from trinity_buffer.store.log import Place


def write_and_die(url: str, noted: str, fault: str) -> None:
    """Write one group, note its receipt, die."""
    if fault:
        GroupCommit.submit = _acknowledge_first  # type: ignore[method-assign]

    async def main() -> None:
        async with open_store(url) as store:
            experiment = await store.experiment("run")
            some = [rollout("b0", 0, run, 1.0) for run in range(4)]
            Acknowledgements(Path(noted)).note(await experiment.writer("e0").write(some))
            os.kill(os.getpid(), signal.SIGKILL)

    anyio.run(main)


def open_and_die(url: str, options: dict[str, Any]) -> None:
    """Open a train stream, which deals what an earlier life left, and die."""

    async def main() -> None:
        async with open_store(url) as store:
            experiment = await store.experiment("run")
            async with experiment.train_stream(**options):
                os.kill(os.getpid(), signal.SIGKILL)

    anyio.run(main)


async def _acknowledge_first(self: GroupCommit, call: WriteCall) -> None:
    """Say that it is durable, as the commit will surely come."""
    call.prepare()  # a receipt names contents
    _PENDING.append(asyncio.create_task(_SUBMIT(self, call)))
    call.place = Place(1, bytes(32))


_SUBMIT = GroupCommit.submit
_PENDING: list[asyncio.Task[None]] = []
