"""What the real stream and the real trainer make: the gradient of a step, a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.trainer.data import CONFIG, policy
from trinity_buffer import open_train_stream
from trinity_buffer.algorithm import Algorithm
from trinity_buffer.demo.policy import TransformerCritic
from trinity_buffer.trainer.models import Models, prepare
from trinity_buffer.trainer.parallel import Processes
from trinity_buffer.trainer.requirements import strategy_of, stream_options
from trinity_buffer.trainer.trainer import StepReport, Trainer, TrainerSettings


def gradient(
    url: str,
    algorithm: Algorithm,
    consumer: str,
    *,
    dtype: torch.dtype = torch.float32,
    processes: Processes | None = None,
    groups: int = 6,
    **options: Any,
) -> torch.Tensor:
    """Return the gradient of the first step of ``algorithm`` on the experiment ``run``, flat.

    Commits, so that every rank has to say that its part is done.
    """
    ranks = processes or Processes()
    models = Models(policy(0, dtype), reference=policy(1, dtype), teacher=policy(2, dtype))
    if algorithm.type.use_critic:
        models.critic = TransformerCritic(CONFIG, seed=3).to(dtype)
        torch.nn.init.normal_(models.critic.head.weight, generator=torch.Generator().manual_seed(4))
    mixes = algorithm.sample.plan(1, groups).expert > 0
    with open_train_stream(
        url,
        experiment="run",
        strategy=strategy_of(algorithm),
        consumer=consumer,
        groups_per_step=groups,
        max_tokens=24,
        rank=ranks.rank,
        world_size=ranks.world_size,
        expert_experiment="expert" if mixes else None,
        **stream_options(algorithm, teacher=True),
        **options,
    ) as stream:
        step = next(stream)
        prepare(step, algorithm, models, reduce=ranks.sum if ranks.world_size > 1 else None)
        for microbatch in step.microbatches:
            scores = models.policy.scores(microbatch)
            loss, _ = algorithm.loss(
                scores.logprob, microbatch, entropy=scores.entropy, layout=microbatch.layout
            )
            loss.backward()
        ranks.average_gradients(models.policy, [*models.policy.parameters()])
        stream.commit(step)
    return torch.cat([p.grad.flatten() for p in models.policy.parameters() if p.grad is not None])


def train(
    url: str,
    algorithm: Algorithm,
    folder: Path,
    *,
    max_steps: int,
    consumer: str = "trainer",
    processes: Processes | None = None,
    recomputed: bool = False,
    **settings: Any,
) -> tuple[Trainer, list[StepReport]]:
    """Train up to ``max_steps`` of 2 groups each, or on from the last commit."""
    reports: list[StepReport] = []
    mixes = algorithm.sample.plan(1, 2).expert > 0
    with open_train_stream(
        url,
        experiment="run",
        strategy=strategy_of(algorithm),
        consumer=consumer,
        groups_per_step=2,
        rank=0 if processes is None else processes.rank,
        world_size=1 if processes is None else processes.world_size,
        max_tokens=24,
        expert_experiment="expert" if mixes else None,
        **stream_options(algorithm, teacher=True, recompute_old_logprob=recomputed),
    ) as stream:
        trainer = Trainer(
            stream,
            policy(),
            algorithm,
            TrainerSettings(checkpoints=folder, max_steps=max_steps, **settings),
            teacher=policy(2),
        )
        trainer.run(reports.append)
    return trainer, reports
