"""What a store has to offer to be compared, and what it is asked to do.

A store is a module that `benchmarks.peers.catalogue` names. It offers two names:

- ``serving(folder, job)``, a context manager: the store runs, empty; what it yields leads there and
  can be handed to another process;
- ``Client(address)``, a `StoreClient` of what was yielded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from benchmarks.peers.rollouts import Array, Batch, Rollout

Operation = Literal["write", "read", "pass"]
Role = Literal["writer", "strategy", "trainer"]


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement of one store.

    Attributes:
        module: of the store.
        operation: ``"write"`` (by one writer), ``"read"`` (of what is stored, with advantages) or
            ``"pass"``: two writers, a strategy and a trainer, each a process, all at once.
        experiences: how many, a multiple of ``writers * per_write`` and of ``per_read``.
        backend: of ours, ``"sqlite"`` or ``"postgresql"``.
        writers: how many processes write.
        per_write, per_decision, per_read: experiences of a call of ``write``, ``decide``, ``read``.
        rate: experiences a second of all writers, 0: as fast as the store lets them.
        commits: whether our trainer commits each step; others have nothing to commit.
    """

    module: str
    operation: Operation
    experiences: int
    backend: str = "sqlite"
    writers: int = 1
    per_write: int = 64
    per_decision: int = 64
    per_read: int = 256
    rate: float = 0.0
    commits: bool = True


class StoreClient:
    """A store as one process uses it.

    Attributes:
        decides_on_its_way: True where advantages are computed between writer and store, by no
            process of their own.
        poll_s: how long to wait before the next question where there was nothing to have.
    """

    decides_on_its_way: ClassVar[bool] = False
    poll_s: ClassVar[float] = 0.001

    def prepare(self, role: Role, rows: int) -> None:
        """Open what a role needs that will ask for ``rows`` at once; the clock does not run yet."""

    def write(self, rollouts: Sequence[Rollout], advantages: Array | None = None) -> None:
        """Return when the store has acknowledged the rollouts.

        Args:
            advantages: of rollouts that a trainer can be given as they are, none is to be computed.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Return when all that was written is acknowledged, and can be read."""

    def decide(self, limit: int) -> int:
        """Store the advantages of at most ``limit`` rollouts; return of how many.

        One that follows the store by itself returns when the trainer has had everything.
        """
        raise NotImplementedError

    def read(self, rows: int) -> Batch | None:
        """Return the next ``rows``, which nobody is given again; None: there are not enough."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what is open."""
