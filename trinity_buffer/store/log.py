"""The log: append-only, one order per experiment, each event folded as it is written.

Its chain: each event's head is a digest over the head before it and the event. One kept head
proves all of the past up to it. The bytes are in ``docs/events.md``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from hashlib import sha256
from typing import Any, NamedTuple

from trinity_buffer.errors import StoreError, StoreReplacedError
from trinity_buffer.events import NewEvent, PlacedFact, kind_of, now_us
from trinity_buffer.identity import require_name
from trinity_buffer.store import fold
from trinity_buffer.store.tables import FREQUENT, NOT_FREQUENT, event
from trinity_buffer.store.transaction import Ends, Statement, Transaction, one_statement


class Place(NamedTuple):
    """Where a log ends: the position of its last event, and the head that proves all up to it."""

    position: int
    head: bytes


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A fact as it is stored in the log.

    Attributes:
        recorded_at: in microseconds since 1970.
        head: see `head_of`; None in the part of a log that is older than its chain.
    """

    position: int
    kind: str
    actor: str
    recorded_at: int
    body: bytes
    head: bytes | None


def append(
    tx: Transaction,
    experiment: int,
    events: Sequence[tuple[str, NewEvent]],
    *,
    last: Place | None = None,
) -> list[Place]:
    """Append events in order, fold them, and return their places. Never commits.

    So events and projections are one transaction: no reader sees one without the other.

    Args:
        events: each with its actor.
        last: where the log ends, if that was asked under the lock already.

    Raises:
        InvalidArgumentError: an actor's name is not a valid name.
        StoreError: the last event has no head.
    """
    for actor in {actor for actor, _ in events}:
        _require_actor(actor)
    if last is None:
        # Under the lock, so that no other event comes between the end that is read and ours.
        tx.lock(experiment)
        last = end(tx, experiment)
    if not last.head:
        raise StoreError(
            f"the event at position {last.position} has no head, so none can follow it: it was "
            "removed; run `trinity-buffer verify` and restore the store from a backup"
        )
    places, facts, rows, now = [], [], [], now_us()
    for actor, new in events:
        event_says = (last.position + 1, kind_of(new.fact), actor, now, new.encoded)
        last = Place(event_says[0], head_of(last.head, *event_says))
        places.append(last)
        rows.append((experiment, *event_says, last.head))
        facts.append(PlacedFact(last.position, actor, new.fact))
    # Announced at the commit. Where a server does not answer that, `PostgresConnection.run` looks
    # for this place before it writes again; if it is there, the caller gets the first answer.
    tx.appended[experiment] = last
    tx.insert_many(event, rows)
    fold.fold_all(tx, experiment, facts)
    return places


_require_actor = lru_cache(partial(require_name, "an actor's name"))
"""Checks each of the few actors of a process once."""


def end(tx: Transaction, experiment: int) -> Place:
    """Return where the log ends; before its first event, the origin of its chain."""
    last = end_if_open(tx, experiment, ())
    assert last is not None  # of no batch none is sealed
    return last


def holds(tx: Transaction, experiment: int, position: int, head: bytes) -> bool:
    """Return whether the log has the event of this head at this position."""
    stored = read_at(tx, experiment, [position])
    return bool(stored) and stored[0].head == head


def require_ends(tx: Transaction, store: str, ends: Ends) -> None:
    """Raise unless each log still has the last event that this process saw of it.

    Raises:
        StoreReplacedError: one lacks it; the message names the ``store``.
    """
    for experiment, (position, known) in ends.items():
        if holds(tx, experiment, position, known):
            continue
        at = head(tx, experiment)
        # A standby that is read may be behind the one that was read before.
        if at < position and tx.dialect.name == "postgresql":
            ((is_standby,),) = tx.fetch_all("SELECT pg_is_in_recovery()", ())
            if is_standby:
                continue
        raise StoreReplacedError(
            f"{store}: the log of experiment {_NAME.value(tx, of=experiment) or experiment!r} has "
            f"lost its event at position {position}, which was acknowledged to this process; it "
            f"ends at {at} now. The store was replaced by one that lacks it (a failover, or an "
            "older backup): end every process of the run, bring that store back, or go on from "
            "what is there by starting them again"
        )


def end_if_open(tx: Transaction, experiment: int, batches: Iterable[str]) -> Place | None:
    """Return `end`, or None if one of ``batches`` is sealed, in one statement."""
    rows = _END.fetch_all(tx, of=experiment, batches=batches)
    if not rows:
        return Place(0, origin(experiment_name(tx, experiment)))
    ((position, known, is_sealed),) = rows
    # After a failover, `PostgresConnection` looks for what was seen: a new server may lack it. On
    # SQLite nothing asks.
    tx.seen.append((experiment, position, known))
    return None if is_sealed else Place(position, known)


_END = Statement(
    "SELECT position, head, EXISTS (SELECT 1 FROM batch "
    "WHERE experiment = :of AND batch IN TEXTS(:batches) AND sealed_at IS NOT NULL) "
    "FROM event WHERE experiment = :of ORDER BY position DESC LIMIT 1"
)


@one_statement
def head(tx: Transaction, experiment: int) -> int:
    """Return the last position of the experiment, 0 if it has none."""
    rows = _END.fetch_all(tx, of=experiment, batches=())
    for position, known, _ in rows:
        tx.seen.append((experiment, position, known))
    return int(rows[0][0]) if rows else 0


_TYPES = ((int, 0), (str, ""), (str, ""), (int, 0), (bytes, b""), (bytes, b""))
"""Of the columns of a `StoredEvent`, each with what stands for a value of another type."""
_SOUND = {(*(kind for kind, _ in _TYPES[:-1]), last) for last in (bytes, type(None))}


def _stored(row: Sequence[Any]) -> StoredEvent:
    """Return an event as the database has it.

    SQLite keeps a type beside each value, so a flipped bit can make a number of a body, or bytes of
    a text. That is empty here: the event is damaged, and its head does not hold.
    """
    # Nearly every row: a set of known type tuples is quicker than a check of each value.
    if tuple(map(type, row)) in _SOUND:
        return StoredEvent(*row)
    values: list[Any] = [
        value if isinstance(value, kind) or (kind is bytes and value is None) else empty
        for value, (kind, empty) in zip(row, _TYPES, strict=True)
    ]
    return StoredEvent(*values)


@one_statement
def read_after(
    tx: Transaction,
    experiment: int,
    after: int,
    *,
    limit: int,
    kinds: Sequence[str] | None = None,
    up_to: int | None = None,
) -> list[StoredEvent]:
    """Return up to ``limit`` events above ``after`` (and at most at ``up_to``), in order."""
    is_rare = kinds is not None and 0 < len(kinds) <= FEW_KINDS and FREQUENT.isdisjoint(kinds)
    query = _after(None if kinds is None else len(kinds), is_rare, up_to is not None)
    named = {f"kind{number}": kind for number, kind in enumerate(kinds or ())}
    rows = query.fetch_all(tx, of=experiment, after=after, most=limit, last=up_to, **named)
    events = list(map(_stored, rows))
    tx.seen += [(experiment, event.position, event.head) for event in events[-1:]]
    return events


_EVENTS = "FROM event WHERE experiment = :of"
_STORED = f"SELECT position, kind, actor, recorded_at, body, head {_EVENTS}"


@cache
def _after(kinds: int | None, is_rare: bool, bounded: bool) -> Statement:  # noqa: FBT001 - looked up by it
    """Return the statement; rare kinds are looked up one by one, however long the log is.

    Args:
        kinds: how many of them are wanted; None: all.
    """
    span = "position > :after AND position <= :last" if bounded else "position > :after"
    named = [f":kind{number}" for number in range(kinds or 0)]
    if not is_rare:
        wanted = f" AND kind IN ({', '.join(named)})" if named else " AND false"
        wanted = "" if kinds is None else wanted
        return Statement(f"{_STORED} AND {span}{wanted} ORDER BY position LIMIT :most")
    each = (
        f"SELECT position FROM (SELECT position {_EVENTS} AND {span} "
        f"AND {NOT_FREQUENT} AND kind = {kind} ORDER BY position LIMIT :most) AS of{kind[1:]}"
        for kind in named
    )
    rare = " UNION ALL ".join(each)
    first = f"SELECT position FROM ({rare}) AS rare ORDER BY position LIMIT :most"
    # Of a subquery PostgreSQL may make a join with every event; of an array it looks up each.
    return Statement(
        f"{_STORED} AND position IN ({first}) ORDER BY position",
        f"{_STORED} AND position = ANY(ARRAY({first})) ORDER BY position",
    )


FEW_KINDS = 6
"""Up to so many kinds of rare events are looked up one by one."""


@one_statement
def read_at(tx: Transaction, experiment: int, positions: Sequence[int]) -> list[StoredEvent]:
    """Return the events at ``positions``, in order of position."""
    rows = _AT.fetch_all(tx, of=experiment, positions=positions)
    events = list(map(_stored, rows))
    tx.seen += [(experiment, event.position, event.head) for event in events[-1:]]
    return events


_AT = Statement(f"{_STORED} AND position IN INTS(:positions) ORDER BY position")


def recorded_at(tx: Transaction, experiment: int, positions: Sequence[int]) -> dict[int, int]:
    """Return position -> when its event was recorded, in microseconds since 1970."""
    rows = _RECORDED_AT.fetch_all(tx, of=experiment, positions=positions)
    return {int(position): at if isinstance(at, int) else 0 for position, at in rows}


_RECORDED_AT = Statement(f"SELECT position, recorded_at {_EVENTS} AND position IN INTS(:positions)")


def find_experiment(tx: Transaction, name: str) -> int | None:
    """Return the id of the experiment, or None."""
    key = _FIND.value(tx, name=name)
    return None if key is None else int(key)


def experiment_name(tx: Transaction, experiment: int) -> str:
    """Return the name of the experiment with this id."""
    return str(_NAME.value(tx, of=experiment))


def create_experiment(tx: Transaction, name: str) -> int:
    """Return the id of the experiment, new or not."""
    _CREATE.execute_later(tx, name=name)
    return int(_FIND.value(tx, name=name))


def experiment_names(tx: Transaction) -> dict[str, int]:
    """Return all experiments of the store: name to id, in order of creation.

    Raises:
        StoreError: a name is damaged.
    """
    if damaged := damaged_names(tx):
        raise StoreError("; ".join(damaged))
    return {name: int(key) for name, key in _NAMES.fetch_all(tx)}


def damaged_names(tx: Transaction) -> list[str]:
    """Return which experiments' names are no texts: SQLite keeps a type beside each value."""
    return [
        f"table experiment is damaged: the name of experiment {key} is {name!r:.80}, which is no "
        "text: restore the store from a backup"
        for name, key in _NAMES.fetch_all(tx)
        if not isinstance(name, str)
    ]


_FIND = Statement("SELECT id FROM experiment WHERE name = :name")
_NAME = Statement("SELECT name FROM experiment WHERE id = :of")
_CREATE = Statement("INSERT INTO experiment (name) VALUES (:name) ON CONFLICT DO NOTHING")
_NAMES = Statement("SELECT name, id FROM experiment ORDER BY id")


_ORIGIN = b"trinity-buffer log\0"
_NUMBERS = struct.Struct(">qqII")


def origin(experiment: str) -> bytes:
    """Return the head before the first event of an experiment, which depends on its name."""
    return sha256(_ORIGIN + experiment.encode()).digest()


def head_of(
    previous: bytes, position: int, kind: str, actor: str, recorded_at: int, body: bytes
) -> bytes:
    """Return the head of an event: SHA-256 over ``previous`` and all that the event says."""
    # Lengths first: no other kind and actor can then give the same bytes.
    kind_bytes, actor_bytes = kind.encode(), actor.encode()
    numbers = _NUMBERS.pack(position, recorded_at, len(kind_bytes), len(actor_bytes))
    return sha256(b"".join((previous, numbers, kind_bytes, actor_bytes, body))).digest()


class EventChain:
    """Follows the heads of a log, event by event.

    Args:
        experiment: name of the experiment.
        heads: kept outside of the store; those that the log proves are taken out of `unproven`.

    Attributes:
        before: the head before the event that was taken last.
        head: its own.
        unproven: those that were not met so far.
        started: whether an event with a head was met.
    """

    def __init__(self, experiment: str, heads: Iterable[bytes] = ()) -> None:
        self.before = self.head = origin(experiment)
        self.unproven = set(heads)
        self.started = False

    def take(self, event: StoredEvent) -> str | None:
        """Go on by one event; return what is wrong with its head, or None.

        What is wrong is reported once: the events after it are followed from the head that it has.
        """
        self.before = self.head
        says = (event.position, event.kind, event.actor, event.recorded_at, event.body)
        computed = head_of(self.before, *says)
        self.head = event.head or computed
        if event.head is None:
            return "it has no head, and the one before it has one" if self.started else None
        first, self.started = not self.started, True
        if first and event.position > 1 and event.kind != "ChainStarted":
            return "it is the first with a head, and no ChainStarted"
        if computed != self.head:
            what = "what the log says up to it has"
            return f"its head is {self.head.hex()}, {what} {computed.hex()}"
        self.unproven.discard(self.head)
        return None
