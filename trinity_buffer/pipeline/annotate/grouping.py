"""When a group or a batch is complete, and in which order a strategy sees it.

`Grouping` is a fold over the log in memory that decides nothing durable: a consumer that restarts
feeds it the waiting rows and goes on. A group is ready when its planned runs are stored, when its
batch is sealed, or at its deadline; a slow group does not hold back the others.

`Deadlines` seals planned batches whose deadline has passed. The groups of a batch are planned at
once, so they share one deadline. A group without rows has no row that a decision could name: only
the seal tells later processes, and the bounds of explorers, that it is closed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.identity import order_of
from trinity_buffer.pipeline.coordination.waiting import one_line
from trinity_buffer.pipeline.handle import ExperimentHandle, now_us
from trinity_buffer.pipeline.write.planning import seal_as_it_is
from trinity_buffer.store import counts, log, writer_queries
from trinity_buffer.store.rows import BatchRow, ExperienceRow, first_address
from trinity_buffer.store.transaction import Transaction

Unit = Literal["group", "batch"]
GroupKey = tuple[str, str]
"""(batch, task), both as text: ``7`` and ``"7"`` are one key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingRules:
    """How experiences become groups.

    Attributes:
        rollouts_per_group: runs per group of unplanned batches; plans state their own number. None:
            such a group waits for a seal, its deadline or ``idle_s``.
        deadline_s: seconds after which a group is closed as it is. They count from the plan of its
            batch, which is then sealed; without a plan, or in a set that no trainer reads, from the
            group's first experience. None: never.
        idle_s: seconds after its last experience at which a group of unknown size is closed; None:
            never.
        incomplete: how to treat a group that is closed before its planned runs are stored, or that
            lost a run to validation: ``"keep"`` passes the stored rows to the strategy,
            ``"reject"`` records all of them as rejected (``incomplete_group``).
    """

    rollouts_per_group: int | None = None
    deadline_s: float | None = None
    idle_s: float | None = None
    incomplete: Literal["keep", "reject"] = "keep"

    def __post_init__(self) -> None:
        if self.incomplete not in ("keep", "reject"):
            raise InvalidArgumentError(
                f"incomplete={self.incomplete!r}: accepted are 'keep' and 'reject'"
            )
        runs: object = self.rollouts_per_group
        if runs is not None and not (type(runs) is int and runs >= 1):
            raise InvalidArgumentError(f"rollouts_per_group={runs!r}: it must be an int from 1 on")
        waits: dict[str, object] = {"deadline_s": self.deadline_s, "idle_s": self.idle_s}
        for name, wait in waits.items():
            if wait is not None and not (isinstance(wait, (int, float)) and wait > 0):
                raise InvalidArgumentError(
                    f"{name}={wait!r}: it must be a positive number of seconds, or None"
                )

    @classmethod
    def of(cls, config: Mapping[str, Any], **overrides: Any) -> GroupingRules:
        """Return the rules in the ``config`` of an experiment, replaced by ``overrides``.

        Raises:
            TypeError: ``overrides`` names an unknown rule.
            InvalidArgumentError: an impossible rule.
        """
        configured = {name: config[name] for name in cls.__slots__ if name in config}
        return cls(**{**configured, **overrides})


class RowRange(NamedTuple):
    """Neighbouring experiences of one event that belong to one group.

    Attributes:
        key: key of the group.
        addresses: their addresses.
        runs: the run of each.
        refused: whether validation refused them: no strategy will see them.
    """

    key: GroupKey
    addresses: range
    runs: Sequence[int]
    refused: bool


def ranges_of_event(position: int, fact: ExperiencesRecorded) -> list[RowRange]:
    """Return the rows of an event as ranges of one group each."""
    columns, refused, start = fact.columns, fact.refused, first_address(position)
    left = [slot in refused for slot in range(len(columns))]
    keys = zip(columns.batch, columns.task, left, strict=True)
    ranges, slot = [], 0
    for (batch, task, is_refused), rows in groupby(keys):
        # Slots are positions in the event, so a range of slots is a range of addresses.
        end = slot + sum(1 for _ in rows)
        addresses = range(start + slot, start + end)
        ranges.append(
            RowRange((str(batch), str(task)), addresses, columns.run[slot:end], is_refused)
        )
        slot = end
    return ranges


def range_of_row(row: ExperienceRow) -> RowRange:
    """Return the range of a single row of the projection."""
    key = (str(row.eid.batch), str(row.eid.task))
    return RowRange(key, range(row.address, row.address + 1), (row.eid.run,), bool(row.refused))


def among(rows: RowRange, wanted: set[int]) -> Iterator[RowRange]:
    """Yield the parts of a range that are in ``wanted``, which mostly is all of it."""
    if wanted.issuperset(rows.addresses):
        yield rows
        return
    for address, run in zip(rows.addresses, rows.runs, strict=True):
        if address in wanted:
            yield RowRange(rows.key, range(address, address + 1), (run,), rows.refused)


@dataclass(slots=True)
class Group:
    """The runs of one task in one batch, as far as they are stored.

    Attributes:
        members: addresses of its experiences, in the order in which they were read.
        runs: of which something is stored, refused or not.
        accepted: runs of which there are members.
    """

    key: GroupKey
    planned: bool
    rollouts: int | None
    members: list[int] = field(default_factory=list)
    runs: set[int] = field(default_factory=set)
    accepted: set[int] = field(default_factory=set)
    first_seen_us: int | None = None
    last_seen_us: int = 0
    decided: bool = False

    @property
    def complete(self) -> bool:
        """Whether all its runs are stored (refused ones too: they will not come again)."""
        return self._has_all(self.runs)

    @property
    def short(self) -> bool:
        """Whether a strategy gets fewer runs than there should be: they are lacking, or refused."""
        return self.rollouts is not None and not self._has_all(self.accepted)

    def _has_all(self, runs: set[int]) -> bool:
        """Return whether ``runs`` covers the group; unplanned runs do not count."""
        if self.rollouts is None or len(runs) < self.rollouts:
            return False
        return not self.planned or runs.issuperset(range(self.rollouts))


@dataclass(frozen=True, slots=True, eq=False)
class ReadyUnit:
    """What one call of a strategy gets: whole groups.

    Attributes:
        incomplete: whether a group is short of runs: the deadline or the seal came before them, or
            they were refused.
    """

    groups: tuple[Group, ...]
    incomplete: bool

    @property
    def addresses(self) -> list[int]:
        """All members."""
        return [address for group in self.groups for address in group.members]


def sort_key(row: ExperienceRow) -> tuple[object, ...]:
    """Return the sort key of the rows that a strategy sees: batch, task, run, step, suffix."""
    eid = row.eid
    return (order_of(eid.batch), order_of(eid.task), eid.run, eid.step, eid.suffix)


@dataclass(slots=True)
class _Batch:
    planned: bool
    rollouts: int | None
    sealed: bool = False
    decided: bool = False
    groups: dict[str, Group] = field(default_factory=dict)


class Grouping:
    """Collects rows into groups and returns those that are ready.

    Before it feeds a page, the owner asks for `unknown` groups, looks them up in the database and
    reports them by `apply_plan` or `mark_decided`.
    """

    def __init__(self, unit: Unit, rules: GroupingRules) -> None:
        self.unit = unit
        self.rules = rules
        self._batches: dict[str, _Batch] = {}
        self._candidates: set[str] = set()
        self._late: list[int] = []

    @property
    def num_waiting(self) -> int:
        """Number of experiences that were read and are undecided."""
        return sum(
            len(g.members)
            for b in self._batches.values()
            for g in b.groups.values()
            if not g.decided
        )

    @property
    def num_waiting_groups(self) -> int:
        """Number of groups with undecided experiences."""
        return sum(
            1
            for b in self._batches.values()
            for g in b.groups.values()
            if g.members and not g.decided
        )

    def unknown(self, ranges: Iterable[RowRange]) -> set[GroupKey]:
        """Return the groups of ``ranges`` that are not in memory: new ones, or decided long ago."""
        return {key for key, *_ in ranges if not self.knows_group(key)}

    def knows_group(self, key: GroupKey) -> bool:
        """Return whether the group is in memory."""
        return key[0] in self._batches and key[1] in self._batches[key[0]].groups

    @property
    def batches(self) -> Iterable[str]:
        """The batches that are in memory."""
        return self._batches.keys()

    def knows(self, batch: str) -> bool:
        """Return whether the batch is in memory."""
        return batch in self._batches

    def apply_plan(self, row: BatchRow, *, sealed: bool) -> None:
        """Apply a plan, or a seal without one, unless it is known already."""
        key = str(row.batch)
        known = self._batches.get(key)
        # A plan can arrive twice: by a lookup in the database, and as the event itself.
        if known is None:
            planned = row.rollouts_per_group is not None
            rollouts = row.rollouts_per_group if planned else self.rules.rollouts_per_group
            known = self._batches[key] = _Batch(planned, rollouts)
        # A seal beyond the cursor must not be undone by a plan that is read later.
        known.sealed = known.sealed or sealed
        for task in row.tasks:
            self._group(key, str(task)).planned = known.planned
        self._candidates.add(key)

    def mark_decided(self, keys: Iterable[GroupKey]) -> None:
        """Mark groups as decided: their rows are late from now on.

        If the unit is a batch, all its groups were decided at once.
        """
        for batch, task in keys:
            self._group(batch, task).decided = True
            if self.unit == "batch":
                known = self._batches[batch]
                known.decided = True
                for group in known.groups.values():
                    group.decided = True

    def mark_run(self, key: GroupKey, run: int) -> None:
        """Mark a run as stored although its rows do not wait: validation refused them."""
        self._group(*key).runs.add(run)

    def mark_empty_groups(self, batches: Iterable[str]) -> None:
        """Mark ready groups without members in ``batches`` as decided.

        Call it once everything up to the cursor is known: the commit that moved the cursor there
        counted such groups as left out.
        """
        for key in batches:
            batch = self._batches[key]
            empty = [g for g in batch.groups.values() if not (g.decided or g.members)]
            ready = [group for group in empty if group.complete or batch.sealed]
            if self.unit == "batch" and len(ready) < sum(
                not group.decided for group in batch.groups.values()
            ):
                continue
            for group in ready:
                group.decided = True

    def record(self, rows: RowRange, at_us: int) -> None:
        """Add experiences that were recorded at ``at_us``."""
        batch, task = rows.key
        group = self._group(batch, task)
        if group.decided:
            if not rows.refused:
                self._late.extend(rows.addresses)
            return
        # Refused runs count as stored: explorers do not generate them again.
        group.runs.update(rows.runs)
        if not rows.refused:
            group.members.extend(rows.addresses)
            group.accepted.update(rows.runs)
            group.first_seen_us = (
                at_us if group.first_seen_us is None else min(at_us, group.first_seen_us)
            )
            group.last_seen_us = max(at_us, group.last_seen_us)
        self._candidates.add(batch)

    def seal(self, batch: str) -> None:
        """Close a batch: its groups are ready as they are."""
        known = self._batches.setdefault(
            batch, _Batch(planned=False, rollouts=self.rules.rollouts_per_group)
        )
        known.sealed = True
        self._candidates.add(batch)

    def _group(self, batch: str, task: str) -> Group:
        known = self._batches.setdefault(
            batch, _Batch(planned=False, rollouts=self.rules.rollouts_per_group)
        )
        if task not in known.groups:
            # `apply_plan` marks the tasks that the plan names; any other task is unplanned.
            made = Group((batch, task), planned=False, rollouts=known.rollouts)
            # A task that appears in a batch decided as a whole is late.
            made.decided = known.decided
            known.groups[task] = made
        return known.groups[task]

    def take_late(self) -> list[int]:
        """Return, once, the rows that came for groups decided before."""
        late, self._late = self._late, []
        return late

    def next_deadline_us(self) -> int | None:
        """Return the deadline of the next open group, or None."""
        if self.rules.deadline_s is None and self.rules.idle_s is None:
            return None
        ends = [(self._deadline_us(group), self._idle_us(group)) for _, group in self._open()]
        return min((end for both in ends for end in both if end is not None), default=None)

    @property
    def becomes_idle(self) -> bool:
        """Whether some open group closes once no more rows come for it."""
        return any(self._idle_us(group) is not None for _, group in self._open())

    def _deadline_us(self, group: Group) -> int | None:
        if self.rules.deadline_s is None or group.first_seen_us is None:
            return None
        return group.first_seen_us + int(self.rules.deadline_s * 1e6)

    def _idle_us(self, group: Group) -> int | None:
        if self.rules.idle_s is None or group.rollouts is not None or not group.members:
            return None
        return group.last_seen_us + int(self.rules.idle_s * 1e6)

    def _open(self) -> Iterator[tuple[str, Group]]:
        for key, batch in self._batches.items():
            for group in batch.groups.values():
                if not group.decided:
                    yield key, group

    def take_ready(self, now_us: int) -> list[ReadyUnit]:
        """Return, once, every ready unit, oldest batch first; forget finished batches."""
        due = self.next_deadline_us()
        if due is not None and due <= now_us:
            # A deadline can close groups of any batch, not only of those with new rows.
            self._candidates.update(key for key, _ in self._open())
        units: list[ReadyUnit] = []
        for key in [key for key in self._batches if key in self._candidates]:
            batch = self._batches[key]
            units += self._ready_of(batch, now_us)
            if all(group.decided for group in batch.groups.values()):
                # Decided batches are forgotten; their late rows are recognized through the
                # database.
                del self._batches[key]
        self._candidates.clear()
        return units

    def _ready_of(self, batch: _Batch, now_us: int) -> list[ReadyUnit]:
        def is_overdue(group: Group) -> bool:
            return _is_past(self._deadline_us(group), now_us)

        def is_idle(group: Group) -> bool:
            return _is_past(self._idle_us(group), now_us)

        undecided = [group for group in batch.groups.values() if not group.decided]
        ready = [
            group
            for group in undecided
            if group.complete or batch.sealed or is_overdue(group) or is_idle(group)
        ]
        if self.unit == "batch":
            is_closed = batch.planned or batch.sealed or any(map(is_idle, undecided))
            whole = len(ready) == len(undecided) and is_closed
            # An unplanned batch that is unsealed may still get further groups.
            ready = undecided if whole or any(map(is_overdue, undecided)) else []
        for group in ready:
            group.decided = True
        chunks = [ready] if self.unit == "batch" else [[group] for group in ready]
        return [
            ReadyUnit(tuple(chunk), any(group.short for group in chunk))
            for chunk in chunks
            if chunk
        ]


def _is_past(end_us: int | None, now_us: int) -> bool:
    return end_us is not None and end_us <= now_us


def has_rows(unit: ReadyUnit) -> bool:
    """Return whether any experience of a unit is stored."""
    return any(group.members for group in unit.groups)


def chunks(units: Sequence[ReadyUnit], most: int) -> list[list[ReadyUnit]]:
    """Split ``units``, in order, into lists of at most ``most`` experiences or a single unit."""
    lists: list[list[ReadyUnit]] = []
    room = 0
    for unit in units:
        size = sum(len(group.members) for group in unit.groups)
        if not lists or size > room:
            lists.append([])
            room = most
        lists[-1].append(unit)
        room -= size
    return lists


SHORTEST_US = 10_000
"""Least time between two checks for overdue batches."""

_logger = logging.getLogger(__name__)


class Deadlines:
    """Seals overdue batches of an experiment on behalf of the set that its trainer reads.

    Other sets close overdue groups only for themselves (`Grouping`).

    Args:
        experiment: the experiment.
        name: name of the annotation set.
        deadline_s: seconds after its plan at which a batch is sealed; None: never.
    """

    def __init__(self, experiment: ExperimentHandle, name: str, deadline_s: float | None) -> None:
        self._experiment = experiment
        self._name = name
        self._after_us = math.inf if deadline_s is None else deadline_s * 1e6
        self._due_us = 0.0 if deadline_s is not None else math.inf

    def seconds_left(self) -> float | None:
        """Return the seconds until a batch may be overdue, or None."""
        return None if math.isinf(self._due_us) else max(0.0, (self._due_us - now_us()) / 1e6)

    async def keep(self) -> None:
        """Seal the batches that are overdue now."""
        if now_us() < self._due_us:
            return
        full_page = True
        while full_page:
            overdue = await self._experiment.database.read(self._overdue)
            # Sealing removes batches from the page, so reading it again yields the next ones.
            full_page = len(overdue) == counts.BATCHES_LOOKED_AT
            for batch in overdue:
                await self._seal(batch)

    async def _seal(self, batch: str) -> None:
        key, database = self._experiment.key, self._experiment.database
        sealed = await database.write(seal_as_it_is, key, batch, actor=self._name)
        if sealed is not None:
            _logger.warning(
                "%s",
                one_line(
                    f"strategy {self._name!r} has sealed batch {batch!r} with {sealed} experiences:"
                    f" deadline_s={self._after_us / 1e6:g} has passed since its plan"
                ),
            )

    def _overdue(self, tx: Transaction) -> list[str]:
        """Return overdue batches, and note when to check again."""
        key, now = self._experiment.key, now_us()
        # A batch planned from now on is due later, so this bound holds until then.
        self._due_us = now + max(self._after_us, SHORTEST_US)
        stored = writer_queries.config_of(tx, key)
        config = {} if stored is None else stored[0]
        reader = writer_queries.consumer_row(tx, key, config.get("trainer", "trainer"))
        # Only the set that the trainer reads may seal: a seal stops the explorers of the batch.
        if reader is not None and reader.config.get("strategy") != self._name:
            return []
        planned = counts.open_batches(tx, key)
        places = [batch.planned_at for batch in planned]
        since = log.recorded_at(tx, key, places)
        due = {batch.key: since[batch.planned_at] + self._after_us for batch in planned}
        overdue = [batch for batch, at in due.items() if at <= now]
        self._due_us = min([self._due_us, *(at for at in due.values() if at > now)])
        return overdue
