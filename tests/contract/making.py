"""Small experiences, stores to put them in, and what must hold of these."""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import torch

from tests.handles import Experiment, Transaction
from tests.raw_store import note_presence, rows
from trinity_buffer import open_store
from trinity_buffer.experience import EID, Experience
from trinity_buffer.identity import Key

T = TypeVar("T")

PROMPT = 3


def rollout(
    batch: Key = "b",
    task: Key = 0,
    run: int = 0,
    step: int = 0,
    suffix: str = "",
    *,
    length: int = 8,
    reward: float | None = 0.5,
    version: int | None = 0,
    seed: int = 0,
) -> Experience:
    """Return an experience of ``length`` tokens; the same arguments, the same content."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{task}/{run}/{step}/{seed}".encode()))
    return Experience(
        eid=EID(batch, task, run, step, suffix),
        tokens=torch.randint(0, 999, (length,), generator=generator, dtype=torch.int32),
        prompt_length=min(PROMPT, length - 1),
        logprobs=-torch.rand(length - min(PROMPT, length - 1), generator=generator),
        reward=reward,
        info={} if version is None else {"model_version": version},
    )


def group(
    batch: Key = "b", task: Key = 0, runs: int = 4, *, rewards: Sequence[float | None] | None = None
) -> list[Experience]:
    """Return the runs of one task; by default every second one is right."""
    found = rewards or [float(run % 2) for run in range(runs)]
    return [rollout(batch, task, run, reward=reward) for run, reward in enumerate(found)]


@asynccontextmanager
async def opened(url: str, **config: Any) -> AsyncIterator[Experiment]:
    """Open the experiment ``run`` in a store of its own, as another process would."""
    async with open_store(url) as store:
        yield await store.experiment("run", config=config)


@asynccontextmanager
async def living(experiment: Experiment, actor: str) -> AsyncIterator[int]:
    """Yield the number of another process that is there as an explorer, and then ends."""
    async with await anyio.open_process([sys.executable, "-c", "input()"]) as process:
        await note_presence(experiment, "explorer", actor, process.pid)
        yield process.pid


async def kinds(experiment: Experiment) -> list[str]:
    """Return the kinds of all events, in order."""
    return [event.kind async for event in experiment.events()]


async def assert_conserved(experiment: Experiment) -> None:
    """Every experience is in one place for each set, every annotation in one for each trainer.

    Of sets of addresses, read off the tables: not of counts, nor with the program's own queries.
    """
    stored = await rows(experiment, "experience")
    decided = await rows(experiment, "rejection")
    for one in await rows(experiment, "consumer"):
        name = one["name"]
        left_out = [row["address"] for row in decided if row["consumer"] == name]
        if one["kind"] == "strategy":
            of_set = await rows(experiment, "annotation")
            annotated = {row["experience"] for row in of_set if row["consumer"] == name}
            waiting = await rows(experiment, "waiting")
            open_rows = [row for row in stored if row["refused"] is None]
            places = [
                [row["address"] for row in open_rows if row["address"] >> 20 > one["cursor"]],
                [row["address"] for row in waiting if row["consumer"] == name],
                [row["address"] for row in stored if row["refused"] is not None],
                [*annotated],
                left_out,
            ]
            everything = [row["address"] for row in stored]
        else:
            held = await rows(experiment, "delivery")
            delivered = [row["address"] for row in held if row["consumer"] == name]
            of_set = await rows(experiment, "annotation")
            annotation_set = json.loads(one["config"])["strategy"]
            everything = [row["address"] for row in of_set if row["consumer"] == annotation_set]
            places = [delivered, left_out, [*{*everything} - {*delivered, *left_out}]]
        assert sorted(address for place in places for address in place) == everything, name


def dawdling(wait: Callable[[], Coroutine[Any, Any, T]]) -> Callable[[Transaction], T]:
    """Return what waits inside a transaction for something else than its database.

    No function of the package can do so; here it stands for a process that is slow. Call this on
    the event loop, and what it returns in the transaction.
    """
    loop = asyncio.get_running_loop()

    def dawdle(tx: Transaction) -> T:
        del tx
        return asyncio.run_coroutine_threadsafe(wait(), loop).result()

    return dawdle
