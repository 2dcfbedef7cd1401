"""What a strategy or an explorer may do with a buffer: the interface, and the writer that only keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity_buffer.experience import Experience


@dataclass(frozen=True, slots=True)
class WriteReceipt:
    """What became of one ``write``.

    Attributes:
        position: place in the log of the event that holds (the last of) these experiences; 0:
            nothing was new.
        written: how many experiences this call added.
        duplicates: how many were stored before with the same content.
        rejected: how many were recorded, but will never be trained (``late``, ``invalid``); counted
            in ``written``.
        uids: uid of every experience of the call, in its order, new or not.
    """

    position: int
    written: int
    duplicates: int
    rejected: int = 0
    uids: tuple[str, ...] = ()


class BufferWriter(ABC):
    """Takes experiences in. Explorers write to the store through one; strategies are given a `StagedWriter`."""

    @abstractmethod
    async def write(self, experiences: Sequence[Experience]) -> WriteReceipt:
        """Take ``experiences``; on return the writer's promise holds (for the store: they are durable)."""

    async def write_async(self, experiences: Sequence[Experience]) -> WriteReceipt:
        """Do what `write` does, under its old name."""
        return await self.write(experiences)

    async def acquire(self) -> int:
        """Register one more user of this writer; return how many there are."""
        return 1

    async def release(self) -> int:
        """Take back one `acquire`; return how many users are left."""
        return 0


@dataclass(slots=True)
class StagedWriter(BufferWriter):
    """Keeps what a strategy writes until the consumer commits all of it, with its cursor, in one transaction.

    ``groups`` holds one list per ``write`` call, in the order of the calls: that is how a strategy
    says which experiences belong together.
    """

    groups: list[list[Experience]] = field(default_factory=list)
    rejections: list[tuple[Experience, str]] = field(default_factory=list)

    async def write(self, experiences: Sequence[Experience]) -> WriteReceipt:
        """Keep ``experiences`` as one group."""
        if experiences:
            self.groups.append(list(experiences))
        return WriteReceipt(0, len(experiences), 0, 0, tuple(e.eid.uid for e in experiences))

    def reject(self, experiences: Sequence[Experience], reason: str) -> None:
        """Say why ``experiences`` are left out; what is neither written nor rejected counts as ``filtered``."""
        self.rejections.extend((experience, reason) for experience in experiences)
