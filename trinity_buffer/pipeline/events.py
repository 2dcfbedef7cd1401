"""Events as users see them, and the way from a fact to the log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trinity_buffer import codec
from trinity_buffer.store.log import NewEvent, StoredEvent


@dataclass(frozen=True, slots=True)
class Event:
    """An immutable fact at a position in the log of one experiment.

    Attributes:
        experiment: name of the experiment whose order it belongs to.
        position: 1, 2, ... without gaps.
        kind: in past tense, such as ``ExperiencesRecorded``.
        actor: who recorded it.
        recorded_at: seconds since 1970, for people; the order is `position`.
        body: what happened; see ``docs/events.md``.
    """

    experiment: str
    position: int
    kind: str
    actor: str
    recorded_at: float
    body: Mapping[str, Any]


def new_event(kind: str, body: Mapping[str, Any]) -> NewEvent:
    """Return the event to append. Encodes: call it outside transactions."""
    return NewEvent(kind, body, codec.encode_body(kind, body))


def decoded(experiment: str, stored: StoredEvent) -> Event:
    """Return a stored event with its body as it is written today, however old it is.

    Raises:
        CodecError: the body is damaged, or of a newer version.
    """
    body = codec.decode_body(stored.kind, stored.body)
    return Event(
        experiment, stored.position, stored.kind, stored.actor, stored.recorded_at / 1e6, body
    )


def now_us() -> int:
    """Return the wall clock in microseconds since 1970."""
    return time.time_ns() // 1000
