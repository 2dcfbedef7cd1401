"""Two ranks of a trainer as threads of one process."""

from __future__ import annotations

from threading import Barrier
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import override

from trinity_buffer.trainer.parallel import Processes

T = TypeVar("T")


class RankOfTwo(Processes):
    """One of two ranks, each in a thread of its own."""

    world_size = 2

    def __init__(self, rank: int, told: dict[int, Any], barrier: Barrier) -> None:
        self.rank, self._told, self._barrier = rank, told, barrier

    @classmethod
    def pair(cls) -> list[RankOfTwo]:
        """Return both."""
        told: dict[int, Any] = {}
        barrier = Barrier(2)
        return [cls(rank, told, barrier) for rank in range(2)]

    @override
    def gather(self, value: T) -> list[T]:
        self._told[self.rank] = value
        self._barrier.wait(30)
        both = [self._told[0], self._told[1]]
        self._barrier.wait(30)
        return both

    @override
    def sum(self, value: Tensor) -> Tensor:
        one, other = self.gather(value)
        assert one.shape == other.shape
        return one + other
