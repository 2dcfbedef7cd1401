"""Reads the log behind a strategy's cursor, and folds it into units that are ready to decide.

`Grouping` is a fold in memory that decides nothing durable: a consumer that restarts feeds it the
waiting rows and goes on. A group is ready when its planned runs are stored, when its batch is
sealed, or at its deadline; a slow group does not hold back the others.

`UnitReader` also seals planned batches whose deadline has passed. The groups of a batch are planned
at once, so they share one deadline. A group without rows has no row that a decision could name:
only the seal tells later processes, and the bounds of explorers, that it is closed.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter

from trinity_buffer import events
from trinity_buffer.algorithm.group_scores import Unit
from trinity_buffer.errors import CodecError, CodecVersionError
from trinity_buffer.events import now_us
from trinity_buffer.identity import Key
from trinity_buffer.limits import sizes
from trinity_buffer.options import GroupingRules
from trinity_buffer.pipeline.coordination.waiting import one_line
from trinity_buffer.pipeline.handle import ExperimentHandle, decoded, fact_at
from trinity_buffer.pipeline.load.reading import EventCache
from trinity_buffer.pipeline.write import planning
from trinity_buffer.store import counts, log, writer_queries
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.rows import BatchRow, ConsumerRow, first_address, position_of
from trinity_buffer.store.transaction import ReadSession, Transaction

_logger = logging.getLogger(__name__)

GroupKey = tuple[str, str]
"""(batch, task), both as text: ``7`` and ``"7"`` are one key."""


Row = tuple[int, Key, Key, int, bool]
"""Address, batch, task and run of an experience, and whether validation refused it: no strategy
will see it."""


@dataclass(slots=True, eq=False)
class Group:
    """The runs of one task in one batch, as far as they are stored.

    Attributes:
        members: addresses of its experiences, in the order in which they were read.
        runs: of which something is stored, refused or not.
        accepted: runs of which there are members.
        overdue_us, idle_us: when it is closed, so long after its first member was recorded, and, if
            its number of runs is unknown, after its last; infinite: never.
    """

    key: GroupKey
    planned: bool
    rollouts: int | None
    members: list[int] = field(default_factory=list)
    runs: set[int] = field(default_factory=set)
    accepted: set[int] = field(default_factory=set)
    overdue_us: float = math.inf
    idle_us: float = math.inf
    decided: bool = False

    def has_all(self, runs: set[int]) -> bool:
        """Return whether ``runs`` covers the group; unplanned runs do not count."""
        # Runs, not rows: the number of turns of a run is not planned, so they come in one write.
        if self.rollouts is None or len(runs) < self.rollouts:
            return False
        return not self.planned or runs.issuperset(range(self.rollouts))

    @property
    def short(self) -> bool:
        """Whether a strategy gets fewer runs than there should be: they are lacking, or refused."""
        # Without a planned number, nothing is lacking.
        return self.rollouts is not None and not self.has_all(self.accepted)


ReadyUnit = list[Group]
"""What one call of a strategy gets: whole groups."""


def num_members(unit: ReadyUnit) -> int:
    """Return how many experiences a unit has."""
    return sum(len(group.members) for group in unit)


@dataclass(slots=True)
class _Batch:
    planned: bool
    rollouts: int | None
    sealed: bool = False
    decided: bool = False
    groups: list[Group] = field(default_factory=list)


class Grouping:
    """Collects rows into groups and returns those that are ready.

    Before it feeds a page, the owner looks up groups that are not in memory (new ones, or decided
    long ago) in the database and reports them by `apply_plan` and `mark_decided`.

    Attributes:
        batches, groups: those that are in memory.
        timeout_us: span from the first experience of a group to its deadline; infinite: none.
    """

    def __init__(self, unit: Unit, rules: GroupingRules) -> None:
        self.unit = unit
        self.rules = rules
        unplanned = partial(_Batch, planned=False, rollouts=rules.rollouts_per_group)
        self.batches: defaultdict[str, _Batch] = defaultdict(unplanned)
        self.groups: dict[GroupKey, Group] = {}
        self._candidates: set[str] = set()
        self._late: list[int] = []
        timeout_s, idle_s = rules.group_timeout_s, rules.idle_s
        self.timeout_us = math.inf if timeout_s is None else int(timeout_s * 1e6)
        self._idle_us = math.inf if idle_s is None else int(idle_s * 1e6)

    @property
    def num_waiting(self) -> tuple[int, int]:
        """Number of experiences that were read and are undecided, and of their groups."""
        waiting = [group for group in self.groups.values() if group.members and not group.decided]
        return num_members(waiting), len(waiting)

    def group(self, key: GroupKey) -> Group:
        """Return the group of this key, which may be new."""
        if key not in self.groups:
            batch = self.batches[key[0]]
            # `apply_plan` marks the tasks that the plan names; any other task is unplanned. One
            # that appears in a batch decided as a whole is late.
            made = Group(key, planned=False, rollouts=batch.rollouts, decided=batch.decided)
            self.groups[key] = made
            batch.groups.append(made)
        return self.groups[key]

    def apply_plan(self, row: BatchRow, *, sealed: bool) -> None:
        """Apply a plan, or a seal without one, unless it is known already."""
        key, size = str(row.batch), row.rollouts_per_group
        # A plan can arrive twice: by a lookup in the database, and as the event itself.
        if key not in self.batches and size is not None:
            self.batches[key] = _Batch(planned=True, rollouts=size)
        batch = self.batches[key]
        # A seal beyond the cursor must not be undone by a plan that is read later.
        batch.sealed = batch.sealed or sealed
        for task in row.tasks:
            self.group((key, str(task))).planned = batch.planned
        self._candidates.add(key)

    def mark_decided(self, key: GroupKey) -> None:
        """Mark a group as decided: its rows are late from now on.

        If the unit is a batch, all its groups were decided at once.
        """
        self.group(key).decided = True
        if self.unit == "batch":
            batch = self.batches[key[0]]
            batch.decided = True
            for group in batch.groups:
                group.decided = True

    def mark_empty_groups(self, batch: str) -> None:
        """Mark ready groups of a batch that have no members as decided.

        Call it once everything up to the cursor is known: the commit that moved the cursor there
        counted such groups as left out.
        """
        ready = self._ready_of(self.batches[batch], 0)
        if self.unit == "group" or not any(group.members for group in ready):
            for group in ready:
                group.decided = not group.members

    def record(self, rows: Iterable[Row], at_us: int) -> None:
        """Add experiences that were recorded at ``at_us``."""
        for (batch, task, refused), part in groupby(rows, itemgetter(1, 2, 4)):
            addresses, _, _, runs, _ = zip(*part, strict=True)
            group = self.group((str(batch), str(task)))
            if group.decided:
                self._late.extend(() if refused else addresses)
                continue
            # Refused runs count as stored: explorers do not generate them again.
            group.runs.update(runs)
            if not refused:
                group.members.extend(addresses)
                group.accepted.update(runs)
                group.overdue_us = min(at_us + self.timeout_us, group.overdue_us)
                if group.rollouts is None:
                    idle_us = at_us + self._idle_us
                    group.idle_us = max(idle_us, group.idle_us if group.idle_us < math.inf else 0)
            self._candidates.add(group.key[0])

    def seal(self, batch: str) -> None:
        """Close a batch: its groups are ready as they are."""
        self.batches[batch].sealed = True
        self._candidates.add(batch)

    def take_late(self) -> list[int]:
        """Return, once, the rows that came for groups decided before."""
        late, self._late = self._late, []
        return late

    def next_ends_us(self) -> tuple[float, float]:
        """Return when the next open group is overdue, and when one is idle; infinite: never."""
        is_timed = min(self.timeout_us, self._idle_us) < math.inf
        undecided = [g for g in self.groups.values() if is_timed and not g.decided]
        overdue_us = min((group.overdue_us for group in undecided), default=math.inf)
        return overdue_us, min((group.idle_us for group in undecided), default=math.inf)

    def take_ready(self, now_us: int) -> list[ReadyUnit]:
        """Return, once, every ready unit, oldest batch first; forget finished batches."""
        if min(self.next_ends_us()) <= now_us:
            # A deadline can close groups of any batch, not only of those with new rows.
            self._candidates |= {g.key[0] for g in self.groups.values() if not g.decided}
        units: list[ReadyUnit] = []
        for key in [key for key in self.batches if key in self._candidates]:
            batch = self.batches[key]
            ready = self._ready_of(batch, now_us)
            for group in ready:
                group.decided = True
            units += [[group] for group in ready] if self.unit == "group" else [ready]
            if all(group.decided for group in batch.groups):
                # Decided batches are forgotten; their late rows are recognized through the
                # database.
                del self.batches[key]
                for group in batch.groups:
                    del self.groups[group.key]
        self._candidates.clear()
        return list(filter(None, units))

    def _ready_of(self, batch: _Batch, now_us: int) -> ReadyUnit:
        """Return the groups of a batch that are to be decided now."""
        undecided = [group for group in batch.groups if not group.decided]
        ready = [
            g
            for g in undecided
            if batch.sealed or min(g.overdue_us, g.idle_us) <= now_us or g.has_all(g.runs)
        ]
        if self.unit == "group":
            return ready
        overdue = any(group.overdue_us <= now_us for group in undecided)
        idle = any(group.idle_us <= now_us for group in undecided)
        # An unplanned batch that is unsealed may still get further groups.
        whole = len(ready) == len(undecided) and (batch.planned or batch.sealed or idle)
        return undecided if whole or overdue else []


_READ = events.kinds_of(events.ExperiencesRecorded | events.BatchPlanned | events.BatchSealed)
_RECORDED = events.kinds_of(events.ExperiencesRecorded)

SHORTEST_US = 10_000
"""Least time between two checks for overdue batches."""


@dataclass(slots=True)
class UnitReader:
    """Reads the log after the last commit of a strategy, and returns units that are ready.

    Attributes:
        experiment: whose log is read.
        name: of the annotation set.
        grouping: the groups that were read and not decided.
        cache: keeps decoded events.
        due_us: when a batch may be overdue; infinite: never.
        scoring: name of the scoring in use, if there is one.
        seen: position up to which the log was read; goes into the strategy's next commit.
        cursor: position of the cursor after the last commit that this process knows of.
        behind: whether the last page was full, so that more can be read at once.
        unscored: position of the first experiences that the scoring in use does not cover yet, or
            None. The reader stops before it.
        scored, scorings_read: positions up to which the scoring covers experiences, as far as the
            log was read for it.
        clock_us: when the log was read. While more pages follow, the time of the last event read:
            the next page may hold rows that came before a group's deadline.
    """

    experiment: ExperimentHandle
    name: str
    grouping: Grouping
    cache: EventCache
    due_us: float
    scoring: str | None = None
    seen: int = 0
    cursor: int = 0
    behind: bool = False
    unscored: int | None = None
    scored: int = 0
    scorings_read: int = 0
    clock_us: int = 0

    async def seal_overdue(self) -> None:
        """Seal the batches that are overdue now, if trainers read this set and no other one.

        The configured trainer counts alone, once it has registered. Before a trainer has, one can
        come for any set. Other sets close overdue groups only for themselves (`Grouping`).
        """
        key, timeout_us = self.experiment.key, self.grouping.timeout_us

        def load(tx: Transaction) -> list[str]:
            now = now_us()
            # A batch planned from now on is due later, so this bound holds until then.
            self.due_us = now + max(timeout_us, SHORTEST_US)
            stored = writer_queries.config_of(tx, key)
            config = {} if stored is None else stored[0]
            consumers = writer_queries.consumers(tx, key)
            trainers = {at: row for at, row in consumers.items() if row.kind == "trainer"}
            reader = trainers.get(config.get("trainer") or "trainer")
            readers = trainers.values() if reader is None else [reader]
            sets = {row.config.get("strategy") for row in readers} or consumers.keys()
            # A seal stops the explorers of the batch: later rows are late in every set.
            if sets != {self.name}:
                return []
            planned = counts.open_batches(tx, key)
            since = log.recorded_at(tx, key, [batch.planned_at for batch in planned])
            due = {batch.key: since[batch.planned_at] + timeout_us for batch in planned}
            self.due_us = min([self.due_us, *(at for at in due.values() if at > now)])
            return [batch for batch, at in due.items() if at <= now]

        database, full_page = self.experiment.database, now_us() >= self.due_us
        while full_page:
            overdue = await database.read(load)
            # Sealing removes batches from the page, so reading it again yields the next ones.
            full_page = len(overdue) == counts.BATCHES_LOOKED_AT
            for batch in overdue:
                sealed = await database.write(planning.seal, key, batch, actor=self.name)
                if sealed is not None:
                    _logger.warning(
                        "strategy %r has sealed batch %r with %d experiences: group_timeout_s=%g "
                        "has passed since its plan",
                        *(self.name, batch, sealed, timeout_us / 1e6),
                    )

    def load(self, s: ReadSession) -> ConsumerRow:
        """Continue after the last commit; return the state that it left."""
        key, most = self.experiment.key, sizes.waiting_rows_per_page
        of, waiting = (key, self.name), writer_queries.waiting_addresses
        row = s.read(writer_queries.consumer_row, *of)
        assert row is not None  # registered before
        self.grouping = Grouping(self.grouping.unit, self.grouping.rules)
        self.seen = self.cursor = row.cursor
        self.clock_us = now_us()
        # Rows that waited at the last commit lie before the cursor and must be read again.
        addresses = [-1]
        while addresses:
            addresses = s.read(waiting, *of, after=addresses[-1], up_to=self.seen, limit=most)
            if addresses:
                page = s.read(log.read_at, key, sorted(set(map(position_of, addresses))))
                self._take(s, page, set(addresses))
        for batch in self.grouping.batches:
            self.grouping.mark_empty_groups(batch)
        return row

    async def is_left(self, up_to: int) -> bool:
        """Return whether rows up to the position ``up_to`` are ready, and were not committed."""
        database = self.experiment.database
        await database.read_session(self.load)
        while self.seen < up_to and await database.read_session(self.read):
            pass
        end = first_address(up_to + 1)
        # A unit with rows beyond `up_to` was not complete at that position.
        units = self.grouping.take_ready(self.clock_us)
        # Of an unplanned group whose rows were all refused, nothing will be recorded.
        units = [unit for unit in units if any(g.members or g.planned for g in unit)]
        members = [[a for group in unit for a in group.members] for unit in units]
        return min(self.grouping.take_late(), default=end) < end or any(
            max(addresses, default=-1) < end for addresses in members
        )

    def read(self, s: ReadSession) -> bool:
        """Feed the next events to the grouping; return whether there were any."""
        key, limit = self.experiment.key, sizes.events_per_page
        # The head first: what lies up to there can be read later, and nothing comes in between.
        head, page = s.read(log.head, key), list[StoredEvent]()
        if head > self.seen:
            page = s.read(log.read_after, key, self.seen, limit=limit, kinds=_READ, up_to=head)
            self.unscored = None if self.scoring is None else self._unscored_in(s, page, head)
            if self.unscored is not None:
                head = self.unscored - 1
                page = [event for event in page if event.position <= head]
        self.behind = len(page) == limit
        self.clock_us = page[-1].recorded_at if self.behind else now_us()
        if head == self.seen:
            return False
        self._take(s, page, None)
        # A short page proves that no event of these kinds follows up to the head.
        self.seen = page[-1].position if self.behind else head
        return bool(page)

    def _unscored_in(self, s: ReadSession, page: Sequence[StoredEvent], head: int) -> int | None:
        """Return the position of the first event of ``page`` with unscored rows, or None."""
        places = [event.position for event in page if event.kind in _RECORDED]
        kinds, limit = events.kinds_of(events.RewardsAssigned), sizes.tail_events
        while places and places[-1] > self.scored and self.scorings_read < head:
            since = self.experiment.key, self.scorings_read
            assigned = s.read(log.read_after, *since, limit=limit, kinds=kinds, up_to=head)
            for stored in assigned:
                fact = fact_at(self.experiment.name, stored, events.RewardsAssigned)
                if fact.scoring == self.scoring:
                    seen = stored.position if fact.seen is None else fact.seen
                    # Of two at once, the one that read earlier may record later.
                    self.scored = max(self.scored, seen)
            self.scorings_read = head if len(assigned) < limit else assigned[-1].position
        return next((place for place in places if place > self.scored), None)

    def _take(self, s: ReadSession, page: Sequence[StoredEvent], waiting: set[int] | None) -> None:
        """Feed events to the grouping.

        Args:
            s: of the database.
            page: events of the kinds `_READ`.
            waiting: the rows that count of events before the cursor; None: all, they lie behind it.
        """
        grouping, key, cursor = self.grouping, self.experiment.key, self.cursor
        facts, rows = self._decoded(s, page)
        if waiting is not None:
            rows = {at: [r for r in of_event if r[0] in waiting] for at, of_event in rows.items()}
        keys = {row[1:3] for of_event in rows.values() for row in of_event}
        groups = {(str(batch), str(task)) for batch, task in keys} - grouping.groups.keys()
        sealed = {str(f.batch) for f in facts.values() if isinstance(f, events.BatchSealed)}
        new = ({batch for batch, _ in groups} | sealed) - grouping.batches.keys()
        # Plans and past decisions first: whether a row is late depends on them.
        if groups or new:
            names = sorted({batch for batch, _ in groups} | new)
            known = s.read(writer_queries.batches, key, names)
            groups |= {(name, str(task)) for name, batch in known.items() for task in batch.tasks}
            # Groups in memory were read beyond the cursor, so they are newer than the projection.
            groups -= grouping.groups.keys()
            named = (key, self.name, sorted(groups))
            decided, refused = s.read(writer_queries.settled, *named, cursor=cursor, seen=self.seen)
            for batch in known.values():
                is_sealed = batch.sealed_at is not None and batch.sealed_at <= self.seen
                grouping.apply_plan(batch, sealed=is_sealed)
            for group in decided:
                grouping.mark_decided(group)
            # Refused runs are stored although their rows do not wait.
            for group, run in refused:
                grouping.group(group).runs.add(run)
            # Of a batch that is met before the cursor, `load` does so when all of it is known.
            for name in new & grouping.batches.keys() if waiting is None else ():
                grouping.mark_empty_groups(name)
        for event in page:
            fact = facts.get(event.position)
            if isinstance(fact, events.BatchPlanned):
                size, tasks = fact.rollouts_per_group, tuple(fact.tasks)
                plan = BatchRow(fact.batch, event.actor, size, event.position, None, None, tasks)
                grouping.apply_plan(plan, sealed=False)
            elif isinstance(fact, events.BatchSealed):
                grouping.seal(str(fact.batch))
            else:
                grouping.record(rows[event.position], event.recorded_at)

    def _decoded(
        self, s: ReadSession, page: Sequence[StoredEvent]
    ) -> tuple[dict[int, events.Fact], dict[int, list[Row]]]:
        """Return position -> what an event says, without damaged ones, and -> what it recorded."""
        facts, rows = dict[int, events.Fact](), dict[int, list[Row]]()
        for event in page:
            at = event.position
            try:
                facts[at] = fact = decoded(self.experiment.name, event).fact
            except CodecVersionError:
                raise
            except CodecError as error:
                if event.kind not in _RECORDED:
                    raise
                _logger.warning("its experiences are rejected as damaged: %s", one_line(f"{error}"))
                # Its rows are in the projection: the strategy rejects them one by one.
                rows[at] = [
                    (r.address, r.eid.batch, r.eid.task, r.eid.run, bool(r.refused))
                    for r in s.read(writer_queries.rows_of_event, self.experiment.key, at)
                ]
                continue
            if isinstance(fact, events.ExperiencesRecorded):
                columns, first = fact.columns, first_address(at)
                addresses = range(first, first + fact.rows)
                refused = [slot in fact.refused for slot in range(fact.rows)]
                named = (columns.batch, columns.task, columns.run)
                rows[at] = [*zip(addresses, *named, refused, strict=True)]
        # The rows of this page are likely decided next; the cache saves decoding them again.
        recorded = {at: f for at, f in facts.items() if isinstance(f, events.ExperiencesRecorded)}
        self.cache.keep(recorded)
        return facts, rows
