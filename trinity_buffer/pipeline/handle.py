"""A handle of an experiment, and the conversion between events of the log and facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trinity_buffer.codec.objects import decode_body, decode_fact
from trinity_buffer.errors import CodecError, InvalidArgumentError, StoreError
from trinity_buffer.events import ConfigurationChanged, ExperimentCreated, Fact, kinds_of
from trinity_buffer.options import renamed
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.connection import Database
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.transaction import Transaction, one_statement


class ExperimentHandle:
    """One named training run of a store; users hold an `Experiment`.

    Attributes:
        database: database of the store.
        key: key of the experiment in the tables.
        name: its name in the store.
        config: its configuration when it was opened here.
    """

    def __init__(self, database: Database, key: int, name: str, config: Mapping[str, Any]) -> None:
        self.database = database
        self.key = key
        self.name = name
        self.config = dict(config)

    async def is_finished(self) -> bool:
        """Return whether it is finished now; a later change of configuration reopens it."""
        return await self.database.read(writer_queries.is_finished, self.key)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """An immutable fact at a position in the log of one experiment.

    Attributes:
        experiment: name of the experiment whose log it is in.
        position: 1, 2, ... without gaps.
        kind: in past tense, such as ``ExperiencesRecorded``.
        actor: the process that recorded it.
        recorded_at: seconds since 1970, for display; events are ordered by `position`.
        fact: its content, an instance of a class in `trinity_buffer.events`.
        encoded: the same as bytes.
    """

    experiment: str
    position: int
    kind: str
    actor: str
    recorded_at: float
    fact: Fact
    encoded: bytes = field(repr=False)

    @property
    def body(self) -> Mapping[str, Any]:
        """Its content as a mapping, upgraded to the current version; see ``docs/events.md``."""
        return decode_body(self.kind, self.encoded)


def decoded(experiment: str, stored: StoredEvent) -> Event:
    """Return a stored event, its fact upgraded to the current version of its kind.

    Raises:
        CodecError: the body is damaged, or of a newer version; the message names the position.
    """
    try:
        fact = decode_fact(stored.kind, stored.body)
    except CodecError as error:
        place = f"experiment {experiment!r}, the event at position {stored.position}"
        raise type(error)(f"{place}: {error}") from error
    at = stored.recorded_at / 1e6
    return Event(experiment, stored.position, stored.kind, stored.actor, at, fact, stored.body)


def fact_at(experiment: str, stored: StoredEvent, kind: type[T]) -> T:
    """Return the fact of a stored event, which must be of ``kind``.

    Raises:
        CodecError: the body is damaged, of a newer version, or the event is of another kind.
    """
    return fact_of(decoded(experiment, stored), kind)


def fact_of(event: Event, kind: type[T]) -> T:
    """Return the fact of an event, which must be of ``kind``, else CodecError is raised."""
    if not isinstance(fact := event.fact, kind):
        place = f"experiment {event.experiment!r}, the event at position {event.position}"
        raise CodecError(f"{place}: it is a {event.kind}, not a {kind.__name__}: run `verify`")
    return fact


def config_of(tx: Transaction, key: int, name: str) -> dict[str, Any] | None:
    """Return the configuration of an experiment, or None before its first event.

    From the log where its row is lost or damaged: `rebuild`, which mends that, opens it first.
    """
    with suppress(StoreError):
        if (stored := writer_queries.config_of(tx, key)) is not None:
            return stored[0]
    kinds = kinds_of(ExperimentCreated | ConfigurationChanged)
    for event in reversed(log.read_after(tx, key, 0, limit=1 << 31, kinds=kinds)):
        match decoded(name, event).fact:
            case ExperimentCreated(config=config) | ConfigurationChanged(config=config):
                return renamed(config, warn=False)
    return None


def experiment_called(tx: Transaction, name: str) -> tuple[int, dict[str, Any]] | None:
    """Return an experiment's key and configuration, or None if there is none of this name."""
    key = log.find_experiment(tx, name)
    config = None if key is None else config_of(tx, key, name)
    return None if key is None or config is None else (key, config)


@one_statement
def stored_at(
    tx: Transaction, key: int, experiment: str, positions: Iterable[int]
) -> dict[int, StoredEvent]:
    """Return position -> event, of events that have to be there.

    Raises:
        CodecError: one is not.
    """
    wanted = sorted(set(positions))
    stored = {event.position: event for event in log.read_at(tx, key, wanted)}
    require_positions(experiment, wanted, stored)
    return stored


def require_positions(experiment: str, wanted: Iterable[int], there: Container[int]) -> None:
    """Raise CodecError, which names it, if an event that rows of a projection name is not there."""
    for position in wanted:
        if position not in there:
            raise CodecError(
                f"experiment {experiment!r}: there is no event at position {position}, which its "
                "projections name: run `trinity-buffer verify` and restore the store from a backup"
            )


def as_json(what: str, value: Any) -> Any:
    """Return ``value`` as it will be read back from JSON: tuples as lists, keys as strings.

    Recorded values are compared with later ones, which must have the same types.

    Raises:
        InvalidArgumentError: not representable in JSON, such as NaN; ``what`` names the value.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{what}: {value!r:.200} cannot be recorded, it must be made of JSON's values ({error})"
        ) from error


def by_size(
    items: Iterable[T],
    size_of: Callable[[T], int],
    most: int,
    apart: Callable[[list[T], T], bool] = lambda _group, _item: False,
) -> Iterator[list[T]]:
    """Yield items in groups of a size of up to ``most``; one that is larger goes alone.

    Args:
        apart: whether an item begins a new group, whatever the size of the one before it.
    """
    group: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if group and (total + size > most or apart(group, item)):
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
