"""One rank of a data-parallel trainer."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed

from tests.trainer.gradients import gradient, train
from trinity_buffer.algorithm import build
from trinity_buffer.trainer.parallel import TorchProcesses

TRAINED = {"grpo", "ppo"}
OF_ONE_GROUP = {"grpo", "ppo", "rloo", "reinforceplusplus", "dpo", "sft", "gspo"}


def main(place: str, rank: str, names: str) -> None:
    """Write the gradient of the first step of each algorithm, and what two steps of some make."""
    torch.set_num_threads(1)
    folder = Path(place)
    meeting = f"file://{folder / 'ranks'}"  # a port that was free may be taken by then
    torch.distributed.init_process_group("gloo", meeting, rank=int(rank), world_size=2)
    for name in names.split(","):
        url = f"sqlite:///{folder}/{name}.db"
        found = gradient(url, build(name), "ranks", processes=TorchProcesses())
        torch.save(found, folder / f"{name}-{rank}.pt")
        if name in OF_ONE_GROUP:  # rank 1 has no rows
            few = gradient(url, build(name), "few", groups=1, processes=TorchProcesses())
            torch.save(few, folder / f"{name}-few-{rank}.pt")
    for name in [name for name in names.split(",") if name in TRAINED]:
        url = f"sqlite:///{folder}/{name}.db"
        trainer, reports = train(
            url, build(name), folder / "c", max_steps=2, consumer="run", processes=TorchProcesses()
        )
        norms = torch.tensor([report.gradient_norm for report in reports])
        torch.save((trainer.policy.state_dict(), norms), folder / f"{name}-run-{rank}.pt")
    torch.distributed.destroy_process_group()
