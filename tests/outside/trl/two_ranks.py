"""One step of TRL's trainer, on the ranks that the environment names; rank 0 keeps the weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import trinity_buffer as tb
from tests.outside.trl.test_grpo_trainer import fresh_model, settings, tokenizer
from trinity_buffer.integrations.trl import StoredGRPOTrainer

folder, loss_type, groups = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank, world = (int(os.environ.get(name, usual)) for name, usual in (("RANK", 0), ("WORLD_SIZE", 1)))
if world > 1:
    torch.distributed.init_process_group("gloo")
with tb.open_train_stream(
    f"sqlite:///{folder}/run.db",
    experiment="run",
    strategy="grpo",
    groups_per_step=groups,
    rank=rank,
    world_size=world,
) as stream:
    plain = {"optim": "sgd", "max_grad_norm": 1e9, "max_steps": 1, "save_steps": 1}
    args = settings(folder / "out", loss_type=loss_type, **plain)
    trainer = StoredGRPOTrainer(
        fresh_model(), stream=stream, args=args, processing_class=tokenizer()
    )
    trainer.train()
    if not rank:
        trained = trainer.accelerator.unwrap_model(trainer.model).parameters()
        torch.save(torch.cat([one.detach().flatten() for one in trained]), folder / "weights.pt")
