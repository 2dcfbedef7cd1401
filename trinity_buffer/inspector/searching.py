"""Texts of rollouts that hold what is looked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from trinity_buffer.codec.objects import unpack_object
from trinity_buffer.errors import DamagedSegmentError, InvalidArgumentError
from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.inspector.experience import (
    Damage,
    EventWithSegment,
    Unreadable,
    decoded_each,
    with_segments,
)
from trinity_buffer.inspector.source import Source
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.handle import Event
from trinity_buffer.pipeline.verify.projections import Progress, no_progress
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.rows import first_address, position_of, rows_recorded_by

_RECORDED = ExperiencesRecorded.__name__

AROUND = 40
"""So many characters stand before and after what was found."""


@dataclass(frozen=True, slots=True)
class Match:
    """A text that holds what was looked for.

    Attributes:
        address: of the experience, as an integer.
        field: of the experience, such as ``response_text`` or ``messages[2].content``.
        excerpt: the first place, with what stands around it.
    """

    uid: str
    field: str
    excerpt: str
    reward: float | None
    policy_version: int | None
    address: int = 0


async def search(
    source: Source,
    text: str,
    *,
    exact: bool = False,
    after: int = -1,
    progress: Progress = no_progress,
    unreadable: list[Unreadable] | None = None,
    looked_at: Callable[[int], bool | None] = lambda _: None,
) -> AsyncIterator[Match]:
    """Yield each text of a rollout that holds ``text``, in order of the log, as soon as found.

    Texts are those of the family ``text``: prompt, response, messages, tools, and the messages of
    what was chosen and rejected. Reads those of all rollouts, some events at a time; stop when
    there is enough.

    Args:
        source: the experiment.
        text: what to look for.
        exact: upper and lower case are different.
        after: only in experiences above this address.
        progress: called with the position that was reached, and the last one.
        unreadable: gets the rows whose texts cannot be read; None: the error at the end names them.
        looked_at: called with the last address that some events can have, once they were searched;
            the search ends if it returns True.

    Raises:
        InvalidArgumentError: ``text`` is empty.
        DamagedSegmentError: at the end, where ``unreadable`` is None.
    """
    if not text:
        raise InvalidArgumentError("text is empty, and every text holds that: say what to look for")
    # What is recorded meanwhile is left out, or a search of a running store might never end.
    head = await source.head()
    damaged: list[Unreadable] = [] if unreadable is None else unreadable
    async for positions, events, broken in _texts_of_events(source, position_of(after) - 1, head):
        matches = await source.database.compute(_matches, events, text, after, exact=exact)
        for position in positions:
            if position in broken:
                rows = await source.read(writer_queries.rows_of_events, source.key, [position])
                damaged += [
                    Unreadable(row.eid.uid, position, str(broken[position]))
                    for row in rows[position]
                    if row.refused is None and row.address > after
                ]
            for match in matches.get(position, ()):
                yield match
        # After the matches: a caller may stop at this address and go on behind it.
        progress("search", positions[-1], head)
        if looked_at(first_address(positions[-1] + 1) - 1):
            break
    if unreadable is None and damaged:
        raise DamagedSegmentError("; ".join(map(str, damaged)))


async def _texts_of_events(
    source: Source, after: int, head: int
) -> AsyncIterator[tuple[list[int], Mapping[int, EventWithSegment], Mapping[int, Damage]]]:
    """Yield positions of events that recorded experiences, some at a time, and what they hold."""
    limit = sizes().events_per_page
    while stored := await source.database.read(
        log.read_after, source.key, after, limit=limit, kinds=[_RECORDED], up_to=head
    ):
        after = stored[-1].position
        read, unread = decoded_each(source.name, stored)
        events = {event.position: event for event in read}
        # By rows, not events: one event may hold a thousand long texts.
        for positions in _parts([event.position for event in stored], events):
            there = [events[at] for at in positions if at in events]
            readable, broken = await with_segments(source, there, ["text"])
            yield positions, readable, broken | {at: unread[at] for at in positions if at in unread}


def _parts(positions: Iterable[int], events: Mapping[int, Event]) -> Iterator[list[int]]:
    """Yield positions of events that have some hundred rows together, and at least one of them."""
    part: list[int] = []
    rows = 0
    for position in positions:
        part.append(position)
        fact = events[position].fact if position in events else None
        rows += fact.rows if isinstance(fact, ExperiencesRecorded) else 0
        if rows >= sizes().rows_per_page:
            yield part
            part, rows = [], 0
    if part:
        yield part


def _matches(
    events: Mapping[int, EventWithSegment], text: str, after: int, *, exact: bool
) -> dict[int, list[Match]]:
    """Return position -> what was found in its rows above ``after``, where anything was."""
    matches = {}
    for position, event in events.items():
        columns = [
            (values.pieces, held)
            for segment in event.families.values()
            for name, values in segment.objects.items()
            if (held := _held(name, values.pieces, text, exact=exact))
        ]
        if columns:
            assert isinstance(event.fact, ExperiencesRecorded)  # the kind that was read
            rows = rows_recorded_by(position, event.fact)
            matches[position] = [
                Match(row.eid.uid, *text_match, row.reward, row.policy_version, row.address)
                for slot, row in enumerate(rows)
                if row.refused is None and row.address > after
                for pieces, held in columns
                for text_match in held.get(pieces[slot], ())
            ]
    return matches


def _held(
    name: str, pieces: Iterable[bytes], text: str, *, exact: bool
) -> dict[bytes, list[tuple[str, str]]]:
    """Return packed value of a column -> field and excerpt of each text in it that holds ``text``.

    All are looked at as one, and one by one only where that holds it: few columns do.
    """
    texts = {piece: list(_texts(name, unpack_object(piece))) for piece in set(pieces) if piece}
    # A match that spans two texts costs a second look, and is not found below.
    joined = "\0".join(value for fields in texts.values() for _, value in fields)
    if (text if exact else text.casefold()) not in (joined if exact else joined.casefold()):
        return {}
    return {
        piece: [
            (field, excerpt)
            for field, value in fields
            if (excerpt := _excerpt(value, text, exact=exact)) is not None
        ]
        for piece, fields in texts.items()
    }


def _excerpt(value: str, text: str, *, exact: bool) -> str | None:
    at, size = value.find(text), len(text)
    if not exact:
        folded, wanted = value.casefold(), text.casefold()
        at, size = folded.find(wanted), len(wanted)
        if at >= 0 and len(folded) != len(value):  # such as "ss" for "ß"
            ends = list(accumulate(len(character.casefold()) for character in value))
            last = bisect_right(ends, at + size - 1)
            at = bisect_right(ends, at)
            size = last + 1 - at
    return None if at < 0 else value[max(0, at - AROUND) : at + size + AROUND]


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from _texts(f"{name}[{at}]", inner)
