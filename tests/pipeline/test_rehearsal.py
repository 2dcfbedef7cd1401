"""What each role goes through once before its first group, in a store in memory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from typing_extensions import override

from tests.contract.making import group, kinds, opened
from trinity_buffer.pipeline.annotating import rehearsal as of_strategies
from trinity_buffer.pipeline.annotating import strategy_consumer
from trinity_buffer.pipeline.annotating.strategy_consumer import run_strategy
from trinity_buffer.pipeline.spoken_wait import SpokenWait
from trinity_buffer.pipeline.streaming.rehearsal import rehearse_training
from trinity_buffer.pipeline.writing import group_commit
from trinity_buffer.pipeline.writing.rehearsal import RUNS, rehearse_writing
from trinity_buffer.store import log, queries
from trinity_buffer.store.scratch import scratch

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("role", ["explorer", "strategy", "trainer"])
def test_the_first_group_of_a_process_imports_and_compiles_nothing(
    role: str, store_url: str
) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.first_group", role, store_url],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = json.loads(said)
    if store_url.startswith("postgresql"):  # plain rows are inserted by no kept statement there
        compiled = found["statements"]
        found["statements"] = [one for one in compiled if "SELECT" in one or "INSERT" not in one]
    assert found == {"statements": [], "modules": []}


@pytest.mark.long
def test_a_group_is_decided_and_trained_without_masked_arrays() -> None:
    """Some functions of NumPy import them at their first call, for 8 ms of the first group."""
    code = """import sys
from trinity_buffer.pipeline.streaming.rehearsal import rehearse_training
rehearse_training("sqlite", "padded")
sys.exit("numpy.ma" in sys.modules)"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("families", [(), ("light", "tokens")])
def test_a_rehearsed_group_is_decided_as_any_other(families: tuple[str, ...]) -> None:
    with scratch() as s:
        experiment = of_strategies.decided(s, families)
        assert s.read(log.head, experiment.key) == 3  # recorded, registered, annotated
        row = s.read(queries.consumer_row, experiment.key, "rehearsal")
        assert row is not None
        assert (row.calls, row.cursor) == (1, 2)


async def test_a_rehearsal_leaves_nothing(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a file of the name would be made
    async with opened(store_url, rollouts_per_group=RUNS) as experiment:
        for rehearse in (rehearse_writing, of_strategies.rehearse_deciding, rehearse_training):
            rehearse.cache_clear()
        experiment.writer("e0")
        of_strategies.rehearse_deciding("sqlite", ("light", "tokens"))
        rehearse_training("sqlite", "packed")
        assert await kinds(experiment) == ["ExperimentCreated"]
    assert not there("memory")


def test_a_rehearsal_needs_no_folder_and_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    rehearse_writing.cache_clear()
    with torch.device("meta"):
        rehearse_writing("sqlite")


def test_a_rehearsal_passes_no_crash_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that kills a process inside its first append means one of the real store."""
    passed: list[str] = []
    monkeypatch.setattr(group_commit, "reached", passed.append)
    for rehearse in (rehearse_writing, of_strategies.rehearse_deciding, rehearse_training):
        rehearse.cache_clear()
    rehearse_writing("sqlite")
    of_strategies.rehearse_deciding("sqlite", ("light", "tokens"))
    rehearse_training("sqlite", "padded")
    assert passed == []


def there(word: str) -> list[Path]:
    return [path for path in Path().iterdir() if word in path.name]


class ToldWait(SpokenWait):
    """A wait that tells a test that it has begun."""

    begun: ClassVar[asyncio.Event]

    @override
    async def changed(self, state: tuple[int, int], timeout_s: float | None = None) -> None:
        self.begun.set()
        await super().changed(state, timeout_s)


@pytest.mark.parametrize("groups", [0, 1])
async def test_who_finds_work_at_once_does_not_rehearse(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    rehearsed: list[tuple[object, ...]] = []
    ToldWait.begun = asyncio.Event()
    monkeypatch.setattr(
        strategy_consumer, "rehearse_deciding", lambda *given: rehearsed.append(given)
    )
    monkeypatch.setattr(strategy_consumer, "SpokenWait", ToldWait)
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        if groups:
            await experiment.writer("e0").write(group(runs=2))
        following = asyncio.create_task(run_strategy(experiment, "grpo", follow=True))
        await ToldWait.begun.wait()
        await experiment.finish("over")
        await following
    assert len(rehearsed) == 1 - groups
