"""The writers of strategies and explorers: the interface, and one that only collects.

Reasons for leaving out an experience are here too, as they are recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.identity import Key

if TYPE_CHECKING:
    from trinity_buffer.experience import Experience


@dataclass(frozen=True, slots=True)
class WriteReceipt:
    """The result of one ``write``.

    Attributes:
        position: place in the log of the event that holds (the last of) these experiences; 0:
            nothing was new.
        written: how many experiences this call added.
        duplicates: how many were stored before with the same content.
        rejected: how many were recorded, but will never be trained (``late``, ``invalid``); counted
            in ``written``.
        uids: uid of every experience of the call, in its order, new or not.
        digests: content digest of each.
        head: of the last event of the log that they are in, as hex; it proves all before it.
    """

    position: int
    written: int
    duplicates: int
    rejected: int = 0
    uids: tuple[str, ...] = ()
    digests: tuple[bytes, ...] = field(default=(), compare=False)
    head: str = field(default="", compare=False)

    @property
    def lines(self) -> tuple[str, ...]:
        """What `verify --acknowledged` reads, one a line: uid, content digest, head, by tabs."""
        pairs = zip(self.uids, self.digests, strict=True)
        return tuple(f"{uid}\t{digest.hex()}\t{self.head}" for uid, digest in pairs)


_NO_PLANS = "batch {!r}: a {} takes experiences, not plans; use a writer of the store"


class BufferWriter(ABC):
    """Takes experiences in. Explorers have one of the store, strategies a `StagedWriter`."""

    @abstractmethod
    async def write(self, experiences: Sequence[Experience]) -> WriteReceipt:
        """Take ``experiences``; on return they are where the writer promises (a store: durable)."""

    async def write_async(self, experiences: Sequence[Experience]) -> WriteReceipt:
        """Do what `write` does, under its old name."""
        return await self.write(experiences)

    async def plan(
        self,
        batch: Key,
        tasks: Sequence[Key],  # noqa: ARG002 - the interface
        rollouts_per_group: int,  # noqa: ARG002
        *,
        policy_version: int | Callable[[], int | None] | None = None,  # noqa: ARG002
    ) -> bool:
        """Record what a batch will hold, before it is generated; wait until there is room."""
        raise InvalidArgumentError(_NO_PLANS.format(batch, type(self).__name__))

    async def missing(self, batch: Key) -> list[tuple[Key, int]]:
        """Return the planned (task, run) pairs that are not stored."""
        raise InvalidArgumentError(_NO_PLANS.format(batch, type(self).__name__))

    async def seal(self, batch: Key, expected: int) -> None:  # noqa: ARG002
        """Record that a batch is complete with ``expected`` experiences."""
        raise InvalidArgumentError(_NO_PLANS.format(batch, type(self).__name__))

    async def acquire(self) -> int:
        """Register one more user of this writer; return how many there are."""
        return 1

    async def release(self) -> int:
        """Take back one `acquire`; return how many users are left."""
        return 0


@dataclass(slots=True)
class StagedWriter(BufferWriter):
    """Collects what a strategy writes until the consumer commits it, with its cursor.

    The numbers of each experience are copied: a strategy may reuse its memory for the next unit.

    ``groups`` holds one list per ``write`` call, in the order of the calls: that is how a strategy
    says which experiences belong together.
    """

    groups: list[list[Experience]] = field(default_factory=list)
    rejections: list[tuple[Experience, str]] = field(default_factory=list)

    @override
    async def write(self, experiences: Sequence[Experience]) -> WriteReceipt:
        """Keep ``experiences`` as one group."""
        for experience in experiences:
            experience.own_numbers()
        if experiences:
            self.groups.append(list(experiences))
        return WriteReceipt(0, len(experiences), 0, 0, tuple(e.eid.uid for e in experiences))

    def reject(self, experiences: Sequence[Experience], reason: str) -> None:
        """Give the reason why ``experiences`` are left out; by default it is ``filtered``."""
        self.rejections.extend((experience, reason) for experience in experiences)


INVALID = "invalid"

DROPPED = "dropped"
"""A trainer was told to leave it out."""

OVERSIZE = "oversize"
"""It is longer than a trainer takes."""


def invalid(*fields: str) -> str:
    """Return the reason for rejecting what lacks ``fields``, or has them broken."""
    return f"{INVALID}: {', '.join(fields)}" if any(fields) else INVALID
