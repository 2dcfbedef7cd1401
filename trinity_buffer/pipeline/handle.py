"""What names an experiment in a store: for all that reads or writes it below its front door.

Events as users see them, and the way from a fact to the log.

What steps were handed out with: their manifests as they are served now.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from trinity_buffer import codec
from trinity_buffer.errors import CodecError, InvalidArgumentError
from trinity_buffer.events import BatchLeased, Fact, StepDealt, fact_of
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.log import NewEvent, StoredEvent
from trinity_buffer.store.transaction import Transaction


class ExperimentHandle:
    """One named training run of a store; `Experiment` is what its users hold.

    Attributes:
        database: of the store.
        key: of the experiment in its tables.
        name: its name in the store.
        config: its configuration as it was when it was opened here.
    """

    def __init__(self, database: Database, key: int, name: str, config: Mapping[str, Any]) -> None:
        self.database = database
        self.key = key
        self.name = name
        self.config = dict(config)

    def finished(self, tx: Transaction) -> bool:
        """Return whether it was finished since the last change of configuration."""
        return writer_queries.is_finished(tx, self.key)

    async def is_finished(self) -> bool:
        """Return the same, of the store as it is now."""
        return await self.database.read(writer_queries.is_finished, self.key)


CLOCK_OFFSET = "TRINITY_BUFFER_CLOCK_OFFSET_S"
"""Environment variable: seconds by which this process's clock is wrong, for tests of that."""

clock_offset_us = int(float(os.environ.get(CLOCK_OFFSET) or 0) * 1e6)
"""The same in microseconds, for this process."""

T = TypeVar("T")


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
        fact: the same as an instance of its class in `trinity_buffer.events`.
    """

    experiment: str
    position: int
    kind: str
    actor: str
    recorded_at: float
    body: Mapping[str, Any]
    fact: Fact


def new_event(fact: Fact) -> NewEvent:
    """Return the event to append. Encodes: call it outside transactions."""
    return NewEvent(fact, codec.encode_fact(fact))


def decoded(experiment: str, stored: StoredEvent) -> Event:
    """Return a stored event with its body as it is written today, however old it is.

    Raises:
        CodecError: the body is damaged, or of a newer version; the message names the position.
    """
    try:
        body = codec.decode_body(stored.kind, stored.body)
        fact = fact_of(stored.kind, body)
    except CodecError as error:
        place = f"experiment {experiment!r}, the event at position {stored.position}"
        raise type(error)(f"{place}: {error}") from error
    at = stored.recorded_at / 1e6
    return Event(experiment, stored.position, stored.kind, stored.actor, at, body, fact)


def fact_at(experiment: str, stored: StoredEvent, kind: type[T]) -> T:
    """Return what a stored event says, which must be of ``kind``.

    Raises:
        CodecError: the body is damaged, of a newer version, or the event is of another kind.
    """
    fact = decoded(experiment, stored).fact
    if not isinstance(fact, kind):
        place = f"experiment {experiment!r}, the event at position {stored.position}"
        raise CodecError(f"{place}: it is a {stored.kind}, not a {kind.__name__}: run `verify`")
    return fact


def as_json(what: str, value: Any) -> Any:
    """Return ``value`` as it will be read back: tuples as lists, keys as texts.

    What is recorded is compared with what is said later, which must then be of the same types.

    Raises:
        InvalidArgumentError: JSON cannot say it, as NaN; ``what`` names it.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{what}: {value!r:.200} cannot be recorded, it must be made of JSON's values ({error})"
        ) from error


def now_us() -> int:
    """Return the wall clock in microseconds since 1970.

    What may depend on it: the times that people read, and the deadline of an incomplete group. The
    order of the log does not, nor who owns a lease.
    """
    return time.time_ns() // 1000 + clock_offset_us


def leased_steps(
    tx: Transaction, key: int, experiment: str, positions: Sequence[int]
) -> dict[int, BatchLeased]:
    """Return position -> manifest, for positions where a step says that it was handed out.

    A step that was dealt anew says so by a `StepDealt`: its rows are those, and come in that order.

    Raises:
        CodecError: the body of an event is damaged, or it is not of a handed out step.
    """
    stored = {event.position: event for event in log.read_at(tx, key, positions)}
    facts = {at: decoded(experiment, event).fact for at, event in stored.items()}
    dealt = {at: fact for at, fact in facts.items() if isinstance(fact, StepDealt)}
    first = {
        event.position: fact_at(experiment, event, BatchLeased)
        for event in log.read_at(tx, key, sorted({fact.leased_at for fact in dealt.values()}))
    }
    return {
        at: _as_dealt(first[dealt[at].leased_at], dealt[at])
        if at in dealt
        else fact_at(experiment, stored[at], BatchLeased)
        for at in stored
    }


def _as_dealt(lease: BatchLeased, dealt: StepDealt) -> BatchLeased:
    """Return the manifest with its rows in the order in which they are served now."""

    def placed(column: Sequence[int]) -> tuple[int, ...]:
        return tuple(column[place] for place in dealt.order)

    return replace(
        lease,
        token=dealt.token,
        annotations=placed(lease.annotations),
        experiences=placed(lease.experiences),
        groups=placed(lease.groups),
        num_groups=len({lease.groups[place] for place in dealt.order}),
        source=placed(lease.source) if lease.source else (),
        microbatches=dealt.microbatches,
        digest=dealt.digest,
    )
