"""Whoever reads a log from its first event on can check its chain on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trinity_buffer.errors import StoreError
from trinity_buffer.store import log
from trinity_buffer.store.log import StoredEvent


class EventChain:
    """Follows the heads of a log, event by event.

    Args:
        experiment: name of the experiment.
        kept: heads that somebody kept; those that the log proves are taken out of `unproven`.

    Attributes:
        before: the head before the event that was taken last.
        head: its own.
        unproven: kept heads that were not met so far.
    """

    def __init__(self, experiment: str, kept: Iterable[bytes] = ()) -> None:
        self.before = self.head = log.origin(experiment)
        self.unproven = set(kept)
        self._started = False

    def take(self, event: StoredEvent) -> str | None:
        """Go on by one event; return what is wrong with its head, or None.

        What is wrong is told once: the events after it are followed from the head that it has.
        """
        self.before = self.head
        self.head = log.head_of(
            self.before, event.position, event.kind, event.actor, event.recorded_at, event.body
        )
        if event.head is None:
            return "it has no head, and the one before it has one" if self._started else None
        first, self._started = not self._started, True
        computed, self.head = self.head, event.head
        if first and event.position > 1 and event.kind != "ChainStarted":
            return "it is the first with a head, and no ChainStarted"
        if computed != self.head:
            said = f"its head is {self.head.hex()}"
            return f"{said}, what the log says up to it has {computed.hex()}"
        self.unproven.discard(self.head)
        return None

    @property
    def started(self) -> bool:
        """Whether an event with a head was met."""
        return self._started

    def require(self, page: Sequence[StoredEvent]) -> None:
        """Go on by a page.

        Raises:
            StoreError: an event is not the one that was recorded, or one before it is gone.
        """
        for event in page:
            if (wrong := self.take(event)) is not None:
                raise StoreError(
                    f"the event at position {event.position} breaks the chain of the log: {wrong}; "
                    "run `trinity-buffer verify` and restore the store from a backup"
                )
