"""The processes of a data-parallel trainer, one per rank, and what they tell each other."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed
from torch import Tensor

from trinity_buffer.trainer.policy import Trainable


class Processes(Protocol):
    """What a trainer asks of its process group."""

    @property
    def rank(self) -> int:
        """This process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """Return ``value`` summed over all ranks; every rank must call it, in the same order."""
        ...

    def average_gradients(self, model: Trainable) -> None:
        """Replace the gradients of ``model`` by their mean over all ranks."""
        ...


def processes_here() -> Processes:
    """Return the ranks of the process group, where there is one, else this process alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return TorchProcesses()
    return OneProcess()


class OneProcess:
    """A trainer on its own."""

    rank = 0
    world_size = 1

    def sum(self, value: Tensor) -> Tensor:
        """Return ``value``."""
        return value

    def average_gradients(self, model: Trainable) -> None:
        """Do nothing."""


class TorchProcesses:
    """The default process group of `torch.distributed`, initialised by whoever starts the ranks."""

    @property
    def rank(self) -> int:
        """This process, from 0."""
        return torch.distributed.get_rank()

    @property
    def world_size(self) -> int:
        """How many there are."""
        return torch.distributed.get_world_size()

    def sum(self, value: Tensor) -> Tensor:
        """Return ``value`` summed over all ranks."""
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total

    def average_gradients(self, model: Trainable) -> None:
        """Replace the gradients by their mean over all ranks, in one exchange."""
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        # A rank whose rows reach no weight still takes part: its gradient is 0.
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        joined = self.sum(torch.cat([gradient.flatten() for gradient in own])) / self.world_size
        for weight, mean in zip(weights, joined.split([w.numel() for w in weights]), strict=True):
            weight.grad = mean.view_as(weight)
