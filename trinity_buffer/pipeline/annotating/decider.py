"""What a strategy says of units that are ready: of their experiences, or of their rewards alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread

from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.algorithm.group_scores import RewardScorer
from trinity_buffer.errors import ArchivedSegmentError
from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.annotating.answers import metrics_of, noting
from trinity_buffer.pipeline.annotating.decision import Decision, Verdicts
from trinity_buffer.pipeline.annotating.grouping import (
    Group,
    GroupingRules,
    ReadyUnit,
    Unit,
    chunks,
    has_rows,
    place_of,
)
from trinity_buffer.pipeline.annotating.reward_table import table_of, verdicts_of
from trinity_buffer.pipeline.annotating.unit_reader import UnitReader
from trinity_buffer.pipeline.experiment_handle import ExperimentHandle
from trinity_buffer.pipeline.loading.event_cache import EventCache
from trinity_buffer.pipeline.loading.experiences import load_experiences, unreadable_among
from trinity_buffer.sizes import sizes
from trinity_buffer.store import reads
from trinity_buffer.store.rows import SLOT_BITS, ExperienceRow, position_of, rows_recorded_by
from trinity_buffer.store.transaction import ReadSession
from trinity_buffer.writer import StagedWriter

Events = Mapping[int, ExperiencesRecorded]
"""Position -> what was recorded there."""


@dataclass(frozen=True, slots=True)
class StrategySetup:
    """A strategy, and how it is run.

    Attributes:
        name: of its annotation set.
        strategy: writes to ``staged``.
        arguments: of its constructor.
        rules: how experiences become groups.
        rewards: name of a scoring whose rewards take the place of the recorded ones.
    """

    name: str
    strategy: AddStrategy
    staged: StagedWriter
    arguments: Mapping[str, Any]
    rules: GroupingRules
    rewards: str | None

    @property
    def unit(self) -> Unit:
        """What one call of the strategy must see whole."""
        return self.strategy.unit_for(**self.arguments)

    @property
    def families(self) -> tuple[str, ...]:
        """The column families that it reads."""
        asked = self.strategy.families_for(**self.arguments)
        return ("light", *(family for family in asked if family != "light"))

    @property
    def scorer(self) -> RewardScorer | None:
        """What decides a group by its rewards, if that is all the strategy looks at."""
        return self.strategy.from_rewards() if self.unit == "group" else None


class Decider:
    """Asks a strategy what becomes of units.

    Attributes:
        calls: how often the strategy was called, by any process of its name.
    """

    def __init__(
        self,
        experiment: ExperimentHandle,
        setup: StrategySetup,
        reader: UnitReader,
        cache: EventCache,
    ) -> None:
        self._experiment = experiment
        self._setup = setup
        self._reader = reader
        self._cache = cache
        self._families = setup.families
        self._scorer = setup.scorer
        self.calls = 0

    @property
    def loads(self) -> tuple[str, ...]:
        """The column families that it reads of experiences; none where rewards are enough."""
        return () if self._scorer is not None else self._families

    def split(
        self, s: ReadSession, units: Sequence[ReadyUnit]
    ) -> tuple[list[ReadyUnit], list[ReadyUnit], Events]:
        """Return the units whose experiences have to be loaded, the others, and their events."""
        whole = [unit for unit in units if has_rows(unit)]
        if self._scorer is None or not whole:
            return list(units), [], {}
        positions = [{address >> SLOT_BITS for address in unit.addresses} for unit in whole]
        events = self._reader.events(s, set().union(*positions))
        known = events.keys()
        scored = [unit for unit, at in zip(whole, positions, strict=True) if at <= known]
        chosen = set(map(id, scored))
        return [unit for unit in units if id(unit) not in chosen], scored, events

    def by_rewards(self, s: ReadSession, units: Sequence[ReadyUnit], events: Events) -> Decision:
        """Return what the strategy says of ``units`` by their rewards, from ``events``."""
        assert self._scorer is not None  # `split` has seen to that
        verdicts = self._no_verdicts()
        groups = [group for unit in units for group in self._whole_of(unit, verdicts)]
        assigned = self._assigned(s, [row for group in groups for row in group.members])
        self.calls += len(groups)
        name, score = self._setup.name, self._scorer
        seen, calls = self._reader.seen, self.calls

        def compute() -> Decision:
            table = table_of(groups, events, assigned)
            with noting(name, lambda: _first_of(groups, events)):
                found = verdicts_of(table, len(groups), score, self._setup.strategy.over)
            return verdicts.decision_by_rewards(groups, found, seen=seen, calls=calls)

        return s.compute(compute)

    async def by_experiences(self, units: Sequence[ReadyUnit], late: Sequence[int]) -> Decision:
        """Return what the strategy says of the experiences of ``units``; ``late`` is rejected."""
        setup, verdicts = self._setup, self._no_verdicts()
        verdicts.reject(late, "late")
        wanted = [row for unit in units for row in unit.addresses]
        database = self._experiment.database
        known = await database.read_session(lambda s: self._reader.rows(s, wanted))
        for some in chunks(units, self._experiences_per_load):
            given = [self._rows_of(unit, known, verdicts) for unit in some]
            readable = await self._load_readable([row for rows in given for row in rows], verdicts)
            loaded = {experience.address: experience for experience in readable}
            for rows in given:
                addresses = [row.address for row in rows if row.address in loaded]
                if not addresses:
                    continue
                # Whatever the strategy does with its list, and with the fields of who is in it.
                verdicts.given.update((a, loaded[a].__dict__.get("action_mask")) for a in addresses)
                with noting(setup.name, partial(_uid, loaded[addresses[0]])):
                    answer = await setup.strategy.add([loaded[a] for a in addresses], self.calls)
                    verdicts.metrics.append(metrics_of(answer))
                self.calls += 1
        kept = verdicts.taken_from(setup.staged)
        verdicts.require_fitting(kept, known)
        encode = partial(
            verdicts.decision,
            kept,
            seen=self._reader.seen,
            calls=self.calls,
            after=None if all(map(has_rows, units)) else self._reader.cursor,
        )
        return await anyio.to_thread.run_sync(encode)

    def _no_verdicts(self) -> Verdicts:
        return Verdicts(self._setup.name, self._experiment.database.segments)

    async def _load_readable(
        self, rows: Sequence[ExperienceRow], verdicts: Verdicts
    ) -> list[Experience]:
        """Return the experiences that can be read; others are ``deleted`` or ``damaged``."""
        if not rows:
            return []
        bad: dict[int | None, str] = {}
        try:
            found = await self._load_experiences(rows)
            bad = {e.address: "damaged" for e in found if e.damaged is not None}
            if not bad:
                return found
        except ArchivedSegmentError:
            wanted = {row.segment: () for row in rows}
            reasons = await self._experiment.database.read_session(
                lambda s: unreadable_among(s, wanted, self._families)
            )
            if not reasons:
                raise
            bad = {row.address: reasons[row.segment] for row in rows if row.segment in reasons}
        for reason in sorted(set(bad.values())):
            verdicts.reject([r.address for r in rows if bad.get(r.address) == reason], reason)
        gone = set(bad)
        if self._setup.rules.incomplete == "reject":
            broken = {row.eid.tid for row in rows if row.address in gone}
            short = [r.address for r in rows if r.eid.tid in broken and r.address not in gone]
            verdicts.reject(short, "incomplete_group")
            gone |= set(short)
        return await self._load_readable([r for r in rows if r.address not in gone], verdicts)

    def _rows_of(
        self, unit: ReadyUnit, known: Mapping[int, ExperienceRow], verdicts: Verdicts
    ) -> list[ExperienceRow]:
        """Return what the strategy sees of ``unit``, in its order; the rest is rejected."""
        members = (row for group in self._whole_of(unit, verdicts) for row in group.members)
        return sorted((known[address] for address in members), key=place_of)

    def _whole_of(self, unit: ReadyUnit, verdicts: Verdicts) -> list[Group]:
        """Return the groups of ``unit`` that the strategy sees; the others are rejected."""
        verdicts.concern(unit.groups)
        if self._setup.rules.incomplete == "keep":
            return list(unit.groups)
        for group in unit.groups:
            if group.short:
                verdicts.reject(group.members, "incomplete_group")
        return [group for group in unit.groups if not group.short]

    @property
    def _experiences_per_load(self) -> int:
        only_light = self._families == ("light",)
        return sizes().experiences_per_commit if only_light else sizes().experiences_per_load

    async def _load_experiences(self, rows: Sequence[ExperienceRow]) -> list[Experience]:
        database = self._experiment.database
        experiences = await load_experiences(database, self._cache, rows, self._families)
        for experience in experiences:
            if experience.archived is not None:
                raise ArchivedSegmentError(f"{experience.eid}: {experience.archived}")
        if self._setup.rewards is not None:
            addresses = [row.address for row in rows]
            assigned = await database.read_session(lambda s: self._assigned(s, addresses))
            for experience in experiences:
                experience.reward = (assigned or {}).get(experience.address or 0)
        return experiences

    def _assigned(self, s: ReadSession, addresses: Sequence[int]) -> Mapping[int, float] | None:
        """Return the rewards of the scoring that is used, or None if the recorded ones are."""
        name, key = self._setup.rewards, self._experiment.key
        if name is None:
            return None
        return s.read(reads.assigned_rewards, key, name, addresses)


def _uid(experience: Experience) -> str:
    return experience.eid.uid


def _first_of(groups: Sequence[Group], events: Events) -> str:
    """Return the uid of the first member of ``groups``."""
    first = groups[0].members[0]
    position = position_of(first)
    rows = rows_recorded_by(position, events[position])
    return next(row.eid.uid for row in rows if row.address == first)
