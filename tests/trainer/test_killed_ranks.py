"""Ranks in processes of their own: one is killed, and another number of them goes on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import anyio
import pytest

from tests.crash.forking import CONTEXT
from tests.trainer.data import recorded, rollouts
from tests.trainer.rank_life import train
from trinity_buffer import open_store, verify

LIVES = ((2, 1, 2), (3, 0, 3), (1, 0, 4), (4, 3, 5), (2, None, 0))
"""Number of ranks, which of them is killed, and in which step it has begun."""


def live(url: str, folder: Path, ranks: int, victim: int | None, dies_in: int) -> list[int]:
    """Let ranks live until one is killed: then the others end by themselves."""
    folder.mkdir()
    processes = [
        CONTEXT.Process(
            target=train, args=(url, str(folder), rank, ranks, dies_in if rank == victim else 0)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    if victim is not None:
        processes[victim].join()
    for process in processes:
        process.join(60)
        process.kill()
    return [process.exitcode or 0 for process in processes]


async def create(url: str) -> int:
    async with open_store(url) as store:
        await recorded(store, "run", "experience", rollouts())
    return len(rollouts())


async def look(url: str) -> tuple[int, bool]:
    """Return the last committed step, and whether everything holds."""
    async with open_store(url) as store:
        found = await verify(await store.experiment("run"))
        commits = [
            e.body["steps"][-1]
            async for e in (await store.experiment("run")).events(kinds=("StepsCommitted",))
        ]
    return max(commits, default=0), found.ok


@pytest.mark.long
def test_when_a_rank_is_killed_any_number_goes_on_and_no_row_is_lost(
    store_url: str, tmp_path: Path
) -> None:
    number = anyio.run(create, store_url)
    trained: Counter[int] = Counter()
    before = 0
    for life, (ranks, victim, dies_in) in enumerate(LIVES):
        folder = tmp_path / str(life)
        codes = live(store_url, folder, ranks, victim, dies_in)
        ended = [0 if victim is None else -9 if rank == victim else 1 for rank in range(ranks)]
        assert codes == ended, (folder / "log").read_text()
        committed, holds = anyio.run(look, store_url)
        assert holds
        for line in (folder / "taken").read_text().splitlines():
            step, rows = json.loads(line)
            if before < step <= committed:
                trained.update(rows)
        before = committed
    assert set(trained.values()) == {1}
    assert len(trained) == number
