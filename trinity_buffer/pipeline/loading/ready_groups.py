"""The groups that wait for a trainer, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np

from trinity_buffer.events import ExperiencesAnnotated
from trinity_buffer.pipeline.loading.blocks import stretches
from trinity_buffer.pipeline.loading.event_cache import EventCache, Facts, facts_of
from trinity_buffer.sizes import sizes
from trinity_buffer.store import trainer_queries
from trinity_buffer.store.rows import first_address, position_of
from trinity_buffer.store.trainer_queries import Reader
from trinity_buffer.store.transaction import ReadSession, Transaction


class ReadyGroup(NamedTuple):
    """Rows of one group that no step holds yet; one entry per row in each column.

    Attributes:
        key: what the rows of one group share: (source, position, number in the event); source 0 is
            the trainer's experiment, 1 the expert's.
        planned: whether the group was planned (copies and imports are not).
        annotations, experiences: log addresses.
        lengths: tokens.
        policy_versions: of the weights that generated it, None where unknown.
    """

    key: tuple[int, int, int]
    planned: bool
    annotations: Sequence[int]
    experiences: Sequence[int]
    lengths: Sequence[int]
    policy_versions: Sequence[int | None]

    @property
    def source(self) -> int:
        """Which experiment it is of."""
        return self.key[0]

    def only(self, kept: Sequence[bool]) -> ReadyGroup:
        """Return it with those of its rows that are ``kept``, one entry per row."""
        return ReadyGroup(
            self.key,
            self.planned,
            list(compress(self.annotations, kept)),
            list(compress(self.experiences, kept)),
            list(compress(self.lengths, kept)),
            list(compress(self.policy_versions, kept)),
        )


class ReadyGroups:
    """Hands out whole groups of one annotation set in the order of their annotation.

    Reads ahead: the trainer's lease makes it the only one that takes from this set under this name.

    Args:
        annotation_set: the set.
        reader: who reads.
        rows: what the log of the experiment says that is read.
        source: number of that experiment in the manifests.
    """

    def __init__(
        self,
        annotation_set: str,
        reader: Reader,
        rows: EventCache,
        source: int,
    ) -> None:
        self._set = annotation_set
        self._reader = reader
        self._rows = rows
        self._source = source
        self._groups: deque[ReadyGroup] = deque()
        self._start = 0
        self._at_end = False  # of the store, when it was read last
        self._asked = 0

    def start(self, tx: Transaction) -> None:
        """Find the place behind everything that was handed out before."""
        self._start = trainer_queries.first_undelivered(tx, self._reader)

    @property
    def is_through(self) -> bool:
        """Whether fewer are here than were asked for last, and the store had no more then."""
        return self._at_end and len(self._groups) < self._asked

    def fill(self, s: ReadSession, number: int) -> int:
        """Read until ``number`` groups are here, or all; return how many are here."""
        self._asked = number
        while len(self._groups) < number and self._read(s):
            pass
        return len(self._groups)

    def pop(self, number: int) -> list[ReadyGroup]:
        """Return the first ``number`` groups, or as many as are here."""
        return [self._groups.popleft() for _ in range(min(number, len(self._groups)))]

    def pop_unwanted(self, unwanted: Callable[[ReadyGroup], bool]) -> list[ReadyGroup]:
        """Return the ``unwanted`` ones among the groups that are here."""
        gone = [group for group in self._groups if unwanted(group)]
        if gone:
            self._groups = deque(group for group in self._groups if not unwanted(group))
        return gone

    def _read(self, s: ReadSession) -> bool:
        """Read the events that hold the next page of rows; return whether there were any."""
        positions, spent = s.read(self._page)
        self._at_end = not positions
        if not positions:
            return False
        events = self._rows.events(s, positions)
        annotated = [
            one for one in map(events.get, positions) if isinstance(one, ExperiencesAnnotated)
        ]
        experiences = [at for one in annotated for at in one.experiences]
        recorded = self._rows.events(
            s, {position_of(experiences[a]) for a, _ in stretches(experiences)}
        )
        facts = facts_of(experiences, recorded)
        num_before = 0
        for position, event in zip(positions, annotated, strict=True):
            self._groups.extend(self._groups_of(position, event, facts, num_before, spent))
            num_before += event.rows
        self._at_end = num_before < sizes().rows_per_page
        self._start = first_address(positions[-1] + 1)
        return True

    def _page(self, tx: Transaction) -> tuple[list[int], set[int]]:
        """Return the positions of the next events, and which of their rows are gone."""
        positions = trainer_queries.annotated_positions(
            tx,
            self._rows.experiment,
            annotation_set=self._set,
            start=self._start,
            limit=sizes().rows_per_page,
        )
        if not positions:
            return positions, set()
        spent = trainer_queries.spent_rows(
            tx,
            self._rows.experiment,
            trainer=self._reader,
            start=self._start,
            end=first_address(positions[-1] + 1),
        )
        return positions, spent

    def _groups_of(
        self,
        position: int,
        event: ExperiencesAnnotated,
        facts: Facts,
        num_before: int,
        spent: Collection[int],
    ) -> Iterator[ReadyGroup]:
        """Yield the groups of an event, without the rows that were handed out or rejected.

        Args:
            position: of the event.
            event: what it says.
            facts: of the experiences of the whole page.
            num_before: how many of those are of the events before it.
            spent: annotations that were handed out or rejected.
        """
        first = first_address(position)
        breaks = np.flatnonzero(np.diff(np.array(event.groups))) + 1
        for begin, end in pairwise([0, *breaks.tolist(), len(event.groups)]):
            number = event.groups[begin]
            told = slice(num_before + begin, num_before + end)
            group = ReadyGroup(
                (self._source, position, number),
                event.planned[number],
                range(first + begin, first + end),
                event.experiences[begin:end],
                facts.lengths[told],
                facts.policy_versions[told],
            )
            if first + begin < self._start or spent:
                group = self._unspent(group, spent)
            if group.annotations:
                yield group

    def _unspent(self, group: ReadyGroup, spent: Collection[int]) -> ReadyGroup:
        return group.only([at >= self._start and at not in spent for at in group.annotations])
