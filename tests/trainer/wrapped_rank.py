"""One of two ranks with a wrapped model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.trainer.wrapped import gradients, loss, model_of, rows_of


def main(place: str, rank: str, wrapper: str) -> None:
    """Write the gradient of every weight, whole, as this rank sees it."""
    torch.set_num_threads(1)
    folder = Path(place)
    meeting = f"file://{folder / 'ranks'}"  # a port that was free may be taken by then
    torch.distributed.init_process_group("gloo", meeting, rank=int(rank), world_size=2)
    for tied in (False, True):
        own = model_of(tied=tied)
        model = own
        if wrapper == "ddp":
            model = DistributedDataParallel(own)
        else:
            for layer in own.model.layers if wrapper == "fsdp2" else ():
                fully_shard(layer)
            fully_shard(own)
        for layout in ("padded", "packed"):
            own.zero_grad()
            # Two micro-batches, whose gradients add up.
            for part in (0, 1):
                (2 * loss(model, rows_of(int(rank) + 2 * part), layout)).backward()
            torch.save(gradients(own), folder / f"{layout}-{tied}-{rank}.pt")
    torch.distributed.destroy_process_group()
