"""What the log says that the projections hold, computed in memory: a second opinion on the fold.

Rows that never change are compared in parts while the log is read; what later events change is
kept, and compared when all of the log is known. Equal is all that is asked here, and a million
experiences are asked in seconds: who differs, and how, `comparison` says after another fold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

from sqlalchemy import Table

from trinity_buffer.events import (
    BatchLeased,
    BatchPlanned,
    BatchSealed,
    ChainStarted,
    ConfigurationChanged,
    ConsumerRegistered,
    ExperiencesAnnotated,
    ExperiencesRecorded,
    ExperiencesRejected,
    ExperimentCreated,
    ExperimentFinished,
    PlacedFact,
    PolicyPublished,
    RankJoined,
    RanksAssembled,
    RewardsAssigned,
    SegmentsArchived,
    SegmentsRestored,
    StepDealt,
    StepMeasured,
    StepPartDone,
    StepsCommitted,
    StreamEnded,
    TrainerRewound,
    UnknownEvent,
)
from trinity_buffer.identity import Key
from trinity_buffer.sizes import sizes
from trinity_buffer.store import rows
from trinity_buffer.store.auditing.comparison import Part, Row
from trinity_buffer.store.auditing.expected_counts import ExpectedCounts
from trinity_buffer.store.auditing.fingerprint import Fingerprint
from trinity_buffer.store.rows import first_address
from trinity_buffer.store.tables import (
    annotation,
    archived,
    assigned_reward,
    batch,
    configuration,
    consumer,
    counter,
    delivery,
    experience,
    plan,
    policy,
    rejection,
    step,
    waiting,
)

_CONTRADICTIONS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


_Step = list[Any]
"""One row of `step`, without the experiment: a run has so many that a mapping would be too large"""

_PLACE = {column.name: place for place, column in enumerate(list(step.c)[1:])}
"""Of each column in such a row."""


@dataclass(slots=True)
class _Consumer:
    """One row of `consumer`, and the steps of it that are not committed on the live line."""

    row: dict[str, Any]
    steps: dict[int, _Step] = field(default_factory=dict)
    uncommitted: set[int] = field(default_factory=set)


class Expectation:
    """Takes in the log, event by event, and says of which rows the projections must be made.

    Args:
        experiment: key of the experiment.

    Attributes:
        contradicted: an event does not follow from those before it; the rest says nothing.
    """

    def __init__(self, experiment: int) -> None:
        self.experiment = experiment
        self.contradicted = False
        self._full: list[Part] = []
        self._parts: dict[tuple[str, str | None], Part] = {}
        self._configuration: dict[str, Any] | None = None
        self._batches: dict[str, dict[str, Any] | None] = {}
        self._done = Fingerprint(0, 0)  # the rows of batches that nothing changes any more
        self._consumers: dict[str, _Consumer] = {}
        self._rewards: dict[tuple[str, int], float] = {}
        self._archived: dict[bytes, tuple[int, str | None]] = {}
        self._planned = 0
        self._counts = ExpectedCounts()

    def take(self, events: Iterable[PlacedFact]) -> None:
        """Take in the next events."""
        for event in events:
            if self.contradicted:
                return
            try:
                self._take(event)
            except _CONTRADICTIONS:
                self.contradicted = True

    def parts(self, *, all_of_them: bool = False) -> list[Part]:
        """Hand out the parts that are full, or what is left too."""
        found, self._full = self._full, []
        if all_of_them:
            found += self._parts.values()
            self._parts = {}
        return found

    def _add(self, table: Table, rows: list[Row], up_to: int, owner: str | None = None) -> None:
        key = (table.name, owner)
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = Part(*key, 0, 0)
        part.rows += rows
        part.up_to = max(part.up_to, up_to)
        if len(part.rows) >= sizes().rows_per_span:
            self._full.append(part)
            self._parts[key] = Part(*key, part.up_to, part.up_to)

    def _take(self, placed: PlacedFact) -> None:  # noqa: C901, PLR0912, PLR0915 - one case per kind
        at, fact = placed.position, placed.fact
        self._counts.taken(placed.kind)
        match fact:
            case ExperimentCreated() | ConfigurationChanged():
                self._configuration = {"position": at, "config": fact.config, "finished": False}
            case ExperimentFinished():
                if self._configuration is not None:
                    self._configuration["finished"] = True
            case BatchPlanned():
                self._plan(at, fact, placed.actor)
            case BatchSealed():
                self._sealed(at, fact, placed.actor)
            case ExperiencesRecorded():
                self._recorded(at, fact)
            case ConsumerRegistered():
                self._registered(fact)
            case ExperiencesAnnotated():
                self._annotated(at, fact)
            case ExperiencesRejected():
                self._rejected(at, fact)
            case BatchLeased():
                self._leased(at, fact)
            case StepDealt():
                self._dealt(at, fact)
            case StepsCommitted():
                self._committed(at, fact)
            case TrainerRewound():
                self._rewound(fact)
            case PolicyPublished():
                self._add(policy, [(self.experiment, at, fact.number, fact.uri, fact.digest)], at)
            case RewardsAssigned():
                self._scored(fact)
            case SegmentsArchived():
                self._archived |= dict.fromkeys(fact.segments, (at, fact.uri))
            case SegmentsRestored():
                for key in fact.segments:
                    del self._archived[key]
            case RankJoined() | RanksAssembled() | StepPartDone() | StreamEnded():
                pass  # in no projection
            case StepMeasured() | ChainStarted() | UnknownEvent():
                pass
            case _:
                assert_never(fact)

    def _plan(self, position: int, fact: BatchPlanned, actor: str) -> None:
        if str(fact.batch) in self._batches:
            raise ValueError("a batch is planned twice")
        found = self._batch(fact.batch, actor)
        found |= {"rollouts_per_group": fact.rollouts_per_group, "planned_at": position}
        found["planned_groups"] = len(fact.tasks)
        self._counts.planned(fact, actor)
        made = rows.plan_rows(self.experiment, fact, self._planned + 1)
        self._planned += len(made)
        self._add(plan, made, self._planned)

    def _sealed(self, position: int, fact: BatchSealed, actor: str) -> None:
        found = self._batch(fact.batch, actor)
        found.update(sealed_at=position, expected=fact.expected)
        if self._counts.count_stored(str(fact.batch), found):
            self._done += Fingerprint.of([self._row(batch, found)])
            self._batches[str(fact.batch)] = None

    def _recorded(self, position: int, fact: ExperiencesRecorded) -> None:
        made = rows.experience_rows(self.experiment, position, fact)
        self._add(experience, made, _last_address(position))
        self._counts.recorded(fact, self._batches)

    def _batch(self, key: Key, actor: str) -> dict[str, Any]:
        unknown = dict.fromkeys(_OF_BATCH)
        new = {"batch": str(key), "batch_is_int": isinstance(key, int), "actor": actor, **unknown}
        found = self._batches.setdefault(str(key), new)
        if found is None:
            raise ValueError("a batch is sealed twice")
        return found

    def _registered(self, fact: ConsumerRegistered) -> None:
        if fact.consumer in self._consumers:
            raise ValueError("a consumer is registered twice")
        row = {"name": fact.consumer, "kind": fact.kind, "config": fact.config}
        self._consumers[fact.consumer] = _Consumer(row | dict.fromkeys(_NUMBERS, 0))

    def _seen(self, fact: ExperiencesAnnotated | ExperiencesRejected) -> None:
        row = self._consumers[fact.consumer].row
        if fact.seen is None or fact.calls is None:
            raise ValueError("a strategy does not say what it has seen")
        if fact.after not in (None, row["cursor"]):
            raise ValueError("a strategy did not go on from where it was")
        row["cursor"] = max(row["cursor"], fact.seen)
        row["calls"] = max(row["calls"], fact.calls)
        if max(fact.experiences, default=0) > _last_address(row["cursor"]):
            raise ValueError("a strategy decided what it has not seen")

    def _annotated(self, position: int, fact: ExperiencesAnnotated) -> None:
        self._seen(fact)
        made = rows.annotation_rows(self.experiment, position, fact)
        self._add(annotation, made, _last_address(position), fact.consumer)
        self._counts.annotated(fact)

    def _rejected(self, position: int, fact: ExperiencesRejected) -> None:
        if fact.by == "strategy":
            self._seen(fact)
        made = rows.rejection_rows(self.experiment, position, fact)
        self._add(rejection, made, position, fact.consumer)
        self._counts.rejected(fact)
        if fact.planned_groups:
            self._consumers[fact.consumer].row["rejected_groups"] += fact.planned_groups

    def _leased(self, position: int, fact: BatchLeased) -> None:
        name, number = fact.consumer, fact.step
        found = self._consumers[name]
        if number in found.steps:
            raise ValueError("a step is leased twice")
        groups, own = self._so_far(found, number - 1)
        made = {
            "consumer": name,
            "step": number,
            "leased_at": position,
            "rows": len(fact.annotations),
            "groups": fact.num_groups,
            "planned_groups_so_far": groups + fact.planned_groups,
            "manifest_digest": fact.digest,
            **rows.NOT_COMMITTED,
            "own_rows_so_far": own + len(fact.annotations) - sum(of > 0 for of in fact.source),
        }
        found.steps[number] = [made[name] for name in _PLACE]
        found.uncommitted.add(number)
        found.row.update(leased_step=number, token=fact.token)
        self._add(delivery, rows.delivery_rows(self.experiment, fact), number, name)

    def _so_far(self, found: _Consumer, number: int) -> tuple[int, int]:
        """Return how many planned groups and own rows a trainer was handed up to a step."""
        if (row := found.steps.get(number)) is None:
            return 0, 0
        return row[_PLACE["planned_groups_so_far"]], row[_PLACE["own_rows_so_far"]]

    def _dealt(self, position: int, fact: StepDealt) -> None:
        found = self._consumers[fact.consumer]
        _update(found.steps[fact.step], rows.dealt_columns(position, fact))
        found.row["token"] = fact.token
        if gone := set(rows.dropped_rows(self.experiment, fact)):
            part = self._parts[delivery.name, fact.consumer]
            if not gone.issubset(part.rows):  # compared already, or never there: fold again
                raise ValueError("a step lost rows that it did not have, or long ago")
            part.rows = [row for row in part.rows if row not in gone]
            fewer = fact.dropped_from.count("") if fact.dropped_from else len(fact.dropped)
            for row in (row for number, row in found.steps.items() if number >= fact.step):
                row[_PLACE["own_rows_so_far"]] -= fewer

    def _committed(self, position: int, fact: StepsCommitted) -> None:
        found, last = self._consumers[fact.consumer], fact.steps[-1]
        done = {number for number in found.uncommitted if number <= last}
        for number in done:
            _update(found.steps[number], {"committed_at": position})
        found.uncommitted -= done
        _update(found.steps[last], rows.commit_columns(fact))
        found.row.update(committed_step=last, token=fact.token)

    def _rewound(self, fact: TrainerRewound) -> None:
        found, kept = self._consumers[fact.consumer], fact.step
        for number, row in found.steps.items():
            if number > kept:
                _update(row, rows.NOT_COMMITTED)
                found.uncommitted.add(number)
        found.row["committed_step"] = kept

    def _scored(self, fact: RewardsAssigned) -> None:
        for address, reward in zip(fact.experiences, fact.rewards, strict=True):
            self._rewards[fact.scoring, address] = reward

    def _changing(self) -> dict[str, Iterator[Row]]:
        """Return the rows of the tables whose rows later events change, all but `waiting`."""
        single = [self._configuration] if self._configuration is not None else []
        consumers = self._consumers.values()
        steps = (dict(zip(_PLACE, r, strict=True)) for one in consumers for r in one.steps.values())
        kept: dict[Table, Iterable[Mapping[str, Any]]] = {
            configuration: [{**row, "config": _text_of(row["config"])} for row in single],
            batch: filter(None, self._batches.values()),
            consumer: [{**c.row, "config": _text_of(c.row["config"])} for c in consumers],
            step: ({**row, "rows_by_rank": _text_of(row["rows_by_rank"])} for row in steps),
            counter: self._counts.rows(),
            assigned_reward: (
                {"scoring": scoring, "address": address, "reward": reward}
                for (scoring, address), reward in self._rewards.items()
            ),
            archived: (
                {"segment": key, "position": position, "uri": uri}
                for key, (position, uri) in self._archived.items()
            ),
        }
        return {table.name: map(partial(self._row, table), rows) for table, rows in kept.items()}

    def _row(self, table: Table, row: Mapping[str, Any]) -> Row:
        names = [column.name for column in table.c][1:]
        return (self.experiment, *(row[name] for name in names))

    def holds_for_changing(
        self, live: Mapping[str, Fingerprint], undecided: Mapping[str, Iterable[int]]
    ) -> bool:
        """Return whether rows that events change were as the log left them.

        Args:
            live: what `changing` saw when the log ended where this was taken in up to.
            undecided: strategy -> addresses that it has seen and not decided.
        """
        expected = self._changing()
        expected[waiting.name] = (
            (self.experiment, name, address)
            for name, addresses in undecided.items()
            for address in addresses
        )
        found = {name: Fingerprint.of(some) for name, some in expected.items()}
        found[batch.name] += self._done
        return all(live[name] == one for name, one in found.items())


def _update(row: _Step, columns: Mapping[str, Any]) -> None:
    for name, value in columns.items():
        row[_PLACE[name]] = value


def _last_address(position: int) -> int:
    return first_address(position + 1) - 1


def _text_of(value: Any) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True, separators=(",", ":"))


_OF_BATCH = (
    *("rollouts_per_group", "planned_at", "sealed_at", "expected"),
    *("planned_groups", "stored_rollouts"),
)
_NUMBERS = ("cursor", "calls", "rejected_groups", "token", "leased_step", "committed_step")
