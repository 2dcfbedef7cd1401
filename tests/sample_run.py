"""A run in miniature, in which everything happens once: for tests of what looks at whole stores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.handles import Experiment
from tests.raw_store import append
from trinity_buffer import assign_rewards, open_store, run_strategy
from trinity_buffer.events import SegmentsArchived
from trinity_buffer.experience import EID, Experience

TASKS = 4
RUNS = 4


@dataclass(slots=True)
class SampleRun:
    """Where everything is.

    Attributes:
        acknowledged: folder with the uids that the explorer was told are durable.
        checkpoint: folder of the last checkpoint, whose weights went through ``manifests``.
    """

    url: str
    name: str
    acknowledged: Path
    checkpoint: Path
    manifests: list[bytes] = field(default_factory=list)

    def say_chain(self, manifests: Sequence[bytes], log_head: str = "") -> None:
        """Write what the weights of the checkpoint went through."""
        chain = {"manifests": [digest.hex() for digest in manifests], "log_head": log_head}
        (self.checkpoint / "manifests.json").write_text(json.dumps(chain))


def rollout(batch: str, task: int, run: int, reward: float, suffix: str = "") -> Experience:
    """Return an experience of 4 prompt and 3 or more response tokens, one content per address."""
    generator = torch.Generator().manual_seed(1000 * task + run)
    length = 3 + run
    return Experience(
        eid=EID(batch, task, run, 0, suffix),
        tokens=torch.randint(0, 99, (4 + length,), generator=generator, dtype=torch.int32),
        prompt_length=4,
        logprobs=-torch.rand(length, generator=generator),
        reward=reward,
        info={"model_version": 0},
        response_text=f"{task} and {run}",
    )


async def record_sample_run(url: str, folder: Path, name: str = "sort") -> SampleRun:
    """Record the sample run in the store at ``url``.

    Batch ``b0`` is whole and sealed; task 3 of it has equal rewards, which one set rejects. ``b1``
    lacks a run, which leaves a group waiting. One experience came after the seal. The trainer has
    committed steps 1 and 2, and holds step 3.
    """
    sample = SampleRun(url, name, folder / "acknowledged", folder / "checkpoint")
    sample.acknowledged.mkdir(parents=True)
    sample.checkpoint.mkdir()
    async with open_store(url) as store:
        experiment = await store.experiment(
            name, config={"groups_per_step": 1, "rollouts_per_group": RUNS, "model": {}}
        )
        await _explore(experiment, sample)
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        await run_strategy(experiment, ["reward_variance", "grpo"], name="varied")
        await assign_rewards(experiment, "length", lambda e: float(len(e.tokens)))
        await _train(experiment, sample)
        # Of a segment that was never there: the table of archived ones has a row by that.
        archived = SegmentsArchived(segments=[bytes(16)], uri=None)
        await append(experiment, archived, actor="compact")
    return sample


async def _explore(experiment: Experiment, sample: SampleRun) -> None:
    writer = experiment.writer("e0")
    tasks = list(range(TASKS))
    lines: list[str] = []
    await writer.plan("b0", tasks, RUNS)
    for task in tasks:
        rewards = [1.0] * RUNS if task == 3 else [float(run % 2) for run in range(RUNS)]
        some = [rollout("b0", task, run, rewards[run]) for run in range(RUNS)]
        lines += (await writer.write(some)).lines
    await writer.seal("b0", TASKS * RUNS)
    lines += (await writer.write([rollout("b0", 0, 0, 0.5, "a1")])).lines
    await writer.plan("b1", [0], RUNS)
    lines += (await writer.write([rollout("b1", 0, 1, 0.5)])).lines
    (sample.acknowledged / "e0.ack").write_text("".join(f"{line}\n" for line in lines))


async def _train(experiment: Experiment, sample: SampleRun) -> None:
    async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
        async for step in stream:
            sample.manifests.append(step.manifest.digest)
            sample.say_chain(sample.manifests, step.log_head)
            await stream.commit(step, checkpoint=sample.checkpoint)
            weights = sample.checkpoint.parent / f"policy-{step.step}"
            weights.write_text("weights")
            await experiment.publish_policy(step.step, str(weights))
            if step.step == 2:
                break
        # Step 3 is made ahead. To ask for it would have step 4 made too, on a slow machine.
        async for event in experiment.events(follow=True, kinds=["BatchLeased"]):
            if event.body["step"] == 3:
                break
