"""Whoever is cancelled, and whenever: nothing stays locked, nothing is half there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import anyio
import pytest

from tests.contract.making import group, opened
from tests.handles import Experiment
from tests.raw_store import rows
from trinity_buffer import run_strategy
from trinity_buffer.errors import ConflictingExperienceError

Call = Callable[[], Awaitable[Any]]
MOMENTS = 8


async def by_scope(call: Call, delay_s: float) -> None:
    """Cancel as anyio does: what is shielded goes on."""
    with anyio.move_on_after(delay_s):
        await call()


async def by_task(call: Call, delay_s: float) -> None:
    """Cancel as asyncio does (``wait_for``, Ctrl-C): no shield helps."""
    task = asyncio.ensure_future(call())
    await asyncio.wait([task], timeout=delay_s)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def moments(call: Call) -> list[float]:
    """Return delays all over the time that ``call`` takes."""
    start = time.perf_counter()
    await call()
    whole = time.perf_counter() - start
    return [whole * moment / MOMENTS for moment in range(MOMENTS + 1)]


@asynccontextmanager
async def nobody_waits_for_ever() -> AsyncIterator[None]:
    """Fail long before the busy timeout would say that the database is locked."""
    with anyio.fail_after(28):
        yield


@pytest.fixture(params=[by_scope, by_task], ids=["scope", "task"])
def cancelled_after(request: pytest.FixtureRequest) -> Callable[[Call, float], Awaitable[None]]:
    """Call something and cancel it, in each of the two ways there are."""
    found: Callable[[Call, float], Awaitable[None]] = request.param
    return found


async def whole_calls(experiment: Experiment) -> dict[str, int]:
    """Return batch -> experiences, having checked that segments and rows belong together.

    In a store that was closed since: closing waits for the writes of cancelled callers, one of
    which might otherwise commit between the two reads.
    """
    stored = await rows(experiment, "experience")
    segments = await rows(experiment, "segment")
    assert {row["key"] for row in segments} == {row["segment"] for row in stored}
    sizes: dict[str, int] = {}
    for row in stored:
        sizes[row["batch"]] = sizes.get(row["batch"], 0) + 1
    return sizes


async def test_a_cancelled_write_is_there_or_not(store_url: str, cancelled_after: Any) -> None:
    async with opened(store_url) as experiment, nobody_waits_for_ever():
        writer, batches = experiment.writer("e0"), count()

        async def call() -> None:
            await writer.write(group(next(batches)))

        for delay_s in await moments(call):
            await cancelled_after(call, delay_s)
            assert (await writer.write(group(next(batches)))).written == 4
    async with opened(store_url) as experiment:
        sizes = await whole_calls(experiment)
        assert set(sizes.values()) == {4}


async def test_a_cancelled_write_harms_none_of_its_neighbours(
    store_url: str, cancelled_after: Any
) -> None:
    written: list[int] = []
    async with opened(store_url) as experiment, nobody_waits_for_ever():
        writer, batches = experiment.writer("e0"), count()

        async def call() -> None:
            await writer.write(group(next(batches)))

        async def neighbour() -> None:
            batch = next(batches)
            assert (await writer.write(group(batch))).written == 4
            written.append(batch)

        for delay_s in await moments(call):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(neighbour)
                tasks.start_soon(cancelled_after, call, delay_s)
                tasks.start_soon(neighbour)
                tasks.start_soon(cancelled_after, call, delay_s / 2)
                tasks.start_soon(neighbour)
    async with opened(store_url) as experiment:
        sizes = await whole_calls(experiment)
        assert set(sizes.values()) == {4}
        assert set(written) <= set(map(int, sizes))


async def test_closing_waits_for_the_write_of_a_cancelled_caller(
    store_url: str, cancelled_after: Any
) -> None:
    for delay_s in (0.0, 0.001, 0.002, 0.004):
        async with opened(store_url) as experiment:
            writer = experiment.writer("e0")
            await cancelled_after(lambda: writer.write(group("b", runs=64)), delay_s)  # noqa: B023
    async with opened(store_url) as experiment, nobody_waits_for_ever():
        assert (await experiment.writer("e0").write(group("b", runs=64))).uids
        assert await whole_calls(experiment) == {"b": 64}


async def test_a_cancelled_plan_or_seal_is_there_or_not(
    store_url: str, cancelled_after: Any
) -> None:
    async with opened(store_url) as experiment, nobody_waits_for_ever():
        writer, batches = experiment.writer("e0"), count()

        async def call() -> None:
            batch = next(batches)
            await writer.plan(batch, [0, 1], 1)
            await writer.seal(batch, 0)

        for delay_s in await moments(call):
            await cancelled_after(call, delay_s)
            await call()
        events = [(e.kind, e.body["batch"]) async for e in experiment.events(after=1)]
        assert len(events) == len(set(events))
        planned = await rows(experiment, "plan")
        assert len(planned) == 2 * sum(kind == "BatchPlanned" for kind, _ in events)
        assert [row["ordinal"] for row in sorted(planned, key=lambda row: row["ordinal"])] == [
            *range(1, len(planned) + 1)
        ]


async def test_a_cancelled_reader_gives_its_connection_back(
    store_url: str, cancelled_after: Any
) -> None:
    async with opened(store_url) as experiment, nobody_waits_for_ever():
        writer = experiment.writer("e0")
        for batch in range(8):
            await writer.write(group(batch))

        async def call() -> None:
            assert len([e async for e in experiment.read()]) == 32

        for delay_s in 2 * await moments(call):
            await cancelled_after(call, delay_s)
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(call)


async def test_a_cancelled_strategy_decides_each_unit_once(
    store_url: str, cancelled_after: Any
) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment, nobody_waits_for_ever():
        writer, batches = experiment.writer("e0"), count()

        async def more() -> None:
            for _ in range(3):
                await writer.write(group(next(batches)))

        await more()
        for delay_s in await moments(lambda: run_strategy(experiment, "grpo")):
            await more()
            await cancelled_after(lambda: run_strategy(experiment, "grpo"), delay_s)
        report = await run_strategy(experiment, "grpo")
        assert report.waiting == 0
        annotated = [row["experience"] for row in await rows(experiment, "annotation")]
        stored = [row["address"] for row in await rows(experiment, "experience")]
        assert sorted(annotated) == stored
        keys = {row["key"] for row in await rows(experiment, "segment")}
        events = [e.body async for e in experiment.events()]
        assert keys == {body["segment"] for body in events if "segment" in body}


async def test_a_cancelled_trainer_leases_and_commits_each_step_once(
    store_url: str, cancelled_after: Any
) -> None:
    options = {"strategy": "grpo", "groups_per_step": 1, "lease_ttl_s": 1.0}
    trained: list[int] = []
    async with opened(store_url, rollouts_per_group=4) as experiment, nobody_waits_for_ever():
        writer, batches = experiment.writer("e0"), count()

        async def more() -> None:
            await writer.write(group(next(batches)) + group(next(batches)))
            await run_strategy(experiment, "grpo")

        async def train() -> None:
            async with experiment.train_stream(**options) as stream:
                async for step in stream:
                    await stream.commit(step)
                    trained.append(step.step)

        await more()
        for delay_s in await moments(train):
            await more()
            await cancelled_after(train, delay_s)
        await train()
        handed = [row["address"] for row in await rows(experiment, "delivery")]
        rows_of_set = await rows(experiment, "annotation")
        assert sorted(handed) == [row["address"] for row in rows_of_set]
        steps = await rows(experiment, "step")
        assert all(row["committed_at"] for row in steps)
        committed = [
            step
            async for e in experiment.events(kinds=["StepsCommitted"])
            for step in e.body["steps"]
        ]
        assert committed == list(range(1, len(steps) + 1))
        assert len(trained) == len(set(trained))


async def test_a_conflict_after_a_cancellation_is_still_found(
    store_url: str, cancelled_after: Any
) -> None:
    async with opened(store_url) as experiment, nobody_waits_for_ever():
        writer = experiment.writer("e0")
        await writer.write(group("b", rewards=[1.0, 0.0]))
        with suppress(ConflictingExperienceError):  # a fast machine has found it by then
            await cancelled_after(lambda: writer.write(group("b", rewards=[0.5, 0.5])), 0.002)
        with pytest.raises(ConflictingExperienceError):
            await writer.write(group("b", rewards=[0.5, 0.5]))
