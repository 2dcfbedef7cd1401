"""A set that only filters has no advantages: who reads its zeros without asking is told."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import trinity_buffer as tb
from tests.contract.making import group, opened

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
