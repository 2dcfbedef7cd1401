"""A run in which all happens that numbers have to take into account, and its ranks."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import torch
import torch.distributed

from tests.crash.forking import said_by
from tests.handles import Experiment
from tests.trainer.data import VOCABULARY, policy
from trinity_buffer import open_store, open_train_stream, run_strategy
from trinity_buffer.algorithm import Algorithm, build
from trinity_buffer.experience import EID, Experience
from trinity_buffer.trainer.requirements import strategy_of, stream_options
from trinity_buffer.trainer.trainer import StepReport, Trainer, TrainerSettings

Reports: TypeAlias = list[dict[str, Any]]

RUNS = 3
REWARDS: list[list[list[float | None]]] = [
    [[None, None, None, 1.0], [0.0], [0.25]],
    [[0.25, 0.75], [0.0], [None, 0.5]],
    [[1.0], [0.125], [0.5]],
    [[0.5], [0.5], [0.5]],
    [[0.0, 1.0, 0.5], [0.875], [0.25]],
    [[1.0], [0.0, 0.0], [0.5]],
]
"""Of each task, of each run, of each row. Those of one task are equal."""
LONG = (EID("b0", 2, 1, 0), EID("x", 1, 0, 0))
"""Longer than the mixed trainer takes."""
DROPPED = "b1/1/2/0/"
"""Never handed out."""
DEALT_WITHOUT = "b0/1/0/0/"
"""Dropped out of a step that is served again."""
MIXED, PENALIZED = "mixed", "penalized"
RANKS = 2


def _row(eid: EID, reward: float | None, version: int | None) -> Experience:
    draw, size = random.Random(eid.uid), 16 if eid in LONG else 3
    size += len(eid.uid) % 3 + eid.run
    tokens = [draw.randrange(VOCABULARY) for _ in range(3 + size)]
    scored = policy(7).scores({"input_ids": torch.tensor([tokens])}).logprob[0, 3:].detach()
    return Experience(
        eid=eid,
        tokens=tokens,
        prompt_length=3,
        logprobs=scored,
        reward=reward,
        action_mask=[True, *(draw.random() < 0.7 for _ in range(size - 1))],
        info={} if version is None else {"model_version": version},
    )


def _batch(name: str, version: int) -> list[Experience]:
    return [
        _row(EID(name, task, run, step), reward, None if (task, run) == (5, 0) else version)
        for task, runs in enumerate(REWARDS)
        for run, rewards in enumerate(runs)
        for step, reward in enumerate(rewards)
    ]


async def _explored(experiment: Experiment) -> None:
    """Write three batches: whole, whole by another actor, and one that lacks runs."""
    first, second = experiment.writer("e0"), experiment.writer("e1", on_invalid="quarantine")
    await first.plan("b0", list(range(len(REWARDS))), RUNS)
    await first.write(_batch("b0", 0))
    await first.seal("b0", len(_batch("b0", 0)))
    await first.write([_row(EID("b0", 0, 1, 0, "a1"), 7.0, 0)])  # late
    await second.plan("b1", list(range(len(REWARDS))), RUNS)
    for one in _batch("b1", 1):
        await second.write([one])
    unsound = _row(EID("b1", 1, 1, 1), 9.0, 1)
    assert unsound.logprobs is not None
    unsound.logprobs[0] = math.nan
    await second.write([unsound])
    await first.plan("b2", [0, 1], RUNS)
    await first.write([_row(EID("b2", 0, 0, 0), 0.5, 0)])


async def _filled(url: str) -> None:
    async with open_store(url) as store:
        expert = await store.experiment("expert", config={"rollouts_per_group": 1})
        await expert.writer("teacher").write(
            [_row(EID("x", task, 0, 0), 100.0, 0) for task in range(12)]
        )
        config = {"rollouts_per_group": RUNS, "model": {}}
        experiment = await store.experiment("run", config=config)
        await _explored(experiment)
        await run_strategy(experiment, ["reward_variance", "grpo"], name="varied")
        await run_strategy(experiment, "grpo")


def _trained(url: str, folder: Path, algorithm: Algorithm, steps: int, **options: Any) -> Reports:
    reports: Reports = []
    with open_train_stream(
        url, experiment="run", groups_per_step=2, **stream_options(algorithm), **options
    ) as stream:
        checkpoints = folder / str(options["consumer"])
        settings = TrainerSettings(
            checkpoints=checkpoints, max_steps=steps, learning_rate=0.02, keep_checkpoints=3
        )
        trainer = Trainer(stream, policy(), algorithm, settings, reference=policy(1))

        def told(report: StepReport) -> None:
            names = ("step", "reward", "staleness", "rows", "tokens")
            reports.append({name: getattr(report, name) for name in names})

        trainer.run(told)
    return reports


def rank_of_penalized(folder: str, number: str) -> None:
    """Train as one of the ranks of `PENALIZED`; write what it reports."""
    torch.set_num_threads(1)
    rank, place = int(number), Path(folder)
    meeting = f"file://{place / 'meeting'}"
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=RANKS)
    algorithm = build("rloo", kl_penalty_fn="k2", kl_penalty_fn_args={"kl_coef": 0.5})
    reports = _trained(
        (place / "url").read_text(),
        place,
        algorithm,
        4,
        consumer=PENALIZED,
        strategy=strategy_of(algorithm),
        tokens_per_microbatch=60,
        rank=rank,
        world_size=RANKS,
    )
    (place / f"{rank}.json").write_text(json.dumps(reports))
    torch.distributed.destroy_process_group()


def made(url: str, folder: Path) -> dict[str, list[Reports]]:
    """Make the run in the store at ``url``; return what each process of each trainer reported.

    `MIXED` takes rows of an expert, rejects some, goes through three steps, and again through the
    last two, and one more. `PENALIZED` takes a penalty off the rewards and has two ranks.
    """
    anyio.run(_filled, url)
    mixes: dict[str, Any] = {"expert_experiment": "expert", "consumer": MIXED, "strategy": "varied"}
    mixes |= {"max_tokens": 18}
    mixed = build("mix", kl_loss_fn_args={"kl_coef": 0.1})
    first = _trained(url, folder, mixed, 3, drop=[DROPPED], **mixes)
    dropped = [DROPPED, DEALT_WITHOUT]
    again = _trained(url, folder, mixed, 4, resume_from=1, drop=dropped, **mixes)
    (folder / "url").write_text(url)
    said = said_by(rank_of_penalized, [(str(folder), str(rank)) for rank in range(RANKS)], folder)
    assert [one[0] for one in said] == ["0"] * RANKS, said
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {MIXED: [[*first, *again]], PENALIZED: ranks}
