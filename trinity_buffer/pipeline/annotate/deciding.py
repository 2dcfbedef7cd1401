"""Calls a strategy on ready units and turns its answers into a decision to commit.

A strategy decides by rewards alone, in columns, or by whole experiences. It may be the user's own
code, so that every answer is checked and every error notes which strategy raised it, and where.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import anyio.to_thread
import torch
from torch import Tensor

from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.algorithm.copies import original_uid
from trinity_buffer.algorithm.group_scores import RewardScorer
from trinity_buffer.codec import ANNOTATED, content_digest
from trinity_buffer.errors import ArchivedSegmentError, InvalidArgumentError
from trinity_buffer.events import ExperiencesAnnotated, ExperiencesRecorded, ExperiencesRejected
from trinity_buffer.experience import Experience
from trinity_buffer.identity import storable
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.annotate.grouping import (
    Group,
    GroupingRules,
    ReadyUnit,
    Unit,
    chunks,
    has_rows,
    sort_key,
)
from trinity_buffer.pipeline.annotate.reward_table import ScoredRows, table_of, verdicts_of
from trinity_buffer.pipeline.annotate.unit_reader import UnitReader
from trinity_buffer.pipeline.annotations import encode_annotations, encode_scores
from trinity_buffer.pipeline.handle import ExperimentHandle, new_event, now_us
from trinity_buffer.pipeline.load.events import EventCache
from trinity_buffer.pipeline.load.experiences import load_experiences
from trinity_buffer.pipeline.load.segments import unreadable_among
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.log import NewEvent, Place
from trinity_buffer.store.rows import SLOT_BITS, ExperienceRow, position_of, rows_recorded_by
from trinity_buffer.store.segments import SegmentRow, SegmentStore, new_key
from trinity_buffer.store.transaction import ReadSession, Transaction
from trinity_buffer.writer import StagedWriter, invalid

_Kept = Mapping[str, Sequence[Experience]]
"""Experiences that a strategy wrote, by tid of their group."""

_COPYING = (
    "a copy is made by `trinity_buffer.algorithm.copies.copy_experience`, under a task of its own"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision on some units: its events, their segment, and counts for the report."""

    events: list[NewEvent]
    segment_rows: list[SegmentRow]
    annotated: int
    rejected: int
    reasons: Counter[str]

    def append(
        self,
        tx: Transaction,
        store: SegmentStore,
        experiment: int,
        strategy: str,
        *,
        require: Callable[[Transaction], Place | None] | None = None,
    ) -> None:
        """Append the events of the decision, and attach its segment in ``store``.

        Args:
            require: raises if this process lost its lease; returns the end of the log if it knows.
        """
        store.attach(tx, self.segment_rows)
        # Inside the transaction of the events: a lease that is lost afterwards cannot matter.
        last = None if require is None else require(tx)
        log.append(tx, experiment, self.events, actor=strategy, now_us=now_us(), last=last)


class _Annotated(NamedTuple):
    """Annotated rows: the address and group number of each, and the tid of each group."""

    addresses: list[int]
    groups: list[int]
    tids: list[str]


def _tid(group: Group) -> str:
    return f"{group.key[0]}/{group.key[1]}"


@dataclass(slots=True)
class DecisionBuilder:
    """Collects the rows that a strategy saw over several units, and its verdicts on them.

    Attributes:
        strategy: name of the annotation set.
        store: where annotations are put.
        reasons: address of an experience -> why it is rejected.
        planned: tid of a group -> whether it was planned.
        masks: address of each experience that the strategy saw -> its action mask.
        metrics: what each of its calls returned.
    """

    strategy: str
    store: SegmentStore
    reasons: dict[int, str] = field(default_factory=dict)
    planned: dict[str, bool] = field(default_factory=dict)
    masks: dict[int, Tensor | None] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def reject(self, addresses: Sequence[int], reason: str) -> None:
        """Reject experiences without asking the strategy."""
        self.reasons.update(dict.fromkeys(addresses, reason))

    def concern(self, groups: Sequence[Group]) -> None:
        """Note that this decision covers ``groups``."""
        self.planned.update({_tid(group): group.planned for group in groups})

    def taken_from(self, staged: StagedWriter) -> dict[str, list[Experience]]:
        """Empty ``staged`` and return the written experiences, by group in order of appearance.

        Experiences that were neither written nor rejected are rejected as ``filtered``.

        Raises:
            InvalidArgumentError: an experience that was not given, or both written and rejected.
        """
        written, staged.groups = staged.groups, []
        rejected, staged.rejections = staged.rejections, []
        self.reasons.update({self._address(e): reason for e, reason in rejected})
        groups: dict[str, list[Experience]] = {}
        for experience in (e for written_at_once in written for e in written_at_once):
            # Advantages are decoded beside the stored mask, so they are encoded by it as well.
            experience.action_mask = self.masks[self._address(experience)]
            groups.setdefault(experience.eid.tid, []).append(experience)  # a copy has another tid
        addresses = {self._address(e) for group in groups.values() for e in group}
        for address in self.masks.keys() - addresses - self.reasons.keys():
            self.reasons[address] = "filtered"
        # Either answer alone could be meant, so guessing would hide a bug of the strategy.
        contradictory = addresses & self.reasons.keys()
        if contradictory:
            raise InvalidArgumentError(
                f"strategy {self.strategy!r} both wrote and rejected {len(contradictory)} "
                "experiences of one unit"
            )
        return groups

    def require_fitting(self, groups: _Kept, rows: Mapping[int, ExperienceRow]) -> None:
        """Raise unless each experience occurs once, unchanged, with one number per token.

        Raises:
            InvalidArgumentError: names the first experience that does not.
        """
        self._require_own_addresses(groups, rows)
        for experience in (e for group in groups.values() for e in group):
            row = rows[self._address(experience)]
            tokens = row.length - row.prompt_length
            for name in ANNOTATED:
                problem = _misfit(experience.__dict__.get(name), tokens)
                if problem is not None:
                    raise InvalidArgumentError(
                        f"strategy {self.strategy!r} gave {experience.eid.uid} {name} {problem}: "
                        f"its response has {tokens} tokens, so give [{tokens}]"
                    )

    def _require_own_addresses(self, groups: _Kept, rows: Mapping[int, ExperienceRow]) -> None:
        """Raise unless each experience has its own address, and each copy an unused one.

        Raises:
            InvalidArgumentError: names the first experience that does not.
        """
        there = set[str]()
        for experience in (e for group in groups.values() for e in group):
            own, uid = rows[self._address(experience)].eid, experience.eid.uid
            # A copy may go into a group of its own, never into one of other recorded rows.
            is_copy = original_uid(experience) == own.uid
            in_other = experience.eid.tid != own.tid and experience.eid.tid in self.planned
            if uid != own.uid and (in_other or not is_copy):
                raise InvalidArgumentError(
                    f"strategy {self.strategy!r} wrote {own.uid} as {uid}: what it keeps stays "
                    f"under its own address, and {_COPYING}"
                )
            if uid in there:
                raise InvalidArgumentError(
                    f"strategy {self.strategy!r} wrote {uid} twice: {_COPYING}"
                )
            there.add(uid)

    def _leave_out_broken(self, groups: _Kept) -> _Kept:
        """Return the finite experiences; reject the others and all their copies as ``invalid``."""
        if _all_finite([experience for group in groups.values() for experience in group]):
            return groups
        broken = {
            self._address(experience): invalid(*fields)
            for group in groups.values()
            for experience in group
            if (fields := _broken_fields(experience))
        }
        self.reasons.update(broken)
        left = {
            tid: [experience for experience in group if self._address(experience) not in broken]
            for tid, group in groups.items()
        }
        return {tid: group for tid, group in left.items() if group}

    def _address(self, experience: Experience) -> int:
        address = experience.address
        if address is None or address not in self.masks:
            raise InvalidArgumentError(
                f"strategy {self.strategy!r} wrote {experience.eid.uid}, which it was not given; a "
                f"strategy may keep, copy or leave out experiences, not make them, and {_COPYING}"
            )
        return address

    def decision(
        self, groups: _Kept, *, seen: int, calls: int, after: int | None = None
    ) -> Decision:
        """Return the decision to commit. Encodes: call it off the event loop.

        Args:
            groups: from `taken_from`.
            seen: position up to which the log was read.
            calls: how often the strategy was called so far.
            after: where the cursor must stand for the commit to succeed. Only groups without rows
                need it: a row can be decided only once, which protects the others.
        """
        groups = self._leave_out_broken(groups)
        experiences = [experience for group in groups.values() for experience in group]
        annotated = _Annotated(
            [cast("int", experience.address) for experience in experiences],
            [number for number, group in enumerate(groups.values()) for _ in group],
            list(groups),
        )
        blob = encode_annotations(experiences) if experiences else b""
        self.metrics = list(map(_finite, self.metrics))
        return self._decision(annotated, blob, seen=seen, calls=calls, after=after)

    def decision_by_rewards(
        self, groups: Sequence[Group], scored: ScoredRows, *, seen: int, calls: int
    ) -> Decision:
        """Return the decision on groups that were scored by their rewards. Encodes.

        Args:
            groups: in the order of their numbers in ``scored``.
            scored: the verdict on each row.
            seen, calls: as in `decision`.
        """
        self.reasons |= scored.reasons
        self.metrics = scored.metrics
        # Groups without kept rows get no number: numbers in an event are dense.
        numbers = {number: place for place, number in enumerate(dict.fromkeys(scored.groups))}
        annotated = _Annotated(
            scored.addresses,
            [numbers[number] for number in scored.groups],
            [_tid(groups[number]) for number in numbers],
        )
        blob = encode_scores(scored.scores, len(scored.addresses)) if scored.addresses else b""
        return self._decision(annotated, blob, seen=seen, calls=calls, after=None)

    def _decision(
        self, rows: _Annotated, blob: bytes, *, seen: int, calls: int, after: int | None
    ) -> Decision:
        events: list[NewEvent] = []
        segment_rows: list[SegmentRow] = []
        if rows.addresses:
            key = new_key()
            segment_rows = self.store.put(key, {"annotation": blob})
            annotated = ExperiencesAnnotated(
                consumer=self.strategy,
                seen=seen,
                calls=calls,
                after=after,
                segment=key,
                families={"annotation": len(blob)},
                digest=content_digest([blob]),
                experiences=rows.addresses,
                groups=rows.groups,
                planned=[self.planned.get(tid, False) for tid in rows.tids],
                metrics=self.metrics,
            )
            events.append(new_event(annotated))
        there = set(rows.tids)
        # Bounds of explorers count planned groups, so those that will not come are recorded.
        left_out = sum(planned and tid not in there for tid, planned in self.planned.items())
        if self.reasons or left_out:
            addresses = sorted(self.reasons)
            self.reasons = {
                address: self._reason_text(self.reasons[address]) for address in addresses
            }
            rejected = ExperiencesRejected(
                consumer=self.strategy,
                seen=seen,
                calls=calls,
                # One event of the commit is enough to check the cursor.
                after=None if events else after,
                by="strategy",
                experiences=addresses,
                reasons=[self.reasons[address] for address in addresses],
                planned_groups=left_out,
            )
            events.append(new_event(rejected))
        reasons = Counter(self.reasons.values())
        return Decision(events, segment_rows, len(rows.addresses), len(self.reasons), reasons)

    def _reason_text(self, reason: object) -> str:
        """Return a reason in the form that is recorded."""
        if not isinstance(reason, str):
            raise InvalidArgumentError(
                f"strategy {self.strategy!r} rejects with the reason {reason!r:.60}: it must be a "
                "text"
            )
        return storable(reason)


def _misfit(value: object, tokens: int) -> str | None:
    """Return why a value is not a plain tensor with one number per token, or None."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}, which is not a tensor"
    if value.is_complex() or value.layout != torch.strided:
        return f"of dtype {value.dtype} and layout {value.layout}"
    return None if tuple(value.shape) == (tokens,) else f"of shape {list(value.shape)}"


def _all_finite(experiences: Sequence[Experience]) -> bool:
    """Return whether all computed values are finite in float32, the dtype of micro-batches."""
    tensors = [
        value
        for experience in experiences
        for name in ANNOTATED
        if (value := experience.__dict__.get(name)) is not None
    ]
    return not tensors or bool(
        # One reduction for all tensors; only a failure is examined tensor by tensor.
        torch.cat([t.detach().float().flatten() for t in tensors]).isfinite().all()
    )


def _broken_fields(experience: Experience) -> list[str]:
    """Return the names of an experience's computed fields that are not finite."""
    computed = [(name, experience.__dict__.get(name)) for name in ANNOTATED]
    return [
        name for name, value in computed if value is not None and not value.float().isfinite().all()
    ]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


@contextmanager
def blame_strategy(strategy: str, uid: Callable[[], str]) -> Iterator[None]:
    """Add to errors raised inside which strategy raised them, and at which experience.

    Args:
        strategy: name of the annotation set.
        uid: returns the uid of the first experience; called only on an error.
    """
    try:
        yield
    except Exception as error:
        error.add_note(
            f"in strategy {strategy!r}, which was given {uid()} first; nothing of it is committed"
        )
        raise


def metrics_of(answer: object) -> dict[str, float]:
    """Return the metrics of what ``add`` returned.

    Raises:
        TypeError: the answer is not a number and a mapping of numbers.
    """
    if not (isinstance(answer, Sequence) and len(answer) == 2 and isinstance(answer[1], Mapping)):
        raise TypeError(
            f"`add` returned {_short(answer)}: it must return how many experiences it wrote and a "
            "mapping of metrics, as in `return len(kept), {}`"
        )
    return {name: _number(name, value) for name, value in answer[1].items()}


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(
            f"`add` returned {_short(value)} as metric {name!r}: it must be a number"
        ) from None


def _short(value: object) -> str:
    """Return the type of ``value`` and the beginning of its repr."""
    return f"{type(value).__name__} {value!r:.60}" if value is not None else "None"


Events = Mapping[int, ExperiencesRecorded]
"""Position -> the event there."""


@dataclass(frozen=True, slots=True)
class StrategySetup:
    """A strategy and the settings it runs with.

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
        """What one call of the strategy must see as a whole."""
        return self.strategy.unit_for(**self.arguments)

    @property
    def families(self) -> tuple[str, ...]:
        """The column families that it reads."""
        asked = self.strategy.families_for(**self.arguments)
        return ("light", *(family for family in asked if family != "light"))

    @property
    def scorer(self) -> RewardScorer | None:
        """The function that decides a group by its rewards, if the strategy needs nothing else."""
        return self.strategy.from_rewards() if self.unit == "group" else None


class Decider:
    """Runs a strategy on units.

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
        """The column families that it loads; none if rewards suffice."""
        return () if self._scorer is not None else self._families

    def partition(
        self, s: ReadSession, units: Sequence[ReadyUnit]
    ) -> tuple[list[ReadyUnit], list[ReadyUnit], Events]:
        """Return the units to load experiences for, those to score by rewards, and their events."""
        whole = [unit for unit in units if has_rows(unit)]
        if self._scorer is None or not whole:
            return list(units), [], {}
        positions = [{address >> SLOT_BITS for address in unit.addresses} for unit in whole]
        events = self._reader.events(s, set().union(*positions))
        known = events.keys()
        # A unit is scored by columns only if every one of its events has all of them.
        scored = [unit for unit, at in zip(whole, positions, strict=True) if at <= known]
        chosen = set(map(id, scored))
        return [unit for unit in units if id(unit) not in chosen], scored, events

    def by_rewards(self, s: ReadSession, units: Sequence[ReadyUnit], events: Events) -> Decision:
        """Return the strategy's decision on ``units`` by the rewards in ``events``."""
        assert self._scorer is not None  # else `partition` names no such units
        verdicts = self._no_verdicts()
        groups = [group for unit in units for group in self._whole_of(unit, verdicts)]
        assigned = self._assigned(s, [row for group in groups for row in group.members])
        # Each group counts as one call of `add`, whichever way it is decided.
        self.calls += len(groups)
        name, score = self._setup.name, self._scorer
        seen, calls = self._reader.seen, self.calls

        def compute() -> Decision:
            table = table_of(groups, events, assigned)
            with blame_strategy(name, lambda: _first_of(groups, events)):
                scored_rows = verdicts_of(table, len(groups), score, self._setup.strategy.over)
            return verdicts.decision_by_rewards(groups, scored_rows, seen=seen, calls=calls)

        return s.compute(compute)

    async def by_experiences(self, units: Sequence[ReadyUnit], late: Sequence[int]) -> Decision:
        """Return the strategy's decision on the experiences of ``units``; ``late`` is rejected."""
        setup, verdicts = self._setup, self._no_verdicts()
        verdicts.reject(late, "late")
        wanted = [row for unit in units for row in unit.addresses]
        database = self._experiment.database
        known = await database.read_session(lambda s: self._reader.rows(s, wanted))
        for units_to_load in chunks(units, self._experiences_per_load):
            unit_rows = [self._rows_of(unit, known, verdicts) for unit in units_to_load]
            readable = await self._load_readable(
                [row for rows in unit_rows for row in rows], verdicts
            )
            loaded = {experience.address: experience for experience in readable}
            for rows in unit_rows:
                addresses = [row.address for row in rows if row.address in loaded]
                if not addresses:
                    continue
                # Before the call: the strategy may change its list and the fields of experiences.
                verdicts.masks.update((a, loaded[a].__dict__.get("action_mask")) for a in addresses)
                with blame_strategy(setup.name, partial(_uid, loaded[addresses[0]])):
                    answer = await setup.strategy.add([loaded[a] for a in addresses], self.calls)
                    verdicts.metrics.append(metrics_of(answer))
                self.calls += 1
        groups = verdicts.taken_from(setup.staged)
        verdicts.require_fitting(groups, known)
        encode = partial(
            verdicts.decision,
            groups,
            seen=self._reader.seen,
            calls=self.calls,
            after=None if all(map(has_rows, units)) else self._reader.cursor,
        )
        return await anyio.to_thread.run_sync(encode)

    def _no_verdicts(self) -> DecisionBuilder:
        return DecisionBuilder(self._setup.name, self._experiment.database.segments)

    async def _load_readable(
        self, rows: Sequence[ExperienceRow], verdicts: DecisionBuilder
    ) -> list[Experience]:
        """Return the readable experiences; reject the others as ``deleted`` or ``damaged``."""
        if not rows:
            return []
        bad: dict[int | None, str] = {}
        try:
            experiences = await self._load_experiences(rows)
            bad = {e.address: "damaged" for e in experiences if e.damaged is not None}
            if not bad:
                return experiences
        except ArchivedSegmentError:
            # No families required: here only the absence of a whole segment matters.
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
        self, unit: ReadyUnit, known: Mapping[int, ExperienceRow], verdicts: DecisionBuilder
    ) -> list[ExperienceRow]:
        """Return the rows of ``unit`` that the strategy sees, sorted; reject the others."""
        members = (row for group in self._whole_of(unit, verdicts) for row in group.members)
        return sorted((known[address] for address in members), key=sort_key)

    def _whole_of(self, unit: ReadyUnit, verdicts: DecisionBuilder) -> list[Group]:
        """Return the groups of ``unit`` that the strategy sees; reject the others."""
        verdicts.concern(unit.groups)
        if self._setup.rules.incomplete == "keep":
            return list(unit.groups)
        for group in unit.groups:
            if group.short:
                verdicts.reject(group.members, "incomplete_group")
        return [group for group in unit.groups if not group.short]

    @property
    def _experiences_per_load(self) -> int:
        # Light rows are small, so one load can cover a whole commit.
        only_light = self._families == ("light",)
        return sizes().experiences_per_commit if only_light else sizes().experiences_per_load

    async def _load_experiences(self, rows: Sequence[ExperienceRow]) -> list[Experience]:
        database = self._experiment.database
        experiences = await load_experiences(database, self._cache, rows, self._families)
        for experience in experiences:
            # Without tensors a strategy cannot decide; whether they are gone for good is checked
            # above.
            if experience.archived is not None:
                raise ArchivedSegmentError(f"{experience.eid}: {experience.archived}")
        if self._setup.rewards is not None:
            addresses = [row.address for row in rows]
            assigned = await database.read_session(lambda s: self._assigned(s, addresses))
            for experience in experiences:
                # A row that the scoring left out has no reward, not its recorded one.
                experience.reward = (assigned or {}).get(experience.address or 0)
        return experiences

    def _assigned(self, s: ReadSession, addresses: Sequence[int]) -> Mapping[int, float] | None:
        """Return the rewards of the scoring in use, or None to use the recorded ones."""
        name, key = self._setup.rewards, self._experiment.key
        if name is None:
            return None
        return s.read(writer_queries.assigned_rewards, key, name, addresses)


def _uid(experience: Experience) -> str:
    return experience.eid.uid


def _first_of(groups: Sequence[Group], events: Events) -> str:
    """Return the uid of the first member of ``groups``."""
    first = groups[0].members[0]
    position = position_of(first)
    rows = rows_recorded_by(position, events[position])
    return next(row.eid.uid for row in rows if row.address == first)
