"""A scoring that is made while a strategy reads it, and one that ends before the log does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest

from tests.conftest import Resize
from tests.contract.making import opened, rollout
from tests.handles import Experiment
from tests.raw_store import append
from tests.whole_stores import experiences_of
from trinity_buffer import assign_rewards, run_strategy, verify
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import RewardsAssigned
from trinity_buffer.experience import Experience
from trinity_buffer.store import log

RUNS = 3


async def write(experiment: Experiment, *tasks: int) -> None:
    for task in tasks:
        some = [rollout(task=task, run=run) for run in range(RUNS)]
        await experiment.writer("e0").write(some)


async def scores(experiment: Experiment, name: str) -> dict[str, float]:
    """Return the advantage of each annotated run."""
    async with experiment.train_stream(
        strategy=name, groups_per_step=1, consumer=f"of-{name}"
    ) as stream:
        return {
            one.eid.uid: float(one.advantages.mean())
            async for step in stream
            for one in await experiences_of(experiment, step.manifest)
            if one.advantages is not None
        }


def by_run(experience: Experience) -> float:
    return float(experience.eid.run)


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
async def test_no_strategy_meets_a_group_of_which_a_part_is_scored(
    store_url: str, resize: Resize, *, again: bool
) -> None:
    resize(experiences_per_page=RUNS + 1)  # the first page ends within the second group
    page_is_over, may_go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    async with opened(store_url, rollouts_per_group=RUNS) as experiment:
        await write(experiment, 0, 1)
        if again:
            await assign_rewards(experiment, "judge", lambda _: 7.0)
        asked = []

        def judge(experience: Experience) -> float:
            asked.append(experience)
            if len(asked) == RUNS + 2:
                loop.call_soon_threadsafe(page_is_over.set)
                assert may_go_on.wait(20)
            return by_run(experience)

        def score() -> None:
            anyio.run(_score, store_url, judge)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, score)
            await page_is_over.wait()
            async with opened(store_url) as other:
                if again:
                    await run_strategy(other, "grpo", name="judged", rewards="judge")
                else:
                    assert [e async for e in other.events(kinds=("RewardsAssigned",))] == []
            may_go_on.set()
        report = await run_strategy(experiment, "grpo", name="anew", rewards="judge")
        assert (report.annotated, report.rejected) == (2 * RUNS, 0)
        found = await scores(experiment, "anew")
        assert {uid: round(value, 3) for uid, value in found.items()} == {
            f"b/{task}/{run}/0/": run - 1.0 for task in range(2) for run in range(RUNS)
        }
        if again:  # all by the function before
            assert set((await scores(experiment, "judged")).values()) == {0.0}
        assert (await verify(experiment)).ok


async def _score(url: str, judge: Callable[[Experience], float]) -> None:
    async with opened(url) as experiment:
        await assign_rewards(experiment, "judge", judge)


async def test_what_is_recorded_behind_a_scoring_waits_for_the_next_one(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, rollouts_per_group=RUNS) as experiment:
        await write(experiment, 0)
        await experiment.writer("e0").write([rollout(task=1)])
        await assign_rewards(experiment, "judge", by_run)
        await experiment.writer("e0").write([rollout(task=1, run=run) for run in (1, 2)])
        await write(experiment, 2)
        position = [e.position async for e in experiment.events(kinds=("ExperiencesRecorded",))][2]
        report = await run_strategy(experiment, "grpo", name="judged", rewards="judge")
        assert (report.annotated, report.rejected, report.waiting) == (RUNS, 0, 1)
        assert (
            f"'judge' has no rewards for what is recorded from position {position} on"
            in (caplog.messages[-1])
        )
        await assign_rewards(experiment, "judge", lambda e: by_run(e) if e.eid.task != 2 else None)
        report = await run_strategy(experiment, "grpo", name="judged", rewards="judge")
        assert (report.annotated, report.rejected, report.waiting) == (RUNS, RUNS, 0)
        assert max((await scores(experiment, "judged")).values()) == pytest.approx(1, 1e-4)
        assert (await verify(experiment)).ok


async def test_a_seal_is_read_behind_a_scoring(store_url: str) -> None:
    async with opened(store_url) as experiment:
        await write(experiment, 0)
        await assign_rewards(experiment, "judge", by_run)
        await experiment.writer("e0").seal("b", RUNS)
        report = await run_strategy(experiment, "grpo", name="judged", rewards="judge")
        assert (report.annotated, report.waiting) == (RUNS, 0)


async def test_a_scoring_again_takes_no_reward_away(store_url: str) -> None:
    """The earlier one would stay, and a group be scored by two functions."""
    async with opened(store_url, rollouts_per_group=RUNS) as experiment:
        await write(experiment, 0)
        await assign_rewards(experiment, "judge", by_run)
        with pytest.raises(InvalidArgumentError, match="'judge' has a reward of b/0/1/0/ by an"):
            await assign_rewards(experiment, "judge", lambda e: None if e.eid.run == 1 else 9.0)
        await run_strategy(experiment, "grpo", name="judged", rewards="judge")
        found = await scores(experiment, "judged")
        assert [round(found[f"b/0/{run}/0/"], 3) for run in range(RUNS)] == [-1.0, 0.0, 1.0]
        assert (await verify(experiment)).ok


async def test_of_two_scorings_at_once_the_one_that_read_more_counts(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=RUNS) as experiment:
        await write(experiment, 0)
        seen = await experiment.database.read(log.head, experiment.key)
        await write(experiment, 1)
        await assign_rewards(experiment, "judge", by_run)
        # Of a call that read before the last rows came, and recorded after this one.
        await append(
            experiment, RewardsAssigned(scoring="judge", experiences=[], rewards=[], seen=seen)
        )
        report = await run_strategy(experiment, "grpo", name="judged", rewards="judge")
        assert (report.annotated, report.waiting) == (2 * RUNS, 0)


@pytest.mark.parametrize("other", [0.0, 1.0])
async def test_other_rewards_than_a_set_was_computed_from_are_warned_of(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, other: float
) -> None:
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await write(experiment, 0)
        await assign_rewards(experiment, "judge", by_run)
        await assign_rewards(experiment, "judge", lambda e: 1.0 + by_run(e))  # no set has them
        assert "gets other rewards" not in caplog.text
        await run_strategy(experiment, "grpo", name="judged", rewards="judge")
        await assign_rewards(experiment, "judge", lambda e: 1.0 + (1.0 + other) * by_run(e))
    said = [line for line in caplog.messages if "'judge' gets other rewards for 2 exp" in line]
    assert len(said) == bool(other)
