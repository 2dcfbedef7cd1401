"""Texts of rollouts that hold what is looked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from trinity_buffer.codec import Segment
from trinity_buffer.errors import DamagedSegmentError, InvalidArgumentError
from trinity_buffer.inspect.blobs import Unreadable, readable_events
from trinity_buffer.inspect.compare import pages
from trinity_buffer.inspect.source import Source
from trinity_buffer.pipeline.history.refold import Progress, no_progress
from trinity_buffer.store.rows import ExperienceRow, position_of, slot_of

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
    looked_at: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[Match]:
    """Yield each text of a rollout that holds ``text``, in order of the log, as soon as found.

    Texts are those of the family ``text``: prompt, response, messages, tools, and the messages of
    what was chosen and rejected. Reads those of all rollouts, a page at a time; stop when there is
    enough.

    Args:
        source: the experiment.
        text: what to look for.
        exact: upper and lower case are different.
        after: only in experiences above this address.
        progress: called with the position that was reached, and the last one.
        unreadable: gets the rows whose texts cannot be read; None: the error at the end names them.
        looked_at: called with the last address of each page, once it was searched.

    Raises:
        InvalidArgumentError: ``text`` is empty.
        DamagedSegmentError: at the end, where ``unreadable`` is None.
    """
    if not text:
        raise InvalidArgumentError("text is empty, and every text holds that: say what to look for")
    head = await source.head()
    damaged: list[Unreadable] = [] if unreadable is None else unreadable
    async for rows in pages(source, after):
        positions = [position_of(row.address) for row in rows]
        events, broken = await readable_events(source, positions, ["text"])
        for row, position in zip(rows, positions, strict=True):
            if position in broken:
                damaged.append(Unreadable(row.eid.uid, position, str(broken[position])))
            segments = events[position].families.values() if position in events else ()
            for one in _matches(row, segments, text, exact=exact):
                yield one
        progress("search", positions[-1], head)
        looked_at(rows[-1].address)
    if unreadable is None and damaged:
        raise DamagedSegmentError("; ".join(map(str, damaged)))


def _matches(
    row: ExperienceRow, segments: Iterable[Segment], text: str, *, exact: bool
) -> Iterator[Match]:
    for field, value in _fields(segments, slot_of(row.address)):
        excerpt = _excerpt(value, text, exact=exact)
        if excerpt is not None:
            yield Match(row.eid.uid, field, excerpt, row.reward, row.policy_version, row.address)


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


def _fields(segments: Iterable[Segment], slot: int) -> Iterator[tuple[str, str]]:
    for segment in segments:
        for name, values in segment.objects.items():
            yield from _texts(name, values[slot])


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from _texts(f"{name}[{at}]", inner)
