"""Reads the log behind a strategy's cursor and folds it into units to decide."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import assert_never

from trinity_buffer.errors import CodecError, CodecVersionError
from trinity_buffer.events import (
    BatchPlanned,
    BatchSealed,
    ExperiencesRecorded,
    RewardsAssigned,
    kinds_of,
)
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.annotate.grouping import (
    Grouping,
    GroupingRules,
    GroupKey,
    ReadyUnit,
    RowRange,
    Unit,
    among,
    range_of_row,
    ranges_of_event,
)
from trinity_buffer.pipeline.coordination.waiting import one_line
from trinity_buffer.pipeline.handle import ExperimentHandle, decoded, now_us
from trinity_buffer.pipeline.load.events import EventCache
from trinity_buffer.store import log, segments, writer_queries
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.rows import (
    BatchRow,
    ConsumerRow,
    ExperienceRow,
    first_address,
    position_of,
    rows_recorded_by,
)
from trinity_buffer.store.transaction import ReadSession, Transaction

_logger = logging.getLogger(__name__)

Reads = ExperiencesRecorded | BatchPlanned | BatchSealed


class UnitReader:
    """Reads the log after the last commit of a strategy, and returns units that are ready.

    Attributes:
        seen: position up to which the log was read; goes into the strategy's next commit.
        cursor: position of the cursor after the last commit that this process knows of.
        behind: whether the last page was full, so that more can be read at once.
        unscored: position of the first experiences that the scoring in use does not cover yet, or
            None. The reader stops before it.
    """

    def __init__(
        self,
        experiment: ExperimentHandle,
        name: str,
        unit: Unit,
        rules: GroupingRules,
        cache: EventCache,
        rewards: str | None = None,
    ) -> None:
        self._cache = cache
        self._scoring = None if rewards is None else _Scoring(experiment, rewards)
        self._experiment = experiment
        self._name = name
        self._unit: Unit = unit
        self._rules = rules
        self._grouping = Grouping(unit, rules)
        self.seen = 0
        self.cursor = 0
        self.behind = False
        self.unscored: int | None = None
        self._read_at: int | None = None  # time of the last event read, while more follow

    @property
    def num_waiting(self) -> tuple[int, int]:
        """Number of undecided experiences that were read, and of their groups."""
        return self._grouping.num_waiting, self._grouping.num_waiting_groups

    @property
    def becomes_idle(self) -> bool:
        """Whether some open group closes once no more rows come for it."""
        return self._grouping.becomes_idle

    def seconds_to_deadline(self) -> float | None:
        """Return the seconds until the next group must be closed, or None."""
        deadline = self._grouping.next_deadline_us()
        return None if deadline is None else max(0.0, (deadline - now_us()) / 1e6)

    def take_ready(self) -> list[ReadyUnit]:
        """Return, once, every unit that is ready.

        While more pages follow, the clock stands at the last event read: the next page may hold
        rows that came before a group's deadline.
        """
        return self._grouping.take_ready(now_us() if self._read_at is None else self._read_at)

    def take_late(self) -> list[int]:
        """Return, once, the rows that came for groups decided before."""
        return self._grouping.take_late()

    async def load(self, row: ConsumerRow) -> None:
        """Continue after the last commit, whose state ``row`` holds."""
        self._grouping = Grouping(self._unit, self._rules)
        self.seen = self.cursor = row.cursor
        # Rows that waited at the last commit lie before the cursor and must be read again.
        after: int | None = -1
        while after is not None:
            after = await self._experiment.database.read_session(partial(self._load_page, after))
        self._grouping.mark_empty_groups(self._grouping.batches)

    async def is_left(self, row: ConsumerRow, up_to: int) -> bool:
        """Return whether rows up to the position ``up_to`` are ready and undecided.

        Args:
            row: the state of the last commit.
            up_to: a position.
        """
        await self.load(row)
        while self.seen < up_to and await self._experiment.database.read_session(self.read):
            pass
        end = first_address(up_to + 1)
        # A unit with rows beyond `up_to` was not complete at that position.
        units = [unit.addresses for unit in self.take_ready()]
        late = [[address] for address in self.take_late()]
        return any(all(address < end for address in addresses) for addresses in (*units, *late))

    def _load_page(self, after: int, s: ReadSession) -> int | None:
        """Feed a page of waiting rows to the grouping; return its last address, None at the end."""
        addresses, events = s.read(self._waiting_after, after)
        if not addresses:
            return None
        (_, ranges), wanted = self._recorded(s, events), set(addresses)
        parts = [(at, part) for at, each in ranges for part in among(each, wanted)]
        self._learn(s, self._grouping.unknown(part for _, part in parts), set())
        for at_us, part in parts:
            self._grouping.record(part, at_us)
        return addresses[-1]

    def _waiting_after(self, tx: Transaction, after: int) -> tuple[list[int], list[StoredEvent]]:
        """Return a page of waiting addresses, and the events that recorded them."""
        key, most = self._experiment.key, sizes().waiting_rows_per_page
        page = writer_queries.waiting_addresses(
            tx, key, self._name, after=after, up_to=self.seen, limit=most
        )
        return page, log.read_at(tx, key, sorted({position_of(address) for address in page}))

    def _recorded(
        self, s: ReadSession, page: Sequence[StoredEvent]
    ) -> tuple[list[Reads | None], list[tuple[int, RowRange]]]:
        """Return the facts of events, None if unreadable, and (time, range) of recorded rows."""
        facts, ranges = s.compute(_read_page, self._experiment.name, page)
        unreadable = [
            event.position for event, fact in zip(page, facts, strict=True) if fact is None
        ]
        # The projection still has the addresses of rows whose event is damaged.
        if unreadable:
            known = s.read(writer_queries.rows_of_events, self._experiment.key, unreadable)
            ranges |= {at: list(map(range_of_row, rows)) for at, rows in known.items()}
        recorded = [
            (event.recorded_at, each) for event in page for each in ranges.get(event.position, ())
        ]
        return facts, recorded

    def committed(self) -> None:
        """Note that a commit of this process covers everything read."""
        self.cursor = max(self.cursor, self.seen)

    def read(self, s: ReadSession) -> bool:
        """Feed the next events to the grouping; return whether there were any."""
        key = self._experiment.key
        limit = sizes().events_per_page

        def load(tx: Transaction) -> tuple[int, list[StoredEvent]]:
            # One transaction for head and page, so that no event between them is skipped.
            head = log.head(tx, key)
            if head == self.seen:
                return head, []
            page = log.read_after(
                tx, key, self.seen, limit=limit, kinds=kinds_of(Reads), up_to=head
            )
            if self._scoring is None:
                return head, page
            self.unscored = self._scoring.first_beyond(tx, page, head)
            if self.unscored is None:
                return head, page
            return self.unscored - 1, [event for event in page if event.position < self.unscored]

        head, page = s.read(load)
        self.behind = len(page) == limit
        self._read_at = page[-1].recorded_at if self.behind else None
        if head == self.seen:
            return False
        # A short page proves that no event of these kinds follows up to the head.
        seen = page[-1].position if len(page) == limit else head
        facts, ranges = self._recorded(s, page)
        news = [(event, fact) for event, fact in zip(page, facts, strict=True) if fact is not None]
        recorded = {
            stored.position: fact for stored, fact in news if isinstance(fact, ExperiencesRecorded)
        }
        # The rows of this page are likely decided next; the cache saves decoding them again.
        self._cache.keep(recorded)
        sealed = {str(fact.batch) for fact in facts if isinstance(fact, BatchSealed)}
        new = self._learn(s, self._grouping.unknown(each for _, each in ranges), sealed)
        self._grouping.mark_empty_groups(new)
        # Plans and past decisions first: whether a row is late depends on them.
        for at_us, each in ranges:
            self._grouping.record(each, at_us)
        for stored, fact in news:
            self._apply_to_batch(stored, fact)
        self.seen = seen
        return bool(page)

    def events(
        self, s: ReadSession, positions: Collection[int]
    ) -> Mapping[int, ExperiencesRecorded]:
        """Return position -> event, of events whose columns suffice to score a group.

        Events whose segment has left the database are left out; if one cannot be read, all are.
        """
        try:
            events = self._cache.events(s, positions)
        except CodecVersionError:
            raise
        except CodecError:
            return {}
        facts = {
            at: fact
            for at, fact in events.items()
            if isinstance(fact, ExperiencesRecorded) and fact.scorable
        }
        # Rewards are in the event, but rows without tensors have to be rejected one by one.
        gone = s.read(segments.archived_at, [fact.segment for fact in facts.values()])
        return {at: fact for at, fact in facts.items() if fact.segment not in gone}

    def rows(self, s: ReadSession, addresses: Collection[int]) -> dict[int, ExperienceRow]:
        """Return address -> row of the experience there."""
        held = self._cache.held({position_of(address) for address in addresses})
        recorded = {at: fact for at, fact in held.items() if isinstance(fact, ExperiencesRecorded)}
        rows = s.compute(_rows_of, recorded, set(addresses))
        lacking = sorted(address for address in addresses if address not in rows)
        for start in range(0, len(lacking), sizes().rows_per_page):
            asked = lacking[start : start + sizes().rows_per_page]
            page = s.read(writer_queries.experience_rows, self._experiment.key, asked)
            rows |= {row.address: row for row in page}
        return rows

    def _apply_to_batch(self, stored: StoredEvent, fact: Reads) -> None:
        match fact:
            case BatchPlanned():
                size, tasks = fact.rollouts_per_group, tuple(fact.tasks)
                row = BatchRow(fact.batch, stored.actor, size, stored.position, None, None, tasks)
                self._grouping.apply_plan(row, sealed=False)
            case BatchSealed():
                self._grouping.seal(str(fact.batch))
            case ExperiencesRecorded():
                pass  # its rows were recorded before
            case _:
                assert_never(fact)

    def _learn(self, s: ReadSession, groups: set[GroupKey], batches: set[str]) -> set[str]:
        """Look up groups and batches that the grouping does not have in memory.

        Returns:
            The batches that were new to it.
        """
        named = {batch for batch, _ in groups} | batches
        new = {batch for batch in named if not self._grouping.knows(batch)}
        names = sorted({batch for batch, _ in groups} | new)
        if not names:
            return new
        key = self._experiment.key

        def load(
            tx: Transaction,
        ) -> tuple[dict[str, BatchRow], set[GroupKey], set[tuple[GroupKey, int]]]:
            known = writer_queries.batches(tx, key, names)
            planned = {(name, str(task)) for name, batch in known.items() for task in batch.tasks}
            # Groups in memory were read beyond the cursor, so they are newer than the projection.
            asked = sorted(g for g in groups | planned if not self._grouping.knows_group(g))
            decided = writer_queries.decided_groups(tx, key, self._name, asked, cursor=self.cursor)
            return known, decided, writer_queries.refused_runs(tx, key, asked, cursor=self.seen)

        known, decided, refused = s.read(load)
        for batch in known.values():
            self._grouping.apply_plan(
                batch, sealed=batch.sealed_at is not None and batch.sealed_at <= self.seen
            )
        self._grouping.mark_decided(decided)
        for group, run in refused:
            self._grouping.mark_run(group, run)
        return new & set(self._grouping.batches)


class _Scoring:
    """Tracks up to which position a scoring has rewards.

    Args:
        experiment: the experiment whose log is read.
        name: name of the scoring.
    """

    def __init__(self, experiment: ExperimentHandle, name: str) -> None:
        self._experiment, self._name = experiment, name
        self._read = self._seen = 0

    def first_beyond(self, tx: Transaction, page: Sequence[StoredEvent], head: int) -> int | None:
        """Return the position of the first event of ``page`` with unscored rows, or None."""
        recorded = kinds_of(ExperiencesRecorded)
        places = [event.position for event in page if event.kind in recorded]
        if places and places[-1] > self._seen:
            self._read_on(tx, head)
        return next((place for place in places if place > self._seen), None)

    def _read_on(self, tx: Transaction, head: int) -> None:
        """Read the assignments up to ``head``."""
        kinds, limit = kinds_of(RewardsAssigned), sizes().tail_events
        while self._read < head:
            page = log.read_after(
                tx, self._experiment.key, self._read, limit=limit, kinds=kinds, up_to=head
            )
            for stored in page:
                fact = decoded(self._experiment.name, stored).fact
                assert isinstance(fact, RewardsAssigned)
                if fact.scoring == self._name:
                    self._seen = stored.position if fact.seen is None else fact.seen
            self._read = head if len(page) < limit else page[-1].position


def _read_page(
    experiment: str, page: Sequence[StoredEvent]
) -> tuple[list[Reads | None], dict[int, list[RowRange]]]:
    """Return the facts of a page of events, and position -> ranges of recorded rows."""
    facts = [_fact_of(experiment, event) for event in page]
    recorded = {
        event.position: ranges_of_event(event.position, fact)
        for event, fact in zip(page, facts, strict=True)
        if isinstance(fact, ExperiencesRecorded)
    }
    return facts, recorded


def _rows_of(
    events: Mapping[int, ExperiencesRecorded], wanted: Collection[int]
) -> dict[int, ExperienceRow]:
    rows = (row for at, fact in events.items() for row in rows_recorded_by(at, fact))
    return {row.address: row for row in rows if row.address in wanted}


def _fact_of(experiment: str, stored: StoredEvent) -> Reads | None:
    """Return the fact of an event; None if it recorded experiences and cannot be read.

    The rows of such an event are in the projection but cannot be decoded: the strategy rejects them
    one by one.

    Raises:
        CodecError: an unreadable event of another kind, or one of a newer version.
    """
    try:
        fact = decoded(experiment, stored).fact
    except CodecVersionError:
        raise
    except CodecError as error:
        if stored.kind not in kinds_of(ExperiencesRecorded):
            raise
        _logger.warning("its experiences are rejected as damaged: %s", one_line(f"{error}"))
        return None
    assert isinstance(fact, Reads)
    return fact
