"""A run's numbers in TensorBoard: what its own reader finds in the files is what the log says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trinity_buffer as tb
from trinity_buffer.pipeline.annotating.strategy_consumer import run_strategy

STEPS = 4


async def told(url: str) -> None:
    """Write two runs of each task, and train a step on each group."""
    async with tb.open_store(url) as store:
        experiment = await store.experiment("sort", config={"rollouts_per_group": 2})
        writer = experiment.writer("e0")
        await writer.plan("b0", list(range(STEPS)), 2)
        rows = [
            tb.Experience(
                eid=tb.EID("b0", task, run),
                tokens=torch.arange(6, dtype=torch.int32),
                prompt_length=2,
                logprobs=torch.full((4,), -0.5),
                reward=float(run),
                info={"model_version": 0},
            )
            for task in range(STEPS)
            for run in (0, 1)
        ]
        await writer.write(rows)
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            async for step in stream:
                await stream.commit(step, metrics={"loss": 1 / step.step})
                if step.step == STEPS:
                    return


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    anyio.run(told, url)
    return url


def command(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "trinity_buffer", *words], check=True, text=True, capture_output=True
    ).stdout


def test_tensorboard_shows_what_the_log_says(store: str, tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    command("track", "--store", store, "--to", f"tensorboard:{folder}", "--after", "1")
    command("track", "--store", store, "--to", f"tensorboard:{folder}", "--after", str(STEPS))
    found = EventAccumulator(str(folder))
    found.Reload()
    lines = command("steps", "--store", store, "--json", "--after", "1").splitlines()
    steps = [json.loads(line) for line in lines]
    for name, value_of in {
        "loss": lambda line: line["metrics"]["loss"],
        "batch/reward": lambda line: line["reward"],
        "batch/rows": lambda line: line["rows"],
    }.items():
        shown = [(scalar.step, scalar.value) for scalar in found.Scalars(name)]
        assert shown == [(line["step"], pytest.approx(value_of(line))) for line in steps]
    assert [line["step"] for line in steps] == [2, 3, 4]
