"""Numbers that the trainer holds in the processor's memory cross ranks of GPUs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trinity_buffer.trainer.parallel import TorchProcesses


class Moved(Tensor):
    """A tensor of a GPU, where there is none."""


def test_nccl_sums_numbers_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[type] = []

    def all_reduce(tensor: Tensor, group: Any = None) -> None:
        summed.append(type(tensor))
        tensor += 2

    distributed = torch.distributed
    monkeypatch.setattr(distributed, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(Tensor, "cuda", lambda self: self.as_subclass(Moved))

    counts = torch.tensor([3, 4])
    assert TorchProcesses().sum(counts).tolist() == [5, 6]
    assert counts.tolist() == [3, 4]
    assert summed == [Moved]
