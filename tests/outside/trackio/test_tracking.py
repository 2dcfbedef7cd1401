"""A run's numbers in trackio: what its own store holds is what the log says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import torch

import trinity_buffer as tb
from trinity_buffer.pipeline.annotating.strategy_consumer import run_strategy

STEPS = 4
READ = (
    "import json; from trackio.sqlite_storage import SQLiteStorage as S; "
    "(run,) = S.get_run_records('sort'); "
    "print(json.dumps(S.get_logs('sort', run['name'], run_id=run['id'])))"
)


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


def test_trackio_keeps_what_the_log_says(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    anyio.run(told, url)
    place = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}

    def said(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], env=place, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said("-m", "trinity_buffer", "track", "--store", url, "--to", "trackio:sort")
    kept = json.loads(said("-c", READ).splitlines()[-1])
    steps = [
        json.loads(line)
        for line in said("-m", "trinity_buffer", "steps", "--store", url, "--json").splitlines()
    ]
    assert len(steps) == STEPS
    assert [(row["step"], row["loss"], row["batch/reward"]) for row in kept] == [
        (step["step"], step["metrics"]["loss"], step["reward"]) for step in steps
    ]
