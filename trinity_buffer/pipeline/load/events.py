"""A cache of decoded events, and their columns for the rows of a step.

A step has hundreds of rows but only a handful of events: reading the columns of a whole event
costs less than a query per row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise, starmap
from typing import Any

import numpy as np
import numpy.typing as npt

from trinity_buffer.errors import CodecError
from trinity_buffer.events import ExperiencesRecorded, WithSegment
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.handle import decoded
from trinity_buffer.store import log
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.rows import position_of, slot_of
from trinity_buffer.store.transaction import ReadSession

_OF_ROWS = ("reward", "prompt_length", "length", "trained_tokens", "run", "step", "policy_version")


@dataclass(frozen=True, slots=True)
class Facts:
    """The columns that events hold of experiences, one entry per row; a reward may be NaN."""

    rewards: npt.NDArray[np.float64]
    prompt_lengths: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    trained_tokens: npt.NDArray[np.int64]
    runs: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    policy_versions: Sequence[int | None]
    sampling: Sequence[Sequence[Sequence[Any]] | None]

    @classmethod
    def of(cls, *sources: tuple[Sequence[int], Mapping[int, WithSegment]]) -> Facts:
        """Return the columns of the experiences at these addresses, from the events of each."""
        columns: list[list[Any]] = [[] for _ in _OF_ROWS]
        sampling: list[Sequence[Sequence[Any]] | None] = []
        for event, first, last in chain.from_iterable(starmap(recorded_ranges, sources)):
            for column, name in zip(columns, _OF_ROWS, strict=True):
                column += getattr(event.columns, name)[first:last]
            spans, number = event.sampling, last - first
            sampling += map(spans.get, range(first, last)) if spans else [None] * number
        rewards, *numbers, versions = columns
        integers = (np.array(column, np.int64) for column in numbers)
        every: Any = (np.array(rewards, np.float64), *integers, versions, sampling)
        return cls(*every)

    def __len__(self) -> int:
        return len(self.lengths)

    def reordered(self, order: Sequence[int]) -> Facts:
        """Return the columns with row ``order[i]`` as row ``i``."""
        columns: Any = (
            of[order] if isinstance(of, np.ndarray) else [of[row] for row in order]
            for of in (getattr(self, column.name) for column in fields(self))
        )
        return Facts(*columns)


def contiguous_ranges(numbers: npt.NDArray[Any] | Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of the ranges in which each number is one more than the last."""
    if not len(numbers):
        return []
    breaks = np.flatnonzero(np.diff(np.asarray(numbers)) != 1) + 1
    return list(pairwise([0, *breaks.tolist(), len(numbers)]))


def recorded_ranges(
    experiences: Sequence[int], events: Mapping[int, WithSegment]
) -> Iterator[tuple[ExperiencesRecorded, int, int]]:
    """Yield the event of each range of these addresses, its first slot, and where it ends."""
    for a, z in contiguous_ranges(experiences):
        first, event = slot_of(experiences[a]), events[position_of(experiences[a])]
        assert isinstance(event, ExperiencesRecorded)  # no other kind has experiences
        yield event, first, first + z - a


class EventCache:
    """Reads events by position, each once while it is in use.

    Args:
        experiment: key of the experiment.
        name: its name, for errors.
    """

    def __init__(self, experiment: int, name: str) -> None:
        self.experiment = experiment
        self.name = name
        self._known: OrderedDict[int, WithSegment] = OrderedDict()
        self._num_rows = 0

    def events(self, s: ReadSession, positions: Collection[int]) -> Mapping[int, WithSegment]:
        """Return position -> event.

        Ask for everything that is used together in one call: it may evict all other events.

        Raises:
            CodecError: no event, an unreadable one, or one without rows.
        """
        unknown = sorted(position for position in positions if position not in self._known)
        if unknown:
            stored = s.read(log.read_at, self.experiment, unknown)
            if len(stored) < len(unknown):
                gone = sorted(set(unknown) - {event.position for event in stored})
                raise CodecError(
                    f"experiment {self.name!r}: the log has no event at position {gone[0]}: "
                    "run `verify`"
                )
            self._add(s.compute(self._decoded, stored))
        events = {}
        for position in positions:
            events[position] = self._known[position]
            self._known.move_to_end(position)
        self._shrink(len(positions))
        return events

    def held(self, positions: Collection[int]) -> dict[int, WithSegment]:
        """Return the cached events among ``positions``."""
        return {at: self._known[at] for at in positions if at in self._known}

    def keep(self, events: Mapping[int, WithSegment]) -> None:
        """Add events that were read elsewhere to the cache."""
        self._add({at: event for at, event in events.items() if at not in self._known})
        self._shrink(0)

    def _decoded(self, events: Iterable[StoredEvent]) -> dict[int, WithSegment]:
        facts = {}
        for stored in events:
            fact = decoded(self.name, stored).fact
            if not isinstance(fact, WithSegment):
                place = f"experiment {self.name!r}, the event at position {stored.position}"
                raise CodecError(f"{place}: it is a {stored.kind}, which has no rows: run `verify`")
            facts[stored.position] = fact
        return facts

    def _add(self, events: Mapping[int, WithSegment]) -> None:
        self._known.update(events)
        self._num_rows += sum(event.rows for event in events.values())

    def _shrink(self, least: int) -> None:
        while self._num_rows > sizes().rows_kept and len(self._known) > least:
            self._num_rows -= self._known.popitem(last=False)[1].rows
