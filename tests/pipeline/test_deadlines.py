"""Batches that nobody completes: closed at their deadline, and in no bound's way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from tests.conftest import Resize
from tests.contract.making import group, living, opened, rollout
from tests.handles import Experiment
from tests.raw_store import now_us, sql
from trinity_buffer import run_strategy
from trinity_buffer.pipeline.annotate import grouping
from trinity_buffer.pipeline.coordination.diagnosis import abandoned_groups

BOUNDS = ({"max_staleness": 0}, {"max_queued_groups": 1})
SOON: dict[str, Any] = {"rollouts_per_group": 4, "group_timeout_s": 0.05}


async def sealed(experiment: Experiment) -> dict[str, tuple[str, int]]:
    """Return batch -> who sealed it, and with how many experiences."""
    events = experiment.events(kinds=["BatchSealed"])
    return {e.body["batch"]: (e.actor, e.body["expected"]) async for e in events}


@asynccontextmanager
async def abandoned(url: str, **config: Any) -> AsyncIterator[Experiment]:
    """Open an experiment of which a batch of two groups was planned by a process that ended."""
    async with opened(url, rollouts_per_group=4, **config) as experiment:
        async with living(experiment, "gone"):
            await experiment.writer("gone").plan("b", [0, 1], 4, policy_version=0)
            await experiment.writer("gone").write(group())
        await experiment.database.write(sql("DELETE FROM presence"))
        yield experiment


@pytest.mark.parametrize("bound", BOUNDS)
async def test_a_batch_of_which_nothing_is_stored_is_closed_at_the_deadline_of_its_plan(
    store_url: str, bound: dict[str, int]
) -> None:
    async with opened(store_url, **SOON, **bound) as experiment, opened(store_url) as other:
        await experiment.writer("dead").plan("b", range(6), 4, policy_version=0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(run_strategy, other, "grpo", follow=True))
            with anyio.fail_after(30):
                assert await experiment.writer("alive").plan("c", [0], 4, policy_version=0)
            await experiment.finish("enough")
        assert (await sealed(experiment))["b"] == ("grpo", 0)


async def test_a_deadline_holds_for_what_was_planned_before_the_strategy_was_started_again(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store_url, rollouts_per_group=4, group_timeout_s=60.0) as experiment:
        await experiment.writer("dead").plan("b", [0, 1], 4)
        await experiment.writer("e0").write(group(batch="other"))
        await run_strategy(experiment, "grpo")  # its cursor is behind the plan
        assert await sealed(experiment) == {}
    later = now_us() + 3600_000_000
    monkeypatch.setattr(grouping, "now_us", lambda: later)
    async with opened(store_url) as experiment:
        await run_strategy(experiment, "grpo")
        assert await sealed(experiment) == {"b": ("grpo", 0)}


@pytest.mark.parametrize(
    ("readers", "who"),
    [
        ({}, None),  # a trainer may come and read either set
        ({"trainer": "grpo"}, None),
        ({"trainer": "tried"}, "tried"),
        ({"other": "grpo"}, None),
        ({"other": "tried"}, "tried"),
        ({"other": "grpo", "third": "tried"}, None),
        ({"other": "grpo", "trainer": "tried"}, "tried"),
    ],
)
async def test_only_the_set_that_trainers_read_closes_a_batch(
    store_url: str, readers: dict[str, str], who: str | None
) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await run_strategy(experiment, "grpo")
        await run_strategy(experiment, "grpo", name="tried", group_timeout_s=1e-6)
        for consumer, reads in readers.items():
            async with experiment.train_stream(strategy=reads, consumer=consumer):
                pass
        await experiment.writer("e0").plan("b", [0], 4)
        await run_strategy(experiment, "grpo", name="tried", group_timeout_s=1e-6)
        assert await sealed(experiment) == ({} if who is None else {"b": (who, 0)})


@pytest.mark.parametrize("bound", BOUNDS)
async def test_a_bound_counts_no_groups_that_nobody_completes(
    store_url: str, bound: dict[str, int]
) -> None:
    async with abandoned(store_url, **bound) as experiment:
        assert await experiment.database.read(abandoned_groups, experiment.key) == 1
        async with living(experiment, "gone"):  # it is back
            with anyio.move_on_after(0.5):
                await experiment.writer("e0").plan("c", [0], 4, policy_version=0)
                pytest.fail("it may be completed")
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            await stream.commit(await anext(stream))  # the whole group
        with anyio.fail_after(30):
            assert await experiment.writer("e0").plan("c", [0], 4, policy_version=0)


@pytest.mark.parametrize("rule", ["idle_s", "group_timeout_s"])
async def test_a_strategy_that_comes_late_closes_no_group_of_which_more_is_recorded(
    store_url: str, resize: Resize, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    resize(events_per_page=2)
    async with opened(store_url, **{rule: 60.0}) as experiment:
        writer = experiment.writer("recorder")
        for run in range(3):
            for task in range(2):
                await writer.write([rollout(task=task, run=run, reward=float(run))])
        later = now_us() + 3600_000_000
        monkeypatch.setattr(grouping, "now_us", lambda: later)
        report = await run_strategy(experiment, "grpo")
        assert (report.annotated, report.rejected, report.waiting) == (6, 0, 0)
