"""What the log says of experiences and annotations, by their addresses, as columns.

A step is made of hundreds of rows and a handful of events: an event is decoded once, and gives the
columns of all of its rows, for less than a query by row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from trinity_buffer.errors import CodecError
from trinity_buffer.pipeline.events import decoded
from trinity_buffer.pipeline.streaming.blocks import runs
from trinity_buffer.sizes import sizes
from trinity_buffer.store import log
from trinity_buffer.store.address import position_of, slot_of
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.transaction import ReadSession


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of experiences without their tensors; one entry per row in each column."""

    rewards: list[float | None]
    policy_versions: list[int | None]
    prompt_lengths: list[int]
    lengths: list[int]
    trained_tokens: list[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def reordered(self, order: Sequence[int]) -> Facts:
        """Return them with row ``order[i]`` as row ``i``."""
        columns = (getattr(self, one.name) for one in fields(self))
        return Facts(*([column[row] for row in order] for column in columns))

    def append(self, other: Facts, first: int, stop: int) -> None:
        """Add the rows ``first`` to ``stop`` of another."""
        self.rewards.extend(other.rewards[first:stop])
        self.policy_versions.extend(other.policy_versions[first:stop])
        self.prompt_lengths.extend(other.prompt_lengths[first:stop])
        self.lengths.extend(other.lengths[first:stop])
        self.trained_tokens.extend(other.trained_tokens[first:stop])


def no_facts() -> Facts:
    """Return those of no rows, to be added to."""
    return Facts([], [], [], [], [])


@dataclass(frozen=True, slots=True)
class Recorded:
    """An ``ExperiencesRecorded``: the key of its segment, and of each row what it says of it."""

    segment: bytes
    facts: Facts

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.facts)


@dataclass(frozen=True, slots=True)
class Annotated:
    """An ``ExperiencesAnnotated``.

    Attributes:
        segment: key of what was computed; None: there are no tensors.
        experiences: per row, the address of what it annotates.
        groups: per row, a number that rows of one group share.
        planned: per group, whether it was planned (copies and imports are not).
    """

    segment: bytes | None
    experiences: list[int]
    groups: list[int]
    planned: list[bool]

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.experiences)


class LogRows:
    """Reads the events that rows point into, each once while it is in use.

    Args:
        experiment: key of the experiment that the addresses are of.
    """

    def __init__(self, experiment: int) -> None:
        self.experiment = experiment
        self._known: OrderedDict[int, Recorded | Annotated] = OrderedDict()
        self._num_rows = 0

    def facts(self, s: ReadSession, experiences: Sequence[int]) -> Facts:
        """Return what is known of the experiences at these addresses, in their order.

        Raises:
            CodecError: the body of an event cannot be read.
        """
        positions = {position_of(experiences[first]) for first, _ in runs(experiences)}
        return facts_of(experiences, self.events(s, positions))

    def events(
        self, s: ReadSession, positions: Collection[int]
    ) -> Mapping[int, Recorded | Annotated]:
        """Return position -> the event there.

        Ask for all that is used together at once: the others may be forgotten for it.

        Raises:
            CodecError: the body of one cannot be read.
        """
        unknown = sorted(position for position in positions if position not in self._known)
        if unknown:
            stored = s.read(log.read_at, self.experiment, unknown)
            if len(stored) < len(unknown):
                gone = sorted(set(unknown) - {event.position for event in stored})
                raise CodecError(f"the log has no event at position {gone[0]}: run `verify`")
            self._keep(s.compute(_read, stored))
        found = {}
        for position in positions:
            found[position] = self._known[position]
            self._known.move_to_end(position)
        while self._num_rows > sizes().rows_kept and len(self._known) > len(positions):
            self._num_rows -= self._known.popitem(last=False)[1].rows
        return found

    def _keep(self, events: Mapping[int, Recorded | Annotated]) -> None:
        self._known.update(events)
        self._num_rows += sum(event.rows for event in events.values())


def facts_of(experiences: Sequence[int], events: Mapping[int, Recorded | Annotated]) -> Facts:
    """Return what ``events`` know of the experiences at these addresses, in their order."""
    found = no_facts()
    for a, z in runs(experiences):
        first, event = slot_of(experiences[a]), events[position_of(experiences[a])]
        assert isinstance(event, Recorded)
        found.append(event.facts, first, first + z - a)
    return found


def _read(events: Iterable[StoredEvent]) -> dict[int, Recorded | Annotated]:
    return {stored.position: _event(stored) for stored in events}


def _event(stored: StoredEvent) -> Recorded | Annotated:
    try:
        body: Mapping[str, Any] = decoded("", stored).body
    except CodecError as error:
        raise CodecError(f"the event at position {stored.position}: {error}") from error
    if stored.kind == "ExperiencesAnnotated":
        return Annotated(body["segment"], body["experiences"], body["groups"], body["planned"])
    meta = body["meta"]
    return Recorded(
        body["segment"],
        Facts(
            meta["reward"],
            meta["policy_version"],
            meta["prompt_length"],
            meta["length"],
            meta["trained_tokens"],
        ),
    )
