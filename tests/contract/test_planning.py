"""Plans, what is missing of them, seals, and when the next plan has to wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from typing_extensions import override

from tests.contract.making import group, kinds, opened, rollout
from tests.handles import Experiment
from tests.raw_store import contents, rows
from trinity_buffer import run_strategy
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.errors import (
    ConflictingPlanError,
    ConflictingSealError,
    InvalidArgumentError,
    TrinityBufferError,
)
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.write.planning import Admission
from trinity_buffer.store.trainer_queries import Backlog


async def test_the_same_plan_again_is_a_no_op(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        assert await writer.plan(batch="b", tasks=[7, "x", 2], rollouts_per_group=2)
        before = await contents(store_url)
        assert await writer.plan(batch="b", tasks=["7", "x", "2"], rollouts_per_group=2)
        assert await contents(store_url) == before


@pytest.mark.parametrize(
    ("actor", "tasks", "rollouts"),
    [("e1", [0, 1], 2), ("e0", [1, 0], 2), ("e0", [0], 2), ("e0", [0, 1], 3), ("e0", [0, 1, 2], 2)],
)
async def test_another_plan_for_a_batch_is_a_conflict(
    store_url: str, actor: str, tasks: list[int], rollouts: int
) -> None:
    async with opened(store_url) as experiment:
        await experiment.writer("e0").plan("b", [0, 1], 2)
        before = await contents(store_url)
        with pytest.raises(ConflictingPlanError, match="'b'"):
            await experiment.writer(actor).plan("b", tasks, rollouts)
        assert await contents(store_url) == before


async def test_a_batch_that_was_written_or_sealed_cannot_be_planned(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write([rollout("written")])
        await writer.seal("sealed", 0)
        for batch in ("written", "sealed"):
            with pytest.raises(ConflictingPlanError, match=batch):
                await writer.plan(batch, [0], 1)


async def test_what_is_missing_of_a_plan_shrinks_as_runs_are_stored(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan(3, ["b", 10, "9"], 2)
        everything = [("b", 0), ("b", 1), (10, 0), (10, 1), ("9", 0), ("9", 1)]
        assert await writer.missing(3) == everything
        await writer.write([rollout("3", "10", 1, step) for step in range(3)])
        await writer.write([rollout(3, "b", 0, suffix="a1"), rollout(3, "other", 0)])
        assert await writer.missing("3") == [("b", 1), (10, 0), ("9", 0), ("9", 1)]
        for task, run in await writer.missing(3):
            await writer.write([rollout(3, task, run)])
        assert await writer.missing(3) == []


async def test_nobody_can_say_what_is_missing_without_a_plan(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.seal("sealed", 0)
        for batch in ("never", "sealed"):
            with pytest.raises(InvalidArgumentError, match=batch):
                await writer.missing(batch)


async def test_a_seal_counts_and_the_same_again_is_a_no_op(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0], 2)
        await writer.write(group(runs=2))
        before = await contents(store_url)
        with pytest.raises(ConflictingSealError, match=r"holds 2 .* says 3"):
            await writer.seal("b", 3)
        assert await contents(store_url) == before
        await writer.seal(batch="b", expected=2)
        sealed = await contents(store_url)
        await writer.seal("b", 2)
        with pytest.raises(ConflictingSealError, match=r"with 2 .* says 1"):
            await writer.seal("b", 1)
        assert await contents(store_url) == sealed


@pytest.mark.parametrize(
    ("batch", "tasks", "rollouts"),
    [
        ("", [0], 1),
        ("a/b", [0], 1),
        (1.5, [0], 1),
        (None, [0], 1),
        (True, [0], 1),
        ("a\x00b", [0], 1),
        (1 << 80, [0], 1),
        ("x" * 300, [0], 1),
        ("b", [], 1),
        ("b", [0, "0"], 1),
        ("b", [0, None], 1),
        ("b", [0.5], 1),
        ("b", ["\x00"], 1),
        ("b", [0], 0),
        ("b", [0], 1.5),
        ("b", [0], 1 << 40),
    ],
)
async def test_an_impossible_plan_is_refused(
    store_url: str, batch: Any, tasks: list[Any], rollouts: Any
) -> None:
    async with opened(store_url) as experiment:
        before = await contents(store_url)
        with pytest.raises(InvalidArgumentError, match="batch"):
            await experiment.writer("e0").plan(batch, tasks, rollouts)
        assert await contents(store_url) == before


async def test_a_batch_without_a_name_is_sealed(store_url: str) -> None:
    """An EID that names none is of it."""
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group("", runs=2))
        await writer.seal("", 2)
        assert (await run_strategy(experiment, "grpo")).annotated == 2


@pytest.mark.parametrize(("batch", "expected"), [("b", -1), ("b", 1.5), ("a/b", 0), (None, 0)])
async def test_an_impossible_seal_is_refused(store_url: str, batch: Any, expected: Any) -> None:
    async with opened(store_url) as experiment:
        before = await contents(store_url)
        with pytest.raises(TrinityBufferError, match="batch"):
            await experiment.writer("e0").seal(batch, expected)
        assert await contents(store_url) == before


# What DESIGN says: wait while undelivered >= max(max_queued_groups, groups_per_step), or while
# floor(uncommitted / groups_per_step) + (published - own version) > max_staleness.
@pytest.mark.parametrize(
    ("rules", "undelivered", "uncommitted", "published", "own", "admitted"),
    [
        ({}, 10**6, 10**6, 99, 0, True),
        ({"max_queued_groups": 4}, 3, 99, 0, None, True),
        ({"max_queued_groups": 4}, 4, 99, 0, None, False),
        ({"max_queued_groups": 1, "groups_per_step": 8}, 7, 7, 0, None, True),
        ({"max_queued_groups": 1, "groups_per_step": 8}, 8, 8, 0, None, False),
        ({"max_staleness": 0, "groups_per_step": 4}, 99, 3, 0, 0, True),
        ({"max_staleness": 0, "groups_per_step": 4}, 99, 4, 0, 0, False),
        ({"max_staleness": 1, "groups_per_step": 4}, 0, 7, 3, 3, True),
        ({"max_staleness": 1, "groups_per_step": 4}, 0, 8, 3, 3, False),
        ({"max_staleness": 1, "groups_per_step": 4}, 0, 3, 4, 3, True),
        ({"max_staleness": 1, "groups_per_step": 4}, 0, 4, 4, 3, False),
        ({"max_staleness": 1, "groups_per_step": 4}, 0, 0, 5, 3, False),
        ({"max_staleness": 1, "groups_per_step": 4}, 0, 7, 9, None, True),
        # A trainer went back and published 3; the explorer still has 9 of the line before.
        ({"max_staleness": 1, "groups_per_step": 4}, 0, 7, 3, 9, True),
        ({"max_staleness": 1, "groups_per_step": 4}, 0, 8, 3, 9, False),
    ],
)
def test_admission_is_what_the_formula_says(
    rules: dict[str, Any],
    undelivered: int,
    uncommitted: int,
    published: int,
    own: int | None,
    admitted: bool,
) -> None:
    backlog = Backlog(undelivered, uncommitted, published)
    assert Admission.of(rules).admits(backlog, own) is admitted


class Waiter:
    """A plan that was asked for, and whether it was answered yet."""

    def __init__(self) -> None:
        self.answer: bool | None = None
        self.done = anyio.Event()

    async def plan(self, experiment: Experiment, batch: str, **more: Any) -> None:
        """Plan one task with one run."""
        writer = experiment.writer(more.pop("actor", "waiter"))
        self.answer = await writer.plan(batch, [0], 1, **more)
        self.done.set()


@asynccontextmanager
async def waiting_plan(experiment: Experiment, batch: str, **more: Any) -> AsyncIterator[Waiter]:
    """Start a plan that has to wait; the body must let it through."""
    waiter = Waiter()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: waiter.plan(experiment, batch, **more))
            with anyio.move_on_after(0.15):
                await waiter.done.wait()
            assert waiter.answer is None, "it should have waited"
            yield waiter


async def step_of(experiment: Experiment, groups: int) -> None:
    """Deliver one step of the default trainer."""
    async with experiment.train_stream(strategy="grpo", groups_per_step=groups) as stream:
        await anext(stream)


@pytest.mark.long
async def test_a_plan_waits_for_delivery_and_hears_of_it_from_another_store(store_url: str) -> None:
    async with opened(store_url, max_queued_groups=2) as experiment, opened(store_url) as other:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1], 2)
        async with waiting_plan(experiment, "c"):
            await other.writer("e1").write(group(task=0, runs=2))
            await run_strategy(other, "grpo")
            await step_of(other, 1)
        assert (await kinds(experiment)).count("BatchPlanned") == 2


async def test_rejected_groups_do_not_count(store_url: str) -> None:
    async with opened(store_url, max_queued_groups=2) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1], 2)
        await run_strategy(experiment, ["reward_variance", "grpo"], name="grpo")
        async with experiment.train_stream(strategy="grpo"):
            pass  # the trainer says which set it reads
        async with waiting_plan(experiment, "c"):
            await writer.write(group(task=0, rewards=[1.0, 1.0]))
            await run_strategy(experiment, ["reward_variance", "grpo"], name="grpo")


async def test_an_oversize_group_does_not_count(store_url: str) -> None:
    async with opened(store_url, max_queued_groups=1) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0], 2)
        await writer.write([rollout(run=run, length=50, reward=run) for run in range(2)])
        await run_strategy(experiment, "grpo")
        async with (
            waiting_plan(experiment, "c"),
            experiment.train_stream(strategy="grpo", max_tokens=49) as stream,
        ):
            assert [step async for step in stream] == []


async def test_a_sealed_batch_without_runs_does_not_count(store_url: str) -> None:
    async with opened(store_url, max_queued_groups=1) as experiment:
        writer = experiment.writer("e0")
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo"):
            pass  # the trainer says which set it reads
        await writer.plan("b", [0], 2)
        async with waiting_plan(experiment, "c"):
            await writer.seal("b", 0)
            await run_strategy(experiment, "grpo")


@pytest.mark.long
async def test_staleness_waits_for_commits_and_for_newer_weights(store_url: str) -> None:
    async with opened(store_url, max_staleness=0) as experiment:
        writer = experiment.writer("e0")
        assert await writer.plan("b", [0], 2, policy_version=0)
        await writer.write(group(runs=2))
        await run_strategy(experiment, "grpo")
        async with (
            waiting_plan(experiment, "c", policy_version=0),
            experiment.train_stream(strategy="grpo") as stream,
        ):
            step = await anext(stream)
            await stream.commit(step)
    async with opened(store_url, max_staleness=1) as experiment:
        await experiment.publish_policy(7, "weights-7")
        version = 5

        async with waiting_plan(experiment, "d", policy_version=lambda: version):
            version = 7
            await experiment.publish_policy(7, "weights-7 again")  # what wakes it


async def test_a_finished_experiment_answers_false_and_wakes_who_waits(store_url: str) -> None:
    async with opened(store_url, max_queued_groups=1) as experiment, opened(store_url) as other:
        writer = experiment.writer("e0")
        await writer.plan("b", [0], 1)
        async with waiting_plan(experiment, "c") as waiter:
            await other.finish("enough")
        assert waiter.answer is False
        assert await writer.plan("d", [0], 1) is False
        assert await writer.plan("b", [0], 1) is True, "it is planned already"
        assert (await kinds(experiment)).count("BatchPlanned") == 1


@pytest.mark.parametrize("places", [1, 3])
async def test_explorers_that_race_for_the_last_places_get_no_more(
    store_url: str, places: int
) -> None:
    async with (
        opened(store_url, max_queued_groups=places) as experiment,
        opened(store_url) as other,
        anyio.create_task_group() as tasks,
    ):
        for number in range(8):
            of, waiter, more = (experiment, other)[number % 2], Waiter(), {"actor": f"e{number}"}
            tasks.start_soon(lambda w=waiter, o=of, n=number, m=more: w.plan(o, f"b{n}", **m))  # type: ignore[misc]
        while (await kinds(experiment)).count("BatchPlanned") < places:
            await anyio.sleep(0.001)
        with anyio.move_on_after(0.2):
            await anyio.sleep_forever()
        assert (await kinds(experiment)).count("BatchPlanned") == places
        tasks.cancel_scope.cancel()


class KeepsAll(AddStrategy):
    """A strategy that needs to see whole batches."""

    unit = "batch"
    families = ("light",)

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write everything but the groups without a right answer."""
        kept = [e for e in experiences if e.eid.task != "wrong"]
        await self.writer.write(kept)
        return len(kept), {}


@pytest.mark.parametrize("groups_per_step", [1, 3])
async def test_one_place_two_explorers_and_a_batch_strategy_come_to_an_end(
    store_url: str, groups_per_step: int
) -> None:
    trained: list[int] = []

    async def explore(actor: str) -> None:
        async with opened(store_url) as experiment:
            writer = experiment.writer(actor)
            for number in range(4):
                batch = f"{actor}-{number}"
                assert await writer.plan(batch, [0, "wrong"], 2)
                await writer.write(group(batch, 0, 2) + group(batch, "wrong", 2))
                await writer.seal(batch, 4)

    async def annotate() -> None:
        async with opened(store_url) as experiment:
            await run_strategy(experiment, KeepsAll, name="all", follow=True)

    async def train() -> None:
        async with opened(store_url) as experiment:
            options = {"groups_per_step": groups_per_step, "follow": True}
            async with experiment.train_stream(strategy="all", **options) as stream:
                async for step in stream:
                    await stream.commit(step)
                    trained.append(step.manifest.num_groups)

    async with opened(store_url, max_queued_groups=1, groups_per_step=groups_per_step) as run:
        with anyio.fail_after(40):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(annotate)
                tasks.start_soon(train)
                async with anyio.create_task_group() as explorers:
                    explorers.start_soon(explore, "e0")
                    explorers.start_soon(explore, "e1")
                annotated = 0
                async for event in run.events(follow=True, kinds=["ExperiencesAnnotated"]):
                    annotated += len(set(event.body["groups"]))
                    if annotated == 8:
                        break
                await run.finish("explored enough")
    whole, rest = divmod(8, groups_per_step)
    assert trained == [groups_per_step] * whole + [rest] * bool(rest)


async def test_planned_groups_are_counted_in_the_order_of_their_plans(store_url: str) -> None:
    async with opened(store_url) as experiment:
        for number in range(3):
            await experiment.writer("e0").plan(number, [0, 1], 1)
        planned = await rows(experiment, "plan")
        assert sorted(row["ordinal"] for row in planned) == [1, 2, 3, 4, 5, 6]
        batches = await rows(experiment, "batch")
        assert [(row["batch"], row["batch_is_int"]) for row in batches] == [
            (str(number), True) for number in range(3)
        ]


async def test_a_text_is_no_list_of_tasks(store_url: str) -> None:
    async with opened(store_url) as experiment:
        with pytest.raises(InvalidArgumentError, match=r"tasks='abc' is a text: give a list"):
            await experiment.writer("e0").plan("b", "abc", 2)


async def test_an_actor_without_a_name_is_refused_where_its_writer_is_made(store_url: str) -> None:
    nobody: Any = None
    async with opened(store_url) as experiment:
        with pytest.raises(InvalidArgumentError, match="an actor's name"):
            experiment.writer(nobody)
