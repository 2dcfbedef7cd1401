"""The ranks of a trainer that ``torchrun`` started: each is one ``trinity-buffer train``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.diagnosis import counted
from trinity_buffer.trainer.parallel import (
    OneProcess,
    Processes,
    gather_texts,
    processes_here,
)

SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def ranks_of_environment() -> Iterator[Processes]:
    """Join the ranks that the environment names, and leave them on the way out.

    Raises:
        InvalidArgumentError: it names several, and not where they meet.
    """
    number = os.environ.get("WORLD_SIZE", "1")
    if number == "1":
        yield OneProcess()
        return
    missing = [name for name in SET_BY_TORCHRUN if not os.environ.get(name)]
    if missing:
        raise InvalidArgumentError(
            f"WORLD_SIZE={number} without {', '.join(missing)}: start several ranks with `torchrun "
            "--nproc-per-node N --no-python trinity-buffer train`, which sets them all; for a "
            "trainer on its own, unset WORLD_SIZE"
        )
    store, rank, world_size = next(rendezvous("env://"))
    # torchrun keeps its store when it starts the ranks again: without a prefix they would look for
    # the processes of the life before, and wait for them until they time out.
    life = f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        store=PrefixStore(life, store),
        rank=rank,
        world_size=world_size,
    )
    try:
        yield processes_here()
    finally:
        torch.distributed.destroy_process_group()


def device_here(device: str) -> str:
    """Return which device a configuration means in this process: of ``cuda``, the GPU of its rank.

    Raises:
        InvalidArgumentError: torch sees no such GPU, or several ranks would share one.
    """
    kind, _, named = device.partition(":")
    if kind == "cpu":
        return device
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if named and ranks > 1:
        raise InvalidArgumentError(
            f"device={device} is one GPU, and {ranks} ranks on this machine need one each: give "
            "device=cuda (--set device=cuda)"
        )
    number = int(named or os.environ.get("LOCAL_RANK", "0"))
    needed, there = max(number + 1, ranks), torch.cuda.device_count()
    if needed > there:
        raise InvalidArgumentError(
            f"device={device} needs {counted(needed, 'GPU')}, and torch {torch.__version__} sees "
            f"{there} on this machine: run it where there are enough, or with --set device=cpu"
        )
    return f"{kind}:{number}"


def on_rank_0(processes: Processes, work: Callable[[], str]) -> str:
    """Return what ``work`` returned on rank 0, which alone does it; every rank must call this."""
    return gather_texts(processes, "" if processes.rank else work())[0]


def number_of_rank_0(processes: Processes, work: Callable[[], float | None]) -> float | None:
    """Return what ``work`` returned on rank 0, which alone does it; every rank must call this."""
    number = None if processes.rank else work()
    if processes.world_size == 1:
        return number
    told = torch.tensor([number is not None, number or 0.0], dtype=torch.float64)
    is_there, value = processes.gather(told)[0].tolist()
    return value if is_there else None
