"""TorchRL in memory: its buffer over tensors that all processes share. Nothing survives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl.data import LazyTensorStorage

from benchmarks.peers.protocol import Job
from benchmarks.peers.stores.torchrl import Client, shared

__all__ = ["Client", "serving"]


@contextmanager
def serving(folder: Path, job: Job) -> Iterator[Any]:  # noqa: ARG001
    """Make the tensors; yield the buffer, which is sent to the processes."""
    yield shared(LazyTensorStorage(job.experiences, shared_init=True), job)
