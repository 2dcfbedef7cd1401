"""Experiments with a little of everything: many lengths, masks with holes, pairs, an expert."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch

from tests.handles import Experiment, Store
from trinity_buffer import open_store, run_strategy
from trinity_buffer.algorithm import Algorithm
from trinity_buffer.demo.policy import PolicyConfig, TransformerPolicy
from trinity_buffer.experience import EID, Experience
from trinity_buffer.trainer.requirements import strategies_of

VOCABULARY = 11
CONFIG = PolicyConfig(VOCABULARY, width=16, layers=1, heads=2, max_length=24)
TASKS, RUNS = 6, 3


def policy(seed: int = 0, dtype: torch.dtype = torch.float32) -> TransformerPolicy:
    """Return a small policy."""
    return TransformerPolicy(CONFIG, seed=seed).to(dtype)


def rollouts(batch: str = "b0", *, version: int | None = 0, tasks: int = TASKS) -> list[Experience]:
    """Return runs of some tasks: log-probs of a policy, one failure each, masks with holes."""
    return [
        Experience(
            eid=EID(batch, number // RUNS, number % RUNS, 0),
            tokens=tokens,
            prompt_length=prompt,
            logprobs=logprobs.clone(),
            reward=reward,
            action_mask=mask,
            info={} if version is None else {"model_version": version},
        )
        for number, (tokens, prompt, logprobs, reward, mask) in enumerate(_drawn(batch, tasks))
    ]


@cache
def _drawn(batch: str, tasks: int) -> list[tuple[list[int], int, torch.Tensor, float, list[bool]]]:
    """Return what the runs of a batch hold: its scores take longer than writing it."""
    draw, sampler = random.Random(batch), policy(7)
    made = []
    for number in range(tasks * RUNS):
        prompt, size = draw.randrange(2, 7), draw.randrange(2, 9)
        tokens = [draw.randrange(VOCABULARY) for _ in range(prompt + size)]
        scores = sampler.scores({"input_ids": torch.tensor([tokens])}).logprob[0, prompt:]
        reward = draw.random() if number % RUNS else 0.0
        mask = [True, *(draw.random() < 0.8 for _ in range(size - 1))]
        made.append((tokens, prompt, scores.detach(), reward, mask))
    return made


def solutions(number: int = 8) -> list[Experience]:
    """Return prompts with answers."""
    draw = random.Random(1)
    sizes = [(draw.randrange(2, 5), draw.randrange(2, 6)) for _ in range(number)]
    return [
        Experience(
            eid=EID("s", index, 0, 0),
            tokens=[draw.randrange(VOCABULARY) for _ in range(prompt + size)],
            prompt_length=prompt,
        )
        for index, (prompt, size) in enumerate(sizes)
    ]


def pairs(number: int = 8) -> list[Experience]:
    """Return prompts with a chosen and a rejected answer, of different lengths."""
    draw = random.Random(2)

    def words(least: int, most: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(draw.randrange(least, most))]

    return [
        Experience(
            eid=EID("p", index, 0, 0), tokens=words(2, 5), chosen=words(1, 6), rejected=words(1, 9)
        )
        for index in range(number)
    ]


async def recorded(store: Store, name: str, schema: str, made: list[Experience]) -> Experiment:
    """Return a new experiment that holds ``made``."""
    config: dict[str, Any] = {"schema": schema}
    if schema == "experience":
        config["rollouts_per_group"] = RUNS
    experiment = await store.experiment(name, config=config)
    await experiment.writer("test").write(made)
    return experiment


async def prepared(url: str, algorithm: Algorithm) -> None:
    """Make the experiment ``run`` (and ``expert``) with data for ``algorithm``, annotated."""
    schema = algorithm.type.schema
    data = {"dpo": pairs, "sft": solutions, "cpt": solutions}.get(schema, rollouts)
    async with open_store(url) as store:
        experiment = await recorded(store, "run", schema, data())
        await recorded(store, "expert", "sft", solutions())
        names, args = strategies_of(algorithm)
        if names:
            await run_strategy(experiment, names if len(names) > 1 else names[0], args)
