"""What the log says of experiences and annotations, by their addresses, as columns.

A step is made of hundreds of rows and a handful of events: an event is decoded once, and gives the
columns of all of its rows, for less than a query by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from trinity_buffer.events import ExperiencesRecorded, WithSegment
from trinity_buffer.pipeline.streaming.blocks import runs
from trinity_buffer.store.address import position_of, slot_of


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


def facts_of(experiences: Sequence[int], events: Mapping[int, WithSegment]) -> Facts:
    """Return what ``events`` know of the experiences at these addresses, in their order."""
    found = no_facts()
    for a, z in runs(experiences):
        first, event = slot_of(experiences[a]), events[position_of(experiences[a])]
        assert isinstance(event, ExperiencesRecorded)  # where the experiences are of
        chosen, columns = slice(first, first + z - a), event.columns
        found.rewards.extend(columns.reward[chosen])
        found.policy_versions.extend(columns.policy_version[chosen])
        found.prompt_lengths.extend(columns.prompt_length[chosen])
        found.lengths.extend(columns.length[chosen])
        found.trained_tokens.extend(columns.trained_tokens[chosen])
    return found
