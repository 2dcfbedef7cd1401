"""A run of a few steps, for tests of what reads its numbers."""

from __future__ import annotations

import torch

import trinity_buffer as tb
from trinity_buffer import run_strategy

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
