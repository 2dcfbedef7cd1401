"""How a trainer ends whose experiment is finished before its strategy is through."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from tests.contract.making import group, opened
from tests.handles import Experiment
from tests.pipeline.test_waits import NOBODY, spoken, train
from tests.raw_store import note_presence, rows
from trinity_buffer import open_store, open_train_stream, run_strategy
from trinity_buffer.experience import EID, Experience
from trinity_buffer.pipeline.coordination.waiting import UNSEEN_S


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_BUFFER_WAIT_REPORT_S", "0.02")


@asynccontextmanager
async def at_work(experiment: Experiment, silent_s: float = 0.0) -> AsyncIterator[int]:
    """Yield the number of a process that is there as the strategy, and is killed at the end."""
    async with await anyio.open_process([sys.executable, "-c", "input()"]) as process:
        await note_presence(experiment, "strategy", "grpo", process.pid, silent_s=silent_s)
        yield process.pid
        process.kill()


async def test_a_trainer_of_a_finished_experiment_waits_for_its_strategy(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended = anyio.Event()

    async def train_all() -> None:
        await train(experiment)
        ended.set()

    async with opened(store_url, rollouts_per_group=4) as experiment:
        await run_strategy(experiment, "grpo")
        await experiment.writer("e0").write(group())
        await experiment.finish("all tasks are through")
        async with at_work(experiment) as pid:
            words = (f"strategy 'grpo' (pid {pid} on host", "has 4 experiences to decide")
            async with spoken(caplog, train_all, *words):
                assert await rows_of_steps(experiment) == []
                await run_strategy(experiment, "grpo")
                with anyio.fail_after(20):
                    await ended.wait()
        assert await rows_of_steps(experiment) == [4]
    assert "trainer 'trainer' ended" not in caplog.text


async def test_it_does_not_wait_for_a_process_whose_strategy_has_gone_silent(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await run_strategy(experiment, "grpo")
        await experiment.writer("e0").write(group())
        await experiment.finish("all tasks are through")
        with anyio.fail_after(20):
            async with at_work(experiment, silent_s=1.1 * UNSEEN_S):
                await train(experiment)
    assert "trainer 'trainer' ended without a step" in caplog.text


async def test_it_waits_too_where_the_rows_of_its_expert_are_used_up(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended = anyio.Event()
    mixed = {"sample_strategy": "mix", "expert_experiment": "expert", "groups_per_step": 2}

    async def train_all() -> None:
        await train(experiment, expert_data_ratio=0.5, **mixed)
        ended.set()

    async with open_store(store_url) as store:
        expert = await store.experiment("expert", config={"schema": "sft"})
        await expert.writer("e0").write([solution()])
        experiment = await store.experiment("run", config={"rollouts_per_group": 4})
        await experiment.writer("e0").write(group("b", 0))
        await run_strategy(experiment, "grpo")
        await experiment.writer("e0").write(group("b", 1))
        for one in (expert, experiment):
            await one.finish("all tasks are through")
        async with at_work(experiment), spoken(caplog, train_all, "has 4 experiences to decide"):
            await run_strategy(experiment, "grpo")
            with anyio.fail_after(20):
                await ended.wait()
        assert await rows_of_steps(experiment) == [5, 4]


def solution() -> Experience:
    """Return what an expert wrote."""
    return Experience(eid=EID("x", 0, 0), tokens=list(range(8)), prompt_length=3)


async def rows_of_steps(experiment: Experiment) -> list[int]:
    """Return how many rows each step had that was committed."""
    return [row["rows"] for row in await rows(experiment, "step") if row["committed_at"]]


async def test_a_trainer_of_a_finished_experiment_ends_when_its_strategy_is_killed(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await run_strategy(experiment, "grpo")
        await experiment.writer("e0").write(group())
        await experiment.finish("all tasks are through")
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks, at_work(experiment):
                tasks.start_soon(train, experiment)
                while "has 4 experiences to decide" not in caplog.text:
                    await anyio.sleep(0.001)
    assert f"trainer 'trainer' ended without a step: {NOBODY}" in caplog.text


async def test_a_trainer_without_a_step_says_what_it_rejected_beside_what_is_left(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, "grpo")
        await experiment.writer("e0").write(group("later"))
        await train(experiment, follow=False, max_tokens=1)
    (said,) = [text for text in caplog.messages if "ended without a step" in text]
    assert NOBODY in said
    assert "4 were rejected (oversize)" in said


@pytest.mark.parametrize(("every", "left"), [(3, "step 4"), (4, ""), (9, "steps 1 to 4")])
async def test_a_loop_that_never_commits_its_last_steps_is_told(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, every: int, left: str
) -> None:
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write([e for t in range(4) for e in group(task=t, runs=2)])
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo") as stream:
            async for step in stream:
                if step.step % every == 0:
                    await stream.commit(step)
    said = [line for line in caplog.messages if "without a commit" in line]
    assert len(said) == bool(left)
    assert all(f"trainer 'trainer' ended without a commit of {left}: the next" in s for s in said)


@pytest.mark.parametrize("by", ["break", "error", "commit"])
def test_a_loop_that_is_left_before_the_end_is_told_what_it_did_not_commit(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    async def written() -> None:
        async with open_store(sqlite_url) as store:
            experiment = await store.experiment("x", config={"rollouts_per_group": 2})
            rollouts = [e for t in range(4) for e in group(task=t, runs=2)]
            await experiment.writer("e0").write(rollouts)
            await run_strategy(experiment, "grpo")

    anyio.run(written)
    options: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 1}
    with (
        suppress(ZeroDivisionError),
        open_train_stream(sqlite_url, experiment="x", **options) as stream,
    ):
        for step in stream:
            if step.step == 1 or by == "commit":
                stream.commit(step)
            if step.step == 3:
                if by == "error":
                    raise ZeroDivisionError
                break
    said = [line for line in caplog.messages if "ended without a commit of steps 2 to 3" in line]
    assert len(said) == (by == "break")  # an error tells enough
