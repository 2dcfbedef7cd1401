"""Trainers that commit less often than explorers can wait: refused or named, never silent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import trinity_buffer as tb
from tests.contract.making import group, opened
from tests.trainer.qwen import qwen2
from trinity_buffer import open_store, run_strategy
from trinity_buffer.algorithm import build
from trinity_buffer.errors import InvalidArgumentError, RunStalledError
from trinity_buffer.inspector.doctor import examine


async def annotated(url: str, **config: object) -> None:
    async with opened(url, rollouts_per_group=4, **config) as experiment:
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, "grpo")


@pytest.mark.parametrize(
    ("bound", "every", "fits"),
    [(2, 2, True), (2, 3, False), (0, 1, True), (0, 2, False), (None, 9, True)],
)
def test_a_trainer_that_commits_too_seldom_for_the_bound_is_refused(
    sqlite_url: str, tmp_path: Path, bound: int | None, every: int, fits: bool
) -> None:
    anyio.run(partial(annotated, sqlite_url, max_staleness=bound))
    settings = tb.TrainerSettings(checkpoints=tmp_path, commit_every_steps=every)
    options: dict[str, Any] = {"experiment": "run", "strategy": "grpo"}
    algorithm = build("grpo", kl_loss_fn="none")
    with tb.open_train_stream(sqlite_url, **options, follow=True) as stream:
        if fits:
            tb.Trainer(stream, qwen2(), algorithm, settings)
        else:
            most = "1 step" if bound == 0 else "2 steps"
            said = (
                rf"commit_every_steps={every} with max_staleness={bound}: .*at least every {most}$"
            )
            with pytest.raises(InvalidArgumentError, match=said):
                tb.Trainer(stream, qwen2(), algorithm, settings)
    with tb.open_train_stream(sqlite_url, **options) as stream:  # waits for nobody
        tb.Trainer(stream, qwen2(), algorithm, settings)


@pytest.mark.long
async def test_a_loop_that_commits_too_seldom_is_named_once_in_its_circle(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_BUFFER_WAIT_REPORT_S", "0.1")
    config = {"rollouts_per_group": 4, "max_staleness": 1, "stalled_after_s": 5.0}
    async with opened(store_url, **config):

        async def explore() -> None:
            async with opened(store_url) as own:
                for batch in range(9):
                    await own.writer("e0").plan(batch, [0], 4, policy_version=0)
                    await own.writer("e0").write(group(batch=batch))

        async def train() -> None:
            async with (
                opened(store_url) as own,
                own.train_stream(strategy="grpo", groups_per_step=1, follow=True) as stream,
            ):
                async for _ in stream:
                    pass  # and commits nothing

        async def ends() -> None:
            said = r"are handed out and not committed, .*max_staleness=1 .* once in 1 step"
            with pytest.raises(RunStalledError, match=said) as stalled:
                await train()
            assert str(stalled.value).count("which waits: ") == 1  # no quotes of quotes

        async def looked_at() -> None:
            found, remedies = list[str](), list[str]()
            async with open_store(store_url, read_only=True) as store:
                while not found:
                    await anyio.sleep(0.001)
                    stuck = (await examine(store)).stuck
                    found = [one.what for one in stuck if " waits for " in one.what]
                    remedies = [one.remedy for one in stuck]
            assert len(found) == 1
            assert found[0].startswith("explorer 'e0' waits for trainer 'trainer' waits for explo")
            assert "which waits" not in found[0]
            told = "2 steps are handed out and not committed: commit at least once in 1 step ("
            assert told in remedies[0]

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_stalled, explore)
                tasks.start_soon(_stalled, partial(_annotate, store_url))
                tasks.start_soon(looked_at)
                await ends()


async def _annotate(url: str) -> None:
    async with opened(url) as own:
        await run_strategy(own, "grpo", follow=True)


async def _stalled(role: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(RunStalledError):
        await role()
