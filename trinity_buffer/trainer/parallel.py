"""The processes of a data-parallel trainer, one per rank, and what they tell each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from trinity_buffer.codec.objects import ObjectPacker, unpack_object
from trinity_buffer.errors import LeaseLostError
from trinity_buffer.pipeline.encoding import raw_tensor, tensor_of
from trinity_buffer.trainer.policy import Trainable

T = TypeVar("T")


def unwrapped(model: Any) -> Any:
    """Return the model inside a `DistributedDataParallel` and `torch.compile`, else itself."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner = getattr(inner, "_orig_mod", inner)
    return inner if inner is model else unwrapped(inner)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a `DTensor`, of which this rank holds a part."""
    return hasattr(tensor, "full_tensor")


def resharded(model: Any) -> None:
    """Let each rank hold its part alone of a model that FSDP2 shards.

    After a forward pass without a backward one it holds the whole weights of the outermost module.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def whole(weight: Tensor) -> Tensor:
    """Return all of a weight that ranks may hold parts of; its gradient is averaged over them.

    Every rank must call it, and go backward through it.
    """
    if not is_sharded(weight):
        return weight
    mesh: Any = weight.device_mesh  # type: ignore[attr-defined]  # of a DTensor
    partial = import_module("torch.distributed.tensor").Partial()
    weights: Tensor = weight.full_tensor(grad_placements=[partial] * mesh.ndim)  # type: ignore[attr-defined]  # as above
    if weights.requires_grad:
        weights.register_hook(lambda gradient: gradient / mesh.size())
    return weights


class Processes:
    """The ranks of a trainer, as it asks for them: here, a trainer on its own.

    Attributes:
        rank: this process, from 0.
        world_size: how many there are.
    """

    rank: int = 0
    world_size: int = 1

    def sum(self, value: Tensor) -> Tensor:
        """Return ``value`` summed over all ranks; every rank must call it, in the same order."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return ``value`` of each rank; every rank must call it, in the same order."""
        return [value]

    def average_gradients(self, model: Trainable, weights: Sequence[Tensor]) -> None:
        """Replace the gradients of ``weights``, which are ``model``'s, by their mean over ranks."""


def processes_here() -> Processes:
    """Return the ranks of the process group, where there is one, else this process alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return TorchProcesses()
    return Processes()


@contextmanager
def _all_ranks_there() -> Iterator[None]:
    """Say it in our words if an exchange inside the context fails."""
    try:
        yield
    except RuntimeError as error:  # all that torch.distributed raises of the kind
        raise LeaseLostError(
            f"rank {torch.distributed.get_rank()} could not exchange numbers with the others, one "
            f"of which is gone or hangs ({str(error).strip():.200}): start all ranks again; they "
            "resume from the last commit"
        ) from error


class TorchProcesses(Processes):
    """A process group of `torch.distributed`, initialised by the program that starts the ranks.

    Args:
        group: None: the default one.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()

    @override
    def sum(self, value: Tensor) -> Tensor:
        """Return ``value`` summed over all ranks."""
        total = value.clone()
        with _all_ranks_there():
            torch.distributed.all_reduce(total, group=self._group)
        return total

    @override
    def gather(self, value: T) -> list[T]:
        """Return ``value`` of each rank, of any type that a field of an experience may hold."""
        # Not as torch.distributed sends objects: it pickles them.
        packed = bytearray(ObjectPacker(raw_tensor).pack(value, "what ranks exchange"))
        own = torch.frombuffer(packed, dtype=torch.uint8)
        # Collectives need one shape: lengths first, then bytes padded to the longest.
        lengths = [int(size) for size in self._gathered(torch.tensor([len(own)]))]
        padded = self._gathered(pad(own, (0, max(lengths) - len(own))))
        pairs = zip(padded, lengths, strict=True)
        return [
            unpack_object(of_rank[:size].numpy().tobytes(), tensor_of) for of_rank, size in pairs
        ]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        if torch.distributed.get_backend(self._group) == "nccl":  # which moves those of GPUs alone
            own = own.cuda()
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        with _all_ranks_there():
            torch.distributed.all_gather(gathered, own, group=self._group)
        return [of_rank.cpu() for of_rank in gathered]

    @override
    def average_gradients(self, model: Trainable, weights: Sequence[Tensor]) -> None:
        """Replace the gradients of ``weights`` by their mean over all ranks, in one exchange.

        Of a model that averages them itself (DDP, FSDP2) they stay as they are.
        """
        wrapped = isinstance(getattr(model, "model", model), DistributedDataParallel)
        if wrapped or any(map(is_sharded, model.parameters())):
            return
        weights = [weight for weight in weights if weight.requires_grad]
        # A rank whose rows reach no weight still takes part: its gradient is 0.
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        joined = self.sum(torch.cat([gradient.flatten() for gradient in own])) / self.world_size
        for weight, mean in zip(weights, joined.split([w.numel() for w in weights]), strict=True):
            weight.grad = mean.view_as(weight)
