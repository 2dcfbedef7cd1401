"""One rank of a trainer of three steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from tests.trainer.data import policy
from trinity_buffer import open_train_stream
from trinity_buffer.algorithm import Algorithm, build
from trinity_buffer.trainer.requirements import strategy_of, stream_options
from trinity_buffer.trainer.trainer import StepReport, Trainer, TrainerSettings

STEPS = 3
NOT_FINITE = 2
"""In this step the gradient of the last rank is not finite."""


def told(report: StepReport) -> dict[str, Any]:
    """Return what must be the same for any number of ranks."""
    measures = report.measures
    assert measures is not None
    # Rows of a step are dealt to ranks, and then in another order.
    rows = {name: np.sort(values).tolist() for name, values in measures.rows.items()}
    return {
        "reward": report.reward,
        "loss": report.loss,
        "gradient_norm": report.gradient_norm,
        "staleness": report.staleness,
        "rows": report.rows,
        "tokens": report.tokens,
        "skipped": float(report.skipped),
        **report.metrics,
        **{f"measured/{name}": value for name, value in measures.metrics.items()},
        **{f"{name}/{at}": one for name, some in rows.items() for at, one in enumerate(some)},
    }


def trained(folder: Path, rank: int, ranks: int, algorithm: Algorithm) -> list[dict[str, Any]]:
    """Train three steps of two groups on a consumer of its own; return what is told of each."""
    reports: list[dict[str, Any]] = []
    mixes = algorithm.sample.plan(1, 2).expert > 0
    with open_train_stream(
        f"sqlite:///{folder}/run.db",
        experiment="run",
        strategy=strategy_of(algorithm),
        consumer=f"ranks-{ranks}",
        groups_per_step=2,
        max_tokens=24,
        tokens_per_microbatch=40,
        expert_experiment="expert" if mixes else None,
        rank=rank,
        world_size=ranks,
        **stream_options(algorithm, teacher=True),
    ) as stream:
        model = policy()
        settings = TrainerSettings(
            checkpoints=folder / f"ranks-{ranks}", max_steps=STEPS, learning_rate=0.02
        )
        trainer = Trainer(
            stream, model, algorithm, settings, reference=policy(1), teacher=policy(2)
        )

        def broken(gradient: torch.Tensor) -> torch.Tensor:
            here = rank == ranks - 1 and len(reports) + 1 == NOT_FINITE
            return gradient * torch.nan if here else gradient

        next(iter(model.parameters())).register_hook(broken)
        trainer.run(lambda report: reports.append(told(report)))
    return reports


def main(folder: str, rank: str, ranks: str, name: str, arguments: str) -> None:
    """Write what is told of each step."""
    torch.set_num_threads(1)
    meeting, number, world = f"file://{folder}/meeting", int(rank), int(ranks)
    torch.distributed.init_process_group("gloo", meeting, rank=number, world_size=world)
    found = trained(Path(folder), number, world, build(name, **json.loads(arguments)))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
