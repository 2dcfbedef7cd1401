"""Strategies as consumers of the log: units in, annotations and rejections out, one commit for both and the cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import anyio
import anyio.to_thread

from trinity_buffer.algorithm import ADD_STRATEGY
from trinity_buffer.algorithm.add_strategy import AddStrategy, compose
from trinity_buffer.crash_points import reached
from trinity_buffer.errors import (
    ConflictingStrategyError,
    CursorConflictError,
    InvalidArgumentError,
    UnknownNameError,
)
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.annotation_encoding import encode_annotations
from trinity_buffer.pipeline.events import decoded, new_event, now_us
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.grouping import Group, Grouping, GroupingRules, GroupKey, ReadyUnit
from trinity_buffer.pipeline.loading import load_experiences
from trinity_buffer.store import log, queries, segments
from trinity_buffer.store.dialect import lock_experiment
from trinity_buffer.store.log import NewEvent, StoredEvent
from trinity_buffer.store.queries import ExperienceRow, typed_rows_of_event
from trinity_buffer.writer import StagedWriter

EVENTS_PER_PAGE = 256
WAITING_PER_PAGE = 4096
EXPERIENCES_PER_COMMIT = 2048
"""Units that are ready together share a commit up to this many experiences."""

_KINDS = ("ExperiencesRecorded", "BatchPlanned", "BatchSealed")

StrategyLike = str | type[AddStrategy] | Sequence[str | type[AddStrategy]]


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """What a strategy consumer did until it ended.

    Attributes:
        annotated, rejected: experiences (copies counted) of this process.
        waiting: experiences that are left because their groups are incomplete.
        waiting_groups: of which so many groups.
    """

    annotated: int
    rejected: int
    waiting: int
    waiting_groups: int


@dataclass(slots=True)
class _Decision:
    """What becomes of some units, ready to be committed."""

    events: list[NewEvent]
    segment_rows: list[dict[str, object]]
    annotated: int
    rejected: int


class StrategyConsumer:
    """Runs one strategy over one experiment; its annotations form the set ``name``.

    Any number of processes may run the same name: each unit is decided once, whoever comes second
    reads on.

    Args:
        experiment: whose log is read.
        strategy: a registered name, an `AddStrategy` class, or a list of them (filters first, one
            commit).
        args: constructor arguments of the strategy (of a list: name -> arguments).
        name: of the annotation set; by default the strategy's registered name.
        rules: how experiences become groups; by default as the experiment is configured.
    """

    def __init__(
        self,
        experiment: Experiment,
        strategy: StrategyLike,
        args: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        rules: GroupingRules | None = None,
    ) -> None:
        self.experiment = experiment
        self._staged = StagedWriter()
        listed = [strategy] if isinstance(strategy, (str, type)) else list(strategy)
        names = [_name_of(one) for one in listed]
        self.strategy = (
            compose(self._staged, listed, args or {})
            if len(listed) > 1
            else _make(listed[0], self._staged, args or {})
        )
        self.name = name or "+".join(names)
        self.rules = rules or GroupingRules(
            rollouts_per_group=experiment.config.get("rollouts_per_group"),
            deadline_s=experiment.config.get("deadline_s"),
            incomplete=experiment.config.get("incomplete", "keep"),
        )
        self.config = {"strategy": names, "args": dict(args or {}), "grouping": asdict(self.rules)}
        own = dict(args or {})
        self._unit = self.strategy.unit_for(**own)
        self._families = ("light", *(f for f in self.strategy.families_for(**own) if f != "light"))
        self._grouping = Grouping(self._unit, self.rules)
        self._seen = 0
        self._calls = 0
        self._annotated = 0
        self._rejected = 0

    async def run(self, *, follow: bool = False) -> ConsumerReport:
        """Decide what is stored; with ``follow``, go on until the experiment is finished.

        Raises:
            ConflictingStrategyError: the set ``name`` has another configuration.
        """
        changes = self.experiment.database.changes
        await self._register()
        await self._load()
        while True:
            state = await changes.state()
            try:
                worked = await self._advance()
            except CursorConflictError:
                await self._load()
                continue
            if worked:
                continue
            if not follow or await self.experiment.is_finished():
                return self._report()
            deadline = self._grouping.next_deadline_us()
            await changes.changed(
                state, None if deadline is None else max(0.0, (deadline - now_us()) / 1e6)
            )

    def _report(self) -> ConsumerReport:
        waiting, groups = self._grouping.num_waiting, self._grouping.num_waiting_groups
        return ConsumerReport(self._annotated, self._rejected, waiting, groups)

    async def _advance(self) -> bool:
        """Read one page, decide what is ready; return whether there was anything to do."""
        read = await self._read_page()
        units = self._grouping.take_ready(now_us())
        late = self._grouping.take_late()
        for some in _chunks(units):
            await self._decide(some, [])
        if late:
            await self._decide([], late)
        return bool(read or units or late)

    # -- what is known
    # ------------------------------------------------------------------------------------------

    async def _register(self) -> None:
        event = new_event(
            "ConsumerRegistered", {"consumer": self.name, "kind": "strategy", "config": self.config}
        )
        database, key = self.experiment.database, self.experiment.key
        async with database.reading() as tx:
            row = await queries.consumer_row(tx, key, self.name)
        if row is None:
            async with database.writing() as tx:
                await lock_experiment(tx, key)
                row = await queries.consumer_row(tx, key, self.name)
                if row is None:
                    await log.append(tx, key, [event], actor=self.name, now_us=now_us())
                    return
        if row.kind != "strategy" or row.config != self.config:
            raise ConflictingStrategyError(
                f"the annotation set {self.name!r} of experiment {self.experiment.name!r} was made with {row.config}, "
                f"this is {self.config}: give the new one a name of its own with name="
            )

    async def _load(self) -> None:
        """Take up where the last commit of this name left off."""
        self._grouping = Grouping(self._unit, self.rules)
        self._staged.groups.clear()
        self._staged.rejections.clear()
        database, key = self.experiment.database, self.experiment.key
        async with database.reading() as tx:
            row = await queries.consumer_row(tx, key, self.name)
        assert row is not None
        self._seen, self._calls = row.cursor, row.calls
        after = -1
        while True:
            async with database.reading() as tx:
                page = await queries.waiting_rows(
                    tx, key, self.name, after=after, limit=WAITING_PER_PAGE
                )
            if not page:
                return
            await self._learn(self._grouping.unknown(page), set(), seen=self._seen)
            for waiting in page:
                self._grouping.record(waiting, now_us())
            after = page[-1].address

    async def _read_page(self) -> bool:
        """Feed the next events to the grouping; return whether there were any."""
        database, key = self.experiment.database, self.experiment.key
        async with database.reading() as tx:
            head = await log.head(tx, key)
            if head == self._seen:
                return False
            page = await log.read_after(
                tx, key, self._seen, limit=EVENTS_PER_PAGE, kinds=_KINDS, up_to=head
            )
        seen = page[-1].position if len(page) == EVENTS_PER_PAGE else head
        bodies = await anyio.to_thread.run_sync(
            lambda: [decoded("", stored).body for stored in page]
        )
        rows = []
        for stored, body in zip(page, bodies, strict=True):
            if stored.kind == "ExperiencesRecorded":
                rows += [
                    (row, stored.recorded_at) for row in typed_rows_of_event(stored.position, body)
                ]
        sealed = {
            str(body["batch"])
            for stored, body in zip(page, bodies, strict=True)
            if stored.kind == "BatchSealed"
        }
        await self._learn(self._grouping.unknown(row for row, _ in rows), sealed, seen=self._seen)
        for row, at_us in rows:
            self._grouping.record(row, at_us)
        for stored, body in zip(page, bodies, strict=True):
            self._take_in_batch(stored, body)
        self._seen = seen
        return bool(page)

    def _take_in_batch(self, stored: StoredEvent, body: Mapping[str, Any]) -> None:
        if stored.kind == "BatchPlanned":
            row = queries.BatchRow(
                body["batch"],
                stored.actor,
                body["rollouts_per_group"],
                stored.position,
                None,
                None,
                tuple(body["tasks"]),
            )
            self._grouping.know_batch(row, sealed=False)
        elif stored.kind == "BatchSealed":
            self._grouping.seal(str(body["batch"]))

    async def _learn(self, groups: set[GroupKey], batches: set[str], *, seen: int) -> None:
        """Tell the grouping what the database knows of groups and batches that are not in its memory."""
        names = sorted(
            {batch for batch, _ in groups} | {b for b in batches if not self._grouping.knows(b)}
        )
        if not names:
            return
        database, key = self.experiment.database, self.experiment.key
        async with database.reading() as tx:
            known = await queries.batches(tx, key, names)
            planned = {(name, str(task)) for name, batch in known.items() for task in batch.tasks}
            asked = sorted(groups | planned)
            decided = await queries.decided_groups(tx, key, self.name, asked, cursor=seen)
            refused = await queries.refused_runs(tx, key, asked, cursor=seen)
        for batch in known.values():
            self._grouping.know_batch(
                batch, sealed=batch.sealed_at is not None and batch.sealed_at <= seen
            )
        self._grouping.know_decided(decided)
        for group, run in refused:
            self._grouping.know_run(group, run)

    # -- what is decided
    # ----------------------------------------------------------------------------------------

    async def _decide(self, units: Sequence[ReadyUnit], late: Sequence[ExperienceRow]) -> None:
        """Run the strategy over ``units`` and commit everything it said, with the cursor."""
        decision = await self._compute(units, late)
        if not decision.events:
            return
        database, key = self.experiment.database, self.experiment.key
        reached("before-annotate")
        async with database.writing() as tx:
            await segments.write(tx, decision.segment_rows)
            await log.append(tx, key, decision.events, actor=self.name, now_us=now_us())
            reached("inside-annotate")
        reached("after-annotate")
        self._annotated += decision.annotated
        self._rejected += decision.rejected

    async def _compute(
        self, units: Sequence[ReadyUnit], late: Sequence[ExperienceRow]
    ) -> _Decision:
        written: list[list[Experience]] = []
        reasons = {row.address: "late" for row in late}
        planned: dict[str, bool] = {}
        metrics = []
        given: set[int] = set()
        for unit in units:
            groups, incomplete = self._sorted_out(unit)
            reasons.update(
                {row.address: "incomplete_group" for group in incomplete for row in group.members}
            )
            planned.update(
                {f"{group.key[0]}/{group.key[1]}": group.planned for group in unit.groups}
            )
            rows = ReadyUnit(tuple(groups), incomplete=False).rows
            if not rows:
                continue
            experiences = await load_experiences(
                self.experiment.database, self.experiment.key, rows, self._families
            )
            _, found = await self.strategy.add(experiences, self._calls)
            self._calls += 1
            metrics.append({name: float(value) for name, value in found.items()})
            given.update(row.address for row in rows)
        written, self._staged.groups = self._staged.groups, []
        rejected, self._staged.rejections = self._staged.rejections, []
        reasons.update({_address(e, given, self.name): reason for e, reason in rejected})
        kept = _by_group(written)
        kept_addresses = {_address(e, given, self.name) for group in kept.values() for e in group}
        for address in given - kept_addresses - reasons.keys():
            reasons[address] = "filtered"
        contradictory = kept_addresses & reasons.keys()
        if contradictory:
            raise InvalidArgumentError(
                f"strategy {self.name!r} both wrote and rejected {len(contradictory)} experiences of one unit"
            )
        left_out = sum(is_planned and tid not in kept for tid, is_planned in planned.items())
        return await anyio.to_thread.run_sync(
            self._encode, kept, planned, reasons, left_out, metrics
        )

    def _sorted_out(self, unit: ReadyUnit) -> tuple[list[Group], list[Group]]:
        """Return the groups that the strategy sees, and those that are rejected because they are incomplete."""
        if self.rules.incomplete == "keep":
            return list(unit.groups), []
        short = [g for g in unit.groups if g.rollouts is not None and not g.complete]
        return [g for g in unit.groups if g not in short], short

    def _encode(
        self,
        kept: Mapping[str, Sequence[Experience]],
        planned: Mapping[str, bool],
        reasons: Mapping[int, str],
        left_out: int,
        metrics: Sequence[Mapping[str, float]],
    ) -> _Decision:
        common = {"consumer": self.name, "seen": self._seen, "calls": self._calls}
        events, rows = [], []
        experiences = [experience for group in kept.values() for experience in group]
        if experiences:
            key, families = segments.new_key(), {"annotation": encode_annotations(experiences)}
            rows = segments.rows_of(key, families)
            body = {
                **common,
                "segment": key,
                "families": {family: len(blob) for family, blob in families.items()},
                "experiences": [experience.address for experience in experiences],
                "groups": [number for number, group in enumerate(kept.values()) for _ in group],
                "planned": [planned.get(tid, False) for tid in kept],
                "metrics": list(metrics),
            }
            events.append(new_event("ExperiencesAnnotated", body))
        if reasons or left_out:
            addresses = sorted(reasons)
            body = {
                **common,
                "by": "strategy",
                "experiences": addresses,
                "reasons": [reasons[address] for address in addresses],
                "planned_groups": left_out,
            }
            events.append(new_event("ExperiencesRejected", body))
        return _Decision(events, rows, len(experiences), len(reasons))


def _name_of(strategy: str | type[AddStrategy]) -> str:
    if isinstance(strategy, str):
        return strategy
    known = {ADD_STRATEGY.get(name): name for name in ADD_STRATEGY.names()}
    return known.get(strategy, strategy.__name__)


def _make(
    strategy: str | type[AddStrategy], writer: StagedWriter, args: Mapping[str, Any]
) -> AddStrategy:
    kind = ADD_STRATEGY.get(strategy) if isinstance(strategy, str) else strategy
    if not (isinstance(kind, type) and issubclass(kind, AddStrategy)):
        raise UnknownNameError(
            f"{strategy!r} is not an AddStrategy; known are {', '.join(ADD_STRATEGY.names())}"
        )
    return kind(writer, **args)


def _by_group(written: Sequence[Sequence[Experience]]) -> dict[str, list[Experience]]:
    """Return what was written by group, in order of first appearance; a copy's group is not its original's."""
    groups: dict[str, list[Experience]] = {}
    for some in written:
        for experience in some:
            groups.setdefault(experience.eid.tid, []).append(experience)
    return groups


def _address(experience: Experience, given: set[int], name: str) -> int:
    address = experience.address
    if address is None or address not in given:
        raise InvalidArgumentError(
            f"strategy {name!r} wrote {experience.eid.uid}, which it was not given; a strategy may keep, copy "
            "(copy.copy) or leave out experiences, not make them"
        )
    return address


def _chunks(units: Sequence[ReadyUnit]) -> list[list[ReadyUnit]]:
    chunks: list[list[ReadyUnit]] = []
    room = 0
    for unit in units:
        size = sum(len(group.members) for group in unit.groups)
        if not chunks or size > room:
            chunks.append([])
            room = EXPERIENCES_PER_COMMIT
        chunks[-1].append(unit)
        room -= size
    return chunks


async def run_strategy(
    experiment: Experiment,
    strategy: StrategyLike,
    args: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    follow: bool = False,
    **grouping: Any,
) -> ConsumerReport:
    """Run ``strategy`` over ``experiment`` and return what was done.

    Args:
        strategy: a registered name, an `AddStrategy` class, or a list of them.
        args: constructor arguments, such as ``{"epsilon": 1e-6}``.
        name: of the annotation set; by default the strategy's name.
        follow: go on until an ``ExperimentFinished`` event; otherwise end when what is stored is
            decided.
        grouping: fields of `GroupingRules`; by default the experiment's configuration.

    Raises:
        ConflictingStrategyError: the annotation set exists with another configuration.
        UnknownNameError: no such strategy.
    """
    defaults = {
        field: experiment.config[field]
        for field in GroupingRules.__slots__
        if field in experiment.config
    }
    try:
        rules = GroupingRules(**{**defaults, **grouping})
    except TypeError as error:
        accepted = ", ".join(GroupingRules.__slots__)
        raise InvalidArgumentError(f"run_strategy: {error}; accepted are {accepted}") from error
    return await StrategyConsumer(experiment, strategy, args, name=name, rules=rules).run(
        follow=follow
    )
