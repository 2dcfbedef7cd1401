"""Every wait says what it waits for, and who would bring it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from typing_extensions import override

import trinity_buffer as tb
from tests.contract.making import group, opened, rollout
from tests.handles import Experiment
from tests.pipeline.watching import Watcher
from tests.raw_store import note_presence, rows, take_lease
from trinity_buffer import open_store, run_strategy
from trinity_buffer.experience import Experience
from trinity_buffer.inspector.doctor import examine

HERE = f"pid {os.getpid()} on host {socket.gethostname()}"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_BUFFER_WAIT_REPORT_S", "0.02")


@asynccontextmanager
async def spoken(
    caplog: pytest.LogCaptureFixture, wait: Callable[[], Coroutine[Any, Any, Any]], *words: str
) -> AsyncIterator[None]:
    """Run ``wait``; inside the context it has said a line with all of the ``words``."""

    def said() -> bool:
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        return any(all(word in line for word in words) for line in lines)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        with anyio.move_on_after(20):
            while not said():
                await anyio.sleep(0.001)
        assert said(), caplog.text
        yield
        tasks.cancel_scope.cancel()


async def train(experiment: Experiment, **options: Any) -> None:
    """Take every step of a stream that follows."""
    async with experiment.train_stream(**{"strategy": "grpo", "follow": True} | options) as stream:
        async for step in stream:
            await stream.commit(step)


async def test_a_trainer_without_an_annotator_says_so(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await run_strategy(experiment, "grpo")  # ends at once: nothing is there
        await experiment.writer("e0").write(group())
        words = ("trainer 'trainer' waits for 1 group of set 'grpo' (0 ready)", NOBODY)
        async with spoken(caplog, lambda: train(experiment), *words):
            pass


async def test_who_waits_for_explorers_that_are_gone_says_how_a_run_ends_and_ends_so(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())

        async def run() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(run_strategy, experiment, "grpo", follow=True))
                tasks.start_soon(train, experiment)
            ended.append("both")

        remedy = "no process explores (if none will, `await experiment.finish(reason)` ends"
        async with (
            spoken(caplog, run, "strategy 'grpo'", remedy),
            spoken(caplog, anyio.sleep_forever, "trainer 'trainer' waits", remedy),
        ):
            await experiment.finish("all tasks are through")
            with anyio.fail_after(20):
                while not ended:
                    await anyio.sleep(0.001)


async def test_a_strategy_that_decides_says_no_more_that_it_waits(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    waits = list[list[str | None]]()

    class Looking(Watcher):
        @override
        async def add(self, experiences: list[Experience], step: int) -> Any:
            there = await rows(experiment, "presence")
            waits.append([row["waiting_for"] for row in there if row["role"] == "strategy"])
            return await super().add(experiences, step)

    async with opened(store_url, rollouts_per_group=4) as experiment:
        follow = partial(run_strategy, experiment, Looking, name="looking", follow=True)
        async with spoken(caplog, follow, "strategy 'looking' waits"):
            await experiment.writer("e0").write(group())
            with anyio.fail_after(20):
                while not waits:
                    await anyio.sleep(0.001)
    assert waits == [[None]]


async def test_a_line_spells_out_what_a_terminal_would_obey(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    order = "\x1b]52;c;ZXZpbA==\x07\x9b31m\u202e\r"
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, "grpo")
        await note_presence(experiment, "explorer", "e0", 1, order)
        async with spoken(caplog, lambda: train(experiment), "waits for 1 group", r"host \x1b]52"):
            pass
        assert all(record.getMessage().isprintable() for record in caplog.records)


NOBODY = "no process annotates set 'grpo': 4 experiences unseen"


async def test_a_trainer_that_mixes_names_the_expert_who_records_nothing(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 4})
        await store.experiment("expert", config={"schema": "sft"})
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, "grpo")
        mixed = {"sample_strategy": "mix", "expert_experiment": "expert", "groups_per_step": 2}
        words = ("waits for 1 group of the expert's experiment 'expert' (0 ready)", "record more")
        async with spoken(caplog, lambda: train(experiment, **mixed), *words):
            pass


async def test_a_trainer_takes_a_smaller_step_only_when_nothing_more_can_come(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []

    async with opened(store_url, rollouts_per_group=2) as experiment:
        writer = experiment.writer("e0")

        async def read() -> None:
            options = {"strategy": "grpo", "groups_per_step": 2, "follow": True}
            async with experiment.train_stream(**options) as stream:
                async for step in stream:
                    sizes.append(len(set(step.manifest.groups)))

        await writer.write(group(task=0, runs=2))
        await run_strategy(experiment, "grpo")
        async with spoken(caplog, read, "waits for 2 groups of set 'grpo' (1 ready)"):
            for task in (1, 2):
                await writer.write(group(task=task, runs=2))
                await run_strategy(experiment, "grpo")
            await experiment.finish("done")
            with anyio.fail_after(60):
                while sum(sizes) < 3:
                    await anyio.sleep(0.001)
    assert sizes == [2, 1]


async def test_a_strategy_names_the_groups_that_lack_runs_and_their_explorer(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("e0-7", [0, 1, 2], 2)
        await writer.write([rollout("e0-7", task) for task in range(3)])
        lack = "strategy 'grpo' waits: 3 groups of batch e0-7 lack 1 run each, no seal"

        async def follow() -> None:
            await run_strategy(experiment, "grpo", follow=True)

        async with spoken(caplog, follow, lack, f"explorer 'e0' is there ({HERE}, seen "):
            told: list[str] = []
            while not told:  # written after it is said
                here = await rows(experiment, "presence")
                told = [row["waiting_for"] for row in here if row["role"] == "strategy"]
                told = [one for one in told if one]
            assert lack in told[0]
        caplog.clear()
        async with spoken(caplog, lambda: train(experiment), "3 groups of batch e0-7 lack 1 run"):
            pass


async def test_a_batch_that_nobody_planned_says_what_its_groups_need(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url) as experiment:
        await experiment.writer("e0").write(group())

        async def follow() -> None:
            await run_strategy(experiment, "grpo", follow=True)

        words = ("1 group of batch b lacks a number of runs", "rollouts_per_group=", "no process")
        async with spoken(caplog, follow, *words):
            pass


async def test_a_plan_says_whose_commit_it_waits_for(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, max_queued_groups=1) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("a", [0], 2)

        async def plan() -> None:
            await writer.plan("b", [0], 2)

        words = ("explorer 'e0' waits to plan batch 'b': 1 planned group not delivered",)
        async with spoken(caplog, plan, *words, "no process trains as 'trainer'"):
            pass
        caplog.clear()
        await run_strategy(experiment, "grpo")
        there = f"trainer 'trainer' is there ({HERE}"
        async with (
            experiment.train_stream(strategy="grpo", follow=True),
            spoken(caplog, plan, *words, there),
        ):
            pass


async def explore(experiment: Experiment, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    async def attempt(task: int, model: None) -> list[Experience]:
        await make()
        return [Experience(tokens=[1, 2], prompt_length=1, logprobs=[-0.5], reward=1.0)]

    await tb.explore(
        experiment, actor="e0", tasks=range(8), rollout=attempt, model=None, concurrency=3
    )


async def test_an_explorer_says_which_rollouts_never_end(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        words = "waits for 3 rollouts, the first of them epoch0-0/0/0 for 0 s (timeout_s would end"
        begin = lambda: explore(experiment, anyio.sleep_forever)  # noqa: E731 - as above
        async with spoken(caplog, begin, "explorer 'e0' ", words):
            told: list[str] = []
            async with open_store(store_url, read_only=True) as store:
                while not told:  # written after it is said
                    found = await examine(store)
                    told = [one.waiting_for for one in found.here if one.waiting_for]
            assert "explorer 'e0' waits for 3 rollouts" in told[0]


@pytest.mark.long
async def test_an_explorer_is_silent_while_rollouts_end(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_BUFFER_WAIT_REPORT_S", "0.5")
    async with opened(sqlite_url, rollouts_per_group=8) as experiment:
        begun = time.monotonic()
        await explore(experiment, lambda: anyio.sleep(0.05))
        assert time.monotonic() - begun > 1.0
    assert "rollout" not in caplog.text


async def test_a_plan_that_waits_for_commits_says_how_old_its_weights_are(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, max_staleness=0) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("a", [0], 2, policy_version=0)

        async def plan() -> None:
            await writer.plan("b", [0], 2, policy_version=0)

        words = ("1 planned group not committed", "own weights of version 0")
        async with spoken(caplog, plan, *words, "max_staleness=0"):
            pass


async def test_a_second_trainer_says_who_holds_the_lease(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url) as experiment, opened(store_url) as other:
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", follow=True):
            words = (f"trainer 'trainer' is held by {HERE}, renewed ", "another consumer name")
            async with spoken(caplog, lambda: train(other), *words):
                pass


async def test_a_lease_that_was_left_an_hour_ago_is_not_said_to_be_fresh(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url) as experiment, opened(store_url) as other:
        await run_strategy(experiment, "grpo")
        await take_lease(experiment, "trainer", "far#away:1:2:r", ttl_s=30, ago_s=3600)
        async with spoken(caplog, lambda: train(other), "held by pid 1 on host far, renewed 36"):
            pass


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, "rank 0 of trainer 'trainer' waits for rank 1 of 2 to open the stream: start every"),
        (1, "rank 1 of trainer 'trainer' waits for rank 0, which holds the lease"),
    ],
)
async def test_a_rank_that_is_alone_says_which_one_it_lacks(
    store_url: str, caplog: pytest.LogCaptureFixture, rank: int, words: str
) -> None:
    async with opened(store_url) as experiment:
        await run_strategy(experiment, "grpo")
        options = {"rank": rank, "world_size": 2, "groups_per_step": 2}
        async with spoken(caplog, lambda: train(experiment, **options), words):
            pass


async def test_ranks_say_whose_commit_or_step_they_wait_for(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"strategy": "grpo", "world_size": 2, "groups_per_step": 2, "follow": True}

    async def idle(experiment: Experiment) -> None:
        async with experiment.train_stream(**options, rank=1) as stream:
            await anext(stream)  # and commits nothing
            await anyio.sleep_forever()

    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write([*group(task=0, runs=2), *group(task=1, runs=2)])
        await run_strategy(experiment, "grpo")

        async def both() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(idle, experiment)
                await train(experiment, **options, rank=0)

        late = (f"rank 0 of trainer 'trainer' waits for rank 1 ({HERE}, seen ", "to commit step 1:")
        async with spoken(caplog, both, *late):
            next_step = f"rank 1 of trainer 'trainer' waits for rank 0 ({HERE}) to hand out"
            while next_step not in caplog.text:
                await anyio.sleep(0.001)


async def test_who_ends_says_what_is_left_and_takes_its_presence_back(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0], 2)
        await writer.write([rollout()])
        report = await run_strategy(experiment, "grpo")
        assert (report.waiting, report.waiting_groups) == (1, 1)
        assert "'grpo' ended and left 1 experience of 1 group waiting: 1 group" in caplog.text
        await train(experiment, follow=False)
        ended = "trainer 'trainer' ended without a step: no process annotates set 'grpo': 1 exp"
        assert ended in caplog.text
        assert "unseen; 1 group of batch b lacks 1 run, no seal; explorer 'e0'" in caplog.text
        roles = [row["role"] for row in await rows(experiment, "presence")]
    assert roles == ["explorer"]


WAITING_TRAINER = """
import asyncio, sys
import trinity_buffer as tb

async def main():
    async with tb.open_store(sys.argv[1]) as store:
        experiment = await store.experiment("run", config={})
        await tb.run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", follow=True) as stream:
            async for step in stream:
                pass

asyncio.run(main())
"""


@pytest.mark.long
def test_it_is_seen_where_nobody_has_set_up_logging(sqlite_url: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING_TRAINER, sqlite_url], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.kill()
    assert line.startswith("trainer 'trainer' waits for 1 group of set 'grpo'"), line
