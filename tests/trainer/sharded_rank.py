"""One rank of a trainer whose model the ranks hold in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trinity_buffer as tb
from tests.trainer.qwen import qwen3
from trinity_buffer.algorithm import build
from trinity_buffer.trainer import parallel


def model_of(*, lora: bool = False) -> Any:
    """Return the model to begin with, whole."""
    model = qwen3()
    if not lora:
        return model
    import peft  # noqa: PLC0415 - an extra, and slow to import

    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def trainer_on(
    stream: Any, folder: Path, model: Any, reference: Any = None, **settings: Any
) -> tb.Trainer:
    """Return a trainer with an optimizer that keeps something of each weight."""
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=0.01)
    given = tb.TrainerSettings(checkpoints=folder, keep_checkpoints=None, **settings)
    return tb.Trainer(stream, model, build("grpo"), given, optimizer=optimizer, reference=reference)


def in_parts(model: Any, *, hybrid: bool = False) -> Any:
    """Let the ranks hold ``model`` in parts; hybrid: each half of them has all of it (HSDP)."""
    half = torch.distributed.get_world_size() // 2
    names = ("half", "part")
    how: Any = {}
    if hybrid:
        how["mesh"] = init_device_mesh("cpu", (2, half), mesh_dim_names=names)
    for layer in [one for one in model.modules() if type(one).__name__ == "Qwen3DecoderLayer"]:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def main(url: str, folder: str, rank: str, world: str, steps: str, name: str, *how: str) -> None:
    """Train up to step ``steps``, as one of ``world`` ranks.

    ``how`` may be "async", "lora", "hybrid", or "broken": this rank cannot write.
    """
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting-{name}-{world}-{steps}"
    torch.distributed.init_process_group("gloo", meeting, rank=int(rank), world_size=int(world))
    if "broken" in how:

        def broken(*_: Any) -> list[Path]:
            raise OSError(28, "No space left on device", "model-00002")

        vars(parallel)["write_share"] = broken
    lora, hybrid = "lora" in how, "hybrid" in how
    model = in_parts(model_of(lora=lora), hybrid=hybrid)
    reference = None if lora else in_parts(model_of(), hybrid=hybrid)
    with tb.open_train_stream(
        url,
        experiment="run",
        strategy="grpo",
        consumer=name,
        groups_per_step=2,
        rank=int(rank),
        world_size=int(world),
    ) as stream:
        settings = {"max_steps": int(steps), "async_checkpoints": "async" in how}
        trainer_on(stream, Path(folder) / name, model, reference, **settings).run()
    torch.distributed.destroy_process_group()
