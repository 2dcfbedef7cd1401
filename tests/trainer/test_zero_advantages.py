"""A set that only filters has no advantages: who reads its zeros without asking is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

import trinity_buffer as tb
from tests.contract.making import group, opened
from tests.trainer.data import policy, prepared
from trinity_buffer.algorithm import build
from trinity_buffer.trainer.requirements import strategy_of, stream_options

RUNS = 4


async def annotated(url: str) -> None:
    async with opened(url, rollouts_per_group=RUNS) as experiment:
        for task in range(3):
            await experiment.writer("e0").write(group(task=task, runs=RUNS))
        for strategy in ("reward_variance", "grpo"):
            await tb.run_strategy(experiment, strategy)


@pytest.mark.parametrize(
    ("strategy", "options", "told"),
    [
        ("reward_variance", {}, 1),
        ("reward_variance", {"needs": ("reward",)}, 0),  # says what it reads
        ("grpo", {}, 0),
        (None, {}, 0),  # what was recorded has none, and everybody knows
    ],
)
def test_zeros_for_advantages_are_told_of_once(
    sqlite_url: str,
    caplog: pytest.LogCaptureFixture,
    strategy: str | None,
    options: dict[str, Any],
    told: int,
) -> None:
    anyio.run(annotated, sqlite_url)
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy=strategy, groups_per_step=1, **options
    ) as stream:
        for step in stream:
            assert all(step.rows and batch["advantages"].any() for batch in step.microbatches) == (
                strategy == "grpo"
            )
            stream.commit(step)
    found = [record.message for record in caplog.records if "has no advantages" in record.message]
    assert len(found) == told
    assert all("set 'reward_variance'" in one and "needs=" in one for one in found)


def test_a_trainer_whose_loss_reads_no_advantages_is_told_nothing(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    algorithm, losses = build("raft"), list[float]()
    anyio.run(prepared, sqlite_url, algorithm)
    options = {"strategy": strategy_of(algorithm), **stream_options(algorithm)}
    with tb.open_train_stream(sqlite_url, experiment="run", **options) as stream:
        trainer = tb.Trainer(
            stream, policy(), algorithm, tb.TrainerSettings(checkpoints=tmp_path, max_steps=1)
        )
        trainer.run(lambda done: losses.append(done.loss))
    assert losses
    assert "has no advantages" not in caplog.text
