"""What a rollout may do to `tb.explore`: be cancelled, and return what others return, too."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

import pytest

import trinity_buffer as tb
from tests.explorer.test_exploring import SMALL, TASKS, all_runs, answer, experience, runs
from trinity_buffer.errors import InvalidArgumentError, TrainingError


async def explore(url: str, rollout: Any, **options: Any) -> Any:
    async with tb.open_store(url) as store:
        experiment = await store.experiment("run", config={})
        given: dict[str, Any] = {"tasks": TASKS, "model": None, **SMALL, **options}
        await tb.explore(experiment, actor="e0", rollout=rollout, **given)
        stored = [one async for one in experiment.read()]
        assert await runs(experiment) == all_runs()
        return stored


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_a_rollout_that_is_cancelled_from_within_ends_it_with_its_name(
    sqlite_url: str, concurrency: int
) -> None:
    async def cancelled(task: str, model: object) -> list[tb.Experience]:
        if task == "bee":
            shared = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(shared.cancel)
            await shared
        return [experience()]

    with pytest.raises(TrainingError, match=r"rollout epoch0-0/1/[01] was cancelled from within"):
        await explore(sqlite_url, cancelled, concurrency=concurrency)
    await explore(sqlite_url, answer)  # what is missing is made


async def test_explore_is_cancelled_from_outside_without_an_error(sqlite_url: str) -> None:
    begun = asyncio.Event()

    async def hangs(task: str, model: object) -> list[tb.Experience]:
        begun.set()
        await asyncio.sleep(60)
        return []

    exploring = asyncio.ensure_future(explore(sqlite_url, hangs))
    await begun.wait()
    exploring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exploring


async def test_rollouts_may_share_a_mapping_and_return_the_same_object(sqlite_url: str) -> None:
    class Versioned:
        def load(self, uri: str) -> Versioned:
            return self

    shared = experience()
    shared.info = {"source": "cache"}

    async def cached(task: str, model: object) -> list[tb.Experience]:
        await asyncio.sleep(0)
        return [shared]

    stored = await explore(sqlite_url, cached, model=Versioned())
    assert shared.info == {"source": "cache"}
    assert [one.info["source"] for one in stored] == ["cache"] * len(stored)
    assert {one.info["model_version"] for one in stored} == {0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_batches", 0), ("max_batches", "1"), ("concurrency", "8"), ("attempts", True)),
        *(("timeout_s", "5"), ("timeout_s", math.nan), ("timeout_s", 0), ("retry_delay_s", -1)),
        *(("retry_on", OSError), ("retry_on", ("OSError",)), ("report", 5)),
        ("rollouts_per_group", None),
    ],
)
async def test_an_option_that_cannot_be_is_refused_first(
    sqlite_url: str, name: str, value: object
) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(f"{name}={value!r}: must be")):
        await explore(sqlite_url, answer, **{name: value})
