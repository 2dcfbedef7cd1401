"""A run in which nothing moves ends every role, with the reason; one that is slow goes on."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

import trinity_buffer as tb
from tests.contract.making import group, living, opened, rollout
from tests.handles import Experiment
from tests.raw_store import note_presence, rows
from trinity_buffer import run_strategy
from trinity_buffer.errors import InvalidArgumentError, RunStalledError
from trinity_buffer.pipeline.coordination.waiting import AT_WORK, ReportedWait

AT_ONCE: dict[str, Any] = {"rollouts_per_group": 4, "max_staleness": 0, "stalled_after_s": 0.2}
STALLED = r"nothing has moved for 0\.2 s \(stalled_after_s\): .*waits"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_BUFFER_WAIT_REPORT_S", "0.1")


async def answer(task: int, model: object) -> list[tb.Experience]:
    made = rollout(task=task)
    return [tb.Experience(tokens=made.tokens, prompt_length=3, logprobs=made.logprobs, reward=1.0)]


async def explores(experiment: Experiment) -> None:
    options = {"groups_per_batch": 1, "rollouts_per_group": 1}
    await tb.explore(experiment, actor="e0", tasks=range(9), rollout=answer, model=None, **options)


async def plans(experiment: Experiment) -> None:
    writer = experiment.writer("e1")
    await writer.plan("full", [0], 4, policy_version=0)
    await writer.plan("too much", [0], 4, policy_version=0)


async def annotates(experiment: Experiment) -> None:
    await run_strategy(experiment, "grpo", follow=True)


async def trains(experiment: Experiment, *, strategy: str = "grpo") -> None:
    async with experiment.train_stream(strategy=strategy, follow=True) as stream:
        await anext(stream)


async def is_there(experiment: Experiment, role: str) -> None:
    """Return once a process has said that it has this role."""
    changes, found = experiment.database.changes, False
    while not found:
        state = await changes.state()
        found = role in [row["role"] for row in await rows(experiment, "presence")]
        if not found:
            await changes.changed(state, 0.1)  # a server sends no news of who is there


ROLES = (explores, plans, annotates, trains, partial(trains, strategy="of nobody"))


@pytest.mark.parametrize("role", ROLES)
async def test_who_waits_in_a_run_in_which_nothing_moves_ends_with_the_reason(
    store_url: str, role: Callable[[Experiment], Awaitable[None]]
) -> None:
    async with opened(store_url, **AT_ONCE) as experiment:
        if role is trains:
            await run_strategy(experiment, "grpo")  # there is a set, and nothing in it
        with anyio.fail_after(60), pytest.raises(RunStalledError, match=STALLED):
            await role(experiment)


async def test_all_roles_of_a_run_whose_explorer_is_gone_end(store_url: str) -> None:
    ended = []

    async def ends(role: Callable[[Experiment], Awaitable[None]]) -> None:
        async with opened(store_url) as experiment:
            with pytest.raises(RunStalledError):
                await role(experiment)
            ended.append(role)

    async with opened(store_url, **AT_ONCE) as experiment:
        await experiment.writer("gone").plan("b", [0], 4, policy_version=0)
        await experiment.writer("gone").write(group(runs=3))
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for role in (plans, annotates, trains):
                    tasks.start_soon(ends, role)
    assert len(ended) == 3


@pytest.mark.long
async def test_rollouts_under_way_are_no_stall(store_url: str) -> None:
    async with opened(store_url, **AT_ONCE) as experiment, opened(store_url) as other:
        may_end = anyio.Event()

        async def slow(task: int, model: object) -> list[tb.Experience]:
            await may_end.wait()
            return await answer(task, model)

        async def explore() -> None:
            size = {"groups_per_batch": 1, "rollouts_per_group": 1}
            await tb.explore(other, actor="e0", tasks=[0], rollout=slow, model=None, **size)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(explore)
                await is_there(experiment, AT_WORK)
                with anyio.move_on_after(2) as waited:
                    await run_strategy(experiment, "grpo", follow=True)
                assert waited.cancelled_caught
                may_end.set()
        with pytest.raises(RunStalledError):
            await run_strategy(experiment, "grpo", follow=True)


@pytest.mark.long
async def test_a_trainer_at_work_is_no_stall(store_url: str) -> None:
    config = AT_ONCE | {"stalled_after_s": 1.0}
    async with opened(store_url, **config) as experiment, opened(store_url) as other:
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, "grpo")
        async with other.train_stream(strategy="grpo", follow=True) as stream:
            step = await anext(stream)
            await is_there(experiment, AT_WORK)
            with anyio.move_on_after(2) as waited:  # it computes meanwhile
                await run_strategy(experiment, "grpo", follow=True)
            assert waited.cancelled_caught
            await stream.commit(step)
            with anyio.fail_after(60), pytest.raises(RunStalledError, match="'trainer' waits"):
                await anext(stream)


@pytest.mark.long
async def test_without_a_limit_nobody_ends(store_url: str) -> None:
    async with opened(store_url, **AT_ONCE | {"stalled_after_s": None}) as experiment:
        with anyio.move_on_after(1.5) as waited:
            await run_strategy(experiment, "grpo", follow=True)
        assert waited.cancelled_caught
    with pytest.raises(InvalidArgumentError, match="stalled_after_s=0: it must be a number"):
        async with opened(store_url, stalled_after_s=0):
            pass


async def test_time_in_which_all_of_a_run_was_paused_is_no_stall(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AT_ONCE | {"stalled_after_s": 60}
    async with opened(store_url, **config) as experiment, living(experiment, "e0") as pid:

        async def says(seconds_ago: float) -> None:
            await note_presence(experiment, AT_WORK, "explorer e0", pid, silent_s=seconds_ago)

        async def look() -> float:
            return await wait.require_moving(experiment.key, 0)

        async def told() -> str:
            return "strategy 'grpo' waits"

        paused_s = 0.0
        clock = time.monotonic
        wait = ReportedWait(experiment.database, experiment.key, told)
        monkeypatch.setattr(time, "monotonic", lambda: clock() + paused_s)
        await says(0)
        pause_s = await look()
        await says(3600)  # as it was said before the pause
        paused_s = 3600
        await look()
        for _ in range(3):  # nobody says anything any more: now it counts
            paused_s += pause_s
            await look()
        with pytest.raises(RunStalledError):  # noqa: PT012 - the last looks
            for _ in range(3):
                paused_s += pause_s
                await look()


async def test_who_says_that_it_works_is_heard_however_wrong_its_clock_is(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AT_ONCE | {"stalled_after_s": 60}
    async with opened(store_url, **config) as experiment:

        async def told() -> str:
            return "strategy 'grpo' waits"

        past_s = 0.0
        clock = time.monotonic
        wait = ReportedWait(experiment.database, experiment.key, told)
        monkeypatch.setattr(time, "monotonic", lambda: clock() + past_s)
        for number in range(8):
            ago_s = 600 - number / 1e6
            await note_presence(experiment, AT_WORK, "explorer e0", 1, "another", silent_s=ago_s)
            past_s += await wait.require_moving(experiment.key, 0)
        with pytest.raises(RunStalledError):  # noqa: PT012 - it has ended
            for _ in range(8):
                past_s += await wait.require_moving(experiment.key, 0)
