"""A strategy decides each experience once, whatever happens to the processes that run it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.conftest import Resize
from tests.contract.making import assert_conserved, group, opened, rollout
from tests.handles import ConsumerReport
from tests.pipeline.watching import (
    BatchWatcher,
    Killed,
    Watcher,
    killed_at,
    problems_of,
    reasons,
    rejected_groups,
)
from tests.raw_store import rows
from trinity_buffer import StrategyConsumer, run_strategy, verify
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.errors import StoreUnavailableError
from trinity_buffer.store import writer_queries


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    Watcher.seen.clear()
    BatchWatcher.seen.clear()


async def test_a_straggling_group_holds_back_nobody_and_survives_a_restart(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("slow", [0], 2)
        await writer.write([rollout("slow")])
        for batch in range(3):
            await writer.plan(batch, [0], 2)
            await writer.write(group(batch, runs=2))
        report = await run_strategy(experiment, Watcher)
        assert (report.annotated, report.waiting, report.waiting_groups) == (6, 1, 1)
        await assert_conserved(experiment)
    async with opened(store_url) as again:
        assert (await run_strategy(again, Watcher)).waiting == 1
        await again.writer("e0").write([rollout("slow", run=1)])
        assert (await run_strategy(again, Watcher)).annotated == 2
        await assert_conserved(again)


async def test_a_following_consumer_ends_with_the_experiment_and_leaves_nothing(
    store_url: str,
) -> None:
    async with opened(store_url) as experiment, opened(store_url) as other:
        report: list[ConsumerReport] = []

        async def follow() -> None:
            report.append(await run_strategy(experiment, Watcher, name="all", follow=True))

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow)
                writer = other.writer("e0")
                for batch in range(5):
                    await writer.plan(batch, [0], 2)
                    await writer.write(group(batch, runs=2))
                await writer.plan("open", [0], 2)
                await writer.write([rollout("open")])
                await other.finish("enough")
        assert report == [ConsumerReport(10, 0, 1, 1)]


async def test_a_deadline_closes_a_group_by_itself_and_over_restarts(store_url: str) -> None:
    async with opened(store_url, group_timeout_s=0.3) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1], 2)
        await writer.write([*group(task=0, runs=2), rollout(task=1)])
        report: list[ConsumerReport] = []

        async def follow() -> None:
            report.append(await run_strategy(experiment, Watcher, name="all", follow=True))

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow)
                decided = 0  # both groups may be decided at once, where the strategy starts late
                async for event in experiment.events(follow=True, kinds=["ExperiencesAnnotated"]):
                    decided += len(event.body["experiences"])
                    if decided == 3:
                        break
                await writer.write([rollout(task=1, run=1)])
                await experiment.finish("enough")
        assert report == [ConsumerReport(3, 0, 0, 0)]
        (grpo,) = (await verify(experiment)).strategies
        assert grpo.rejected == {"late": 1}  # its batch was sealed at the deadline
        await assert_conserved(experiment)


async def test_a_restart_does_not_put_off_a_deadline(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store_url, group_timeout_s=1000.0) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1], 2)
        await writer.write([*group(task=0, runs=2), rollout(task=1)])
        assert (await run_strategy(experiment, Watcher, name="all")).waiting == 1
        (since,) = {event.recorded_at async for event in experiment.events(kinds=["BatchPlanned"])}
        # Another process, whose clock says that the deadline was a moment ago.
        clock = "trinity_buffer.pipeline.annotate.grouping.now_us"
        monkeypatch.setattr(clock, lambda: int((since + 1000.0) * 1e6) + 1)
        assert (await run_strategy(experiment, Watcher, name="all")).annotated == 1


async def test_late_members_are_rejected_after_a_restart_too(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group(runs=2))
        await run_strategy(experiment, Watcher, name="all")
        await writer.write([rollout(run=7), rollout(task=1)])
    async with opened(store_url) as again:
        report = await run_strategy(again, Watcher, name="all")
        assert (report.rejected, report.waiting) == (1, 1)
        assert await reasons(again, "all") == {"b/0/7": "late"}
        await assert_conserved(again)


async def test_what_was_decided_is_known_where_the_server_was_away_while_it_was_read(
    postgres_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(postgres_store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1], 1)
        await writer.write([rollout(task=0)])
        await run_strategy(experiment, Watcher, name="all")
        await writer.write([rollout(task=0, run=7), rollout(task=1)])
        read, away = writer_queries.settled, [StoreUnavailableError("it is away")]

        def settled(*args: Any, **kwargs: Any) -> Any:
            if away:
                raise away.pop()
            return read(*args, **kwargs)

        monkeypatch.setattr(writer_queries, "settled", settled)
        report = await run_strategy(experiment, Watcher, name="all")
        assert (report.annotated, report.rejected, report.waiting, away) == (1, 1, 0, [])
        assert await reasons(experiment, "all") == {"b/0/7": "late"}


async def test_quarantined_runs_complete_a_group_and_are_never_seen(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0", on_invalid="quarantine")
        await writer.plan("b", [0, 1], 2)
        bad = [rollout(task=0, run=1), rollout(task=1, run=0), rollout(task=1, run=1)]
        for experience in bad:
            experience.reward = float("inf")
        await writer.write([rollout(task=0), *bad])
        for _ in range(2):  # and a restart counts nothing again
            await run_strategy(experiment, Watcher, name="all")
        assert [uids for _, uids in Watcher.seen] == [["b/0/0/0/"]]
        assert await rejected_groups(experiment, "all") == 1
        await writer.seal("b", 4)
        await run_strategy(experiment, Watcher, name="all")
        assert await rejected_groups(experiment, "all") == 1
        await assert_conserved(experiment)


async def test_empty_groups_are_counted_once_whoever_reads_the_seal(
    store_url: str, monkeypatch: pytest.MonkeyPatch, resize: Resize
) -> None:
    async with opened(store_url) as experiment, opened(store_url) as other:
        writer = experiment.writer("e0")
        consumers = [StrategyConsumer(of, Watcher, name="all") for of in (experiment, other)]
        await writer.plan("b", [0, 1, 2], 2)
        await writer.write([rollout(task=0)])
        for consumer in consumers:
            await consumer.run()
        await writer.seal("b", 1)
        resize(experiences_per_commit=1)
        with killed_at("after-annotate", 1, monkeypatch), pytest.raises(Killed):
            await consumers[0].run()
        # One commit of several is there, and the process that made it is not.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumers[1].run)
        await run_strategy(experiment, Watcher, name="all")
        assert await rejected_groups(experiment, "all") == 2
        assert [uids for _, uids in Watcher.seen].count(["b/0/0/0/"]) >= 1
        await assert_conserved(experiment)


@pytest.mark.long
@pytest.mark.parametrize("unit", [Watcher, BatchWatcher])
@pytest.mark.parametrize(
    ("point", "times"),
    [("before-annotate", [1, 2]), ("inside-annotate", [1, 2]), ("after-annotate", [1, 1])],
)
async def test_a_killed_consumer_is_followed_by_one_that_goes_on(
    store_url: str,
    unit: type[Watcher],
    point: str,
    times: list[int],
    monkeypatch: pytest.MonkeyPatch,
    resize: Resize,
) -> None:
    resize(experiences_per_commit=4)
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        for batch in range(4):
            await writer.plan(batch, [0, 1, "never"], 2)
            await writer.write(group(batch, 0, 2) + group(batch, 1, 2))
            if batch < 3:
                await writer.seal(batch, 4)
        for time in times:
            with killed_at(point, time, monkeypatch), pytest.raises(Killed):
                await run_strategy(experiment, unit, name="all")
            await assert_conserved(experiment)
        report = await run_strategy(experiment, unit, name="all")
        await assert_conserved(experiment)
        open_rows = 4 if unit is BatchWatcher else 0
        assert report.waiting == open_rows
        annotated = [row["experience"] for row in await rows(experiment, "annotation")]
        assert len(annotated) == len(set(annotated)) == 16 - open_rows
        assert await rejected_groups(experiment, "all") == 3
    assert (await problems_of(store_url)) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [2, 6])
async def test_competing_consumers_of_one_name_decide_each_unit_once(
    store_url: str, number: int
) -> None:
    report: list[ConsumerReport] = []

    async def consume(unit: type[AddStrategy]) -> None:
        async with opened(store_url) as experiment:
            report.append(await run_strategy(experiment, unit, name="all", follow=True))

    async with opened(store_url, rollouts_per_group=2) as experiment:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for _ in range(number):
                    tasks.start_soon(consume, Watcher)
                writer = experiment.writer("e0")
                for batch in range(12):
                    if batch % 2:
                        await writer.plan(batch, [0, 1, "never"], 2)
                    await writer.write([rollout(batch, 0), *group(batch, 1, 2)])
                    if batch % 3:
                        await writer.write([rollout(batch, 0, 1)])
                    if batch % 4 < 3:
                        await writer.seal(batch, 3 + bool(batch % 3))
                await experiment.finish("enough")
        await assert_conserved(experiment)
        annotated = [row["experience"] for row in await rows(experiment, "annotation")]
        assert len(annotated) == len(set(annotated))
        assert sum(one.annotated for one in report) == len(annotated)
        assert await rejected_groups(experiment, "all") == 3, "of 1, 5 and 9"
        assert {one.waiting for one in report} == {1}, "of 3"
    assert (await problems_of(store_url)) == []


@pytest.mark.long
async def test_more_waits_than_one_page_holds(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("slow", list(range(1100)), 5)
        await writer.plan("quick", [0], 2)
        await writer.write([rollout("slow", task, run) for task in range(1100) for run in range(4)])
        await writer.write(group("quick", runs=2))
        assert (await run_strategy(experiment, Watcher, name="all")).waiting == 4400
        await writer.write([rollout("slow", 7, 4), rollout("slow", 1099, 4)])
        report = await run_strategy(experiment, Watcher, name="all")
        assert (report.annotated, report.waiting) == (10, 4392)
        await assert_conserved(experiment)
