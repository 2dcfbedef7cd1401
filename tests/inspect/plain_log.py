"""What the events and segments of one experiment say, read by nothing but loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from tests.handles import Event, Experiment
from trinity_buffer.codec.segments import Segment, decode_segment
from trinity_buffer.events import (
    MEASURED_ROWS,
    BatchLeased,
    BatchPlanned,
    BatchSealed,
    ConsumerRegistered,
    ExperiencesAnnotated,
    ExperiencesRecorded,
    ExperiencesRejected,
    PolicyPublished,
    StepDealt,
    StepMeasured,
    StepsCommitted,
    TrainerRewound,
)
from trinity_buffer.pipeline.load.reading import blobs_of, read_segments


def address(position: int, slot: int) -> int:
    """Return how events name a row."""
    return position * 2**20 + slot


@dataclass
class Row:
    """An experience, as its event says; the set or trainer that rejected it -> why."""

    at: int
    uid: str
    batch: Any
    task: Any
    run: int
    step: int
    reward: float | None
    version: int | None
    length: int
    trained_tokens: int
    actor: str
    refused: str | None
    advantages: dict[str, float] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)


@dataclass
class Eaten:
    """A row of a step: where its annotation is, and an expert's experiment."""

    note: int
    experience: int
    group: int
    source: str
    microbatch: int
    rank: int


@dataclass
class Step:
    """A step as it is served now."""

    number: int
    leased_at: int
    recorded_at: float
    rows: list[Eaten]
    groups: int
    planned_groups: int
    microbatches: int
    digest: bytes
    commit: Event | None = None
    rewound_at: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trainer:
    """What one trainer was handed and committed."""

    annotation_set: str
    steps: dict[int, Step] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)

    @property
    def committed(self) -> list[Step]:
        return [step for step in self.steps.values() if step.commit is not None]


@dataclass
class Log:
    """One experiment."""

    events: list[Event] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    rows: dict[int, Row] = field(default_factory=dict)
    plans: dict[Any, tuple[list[Any], int]] = field(default_factory=dict)
    sealed: set[Any] = field(default_factory=set)
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    guests: dict[str, Counter[str]] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)
    notes: dict[int, int] = field(default_factory=dict)


async def log_of(experiment: Experiment, up_to: int | None = None) -> Log:
    """Read an experiment, or what it was at a position."""
    log = Log()
    async for event in experiment.events():
        if up_to is not None and event.position > up_to:
            break
        log.events.append(event)
        log.kinds[event.kind] += 1
        match event.fact:
            case ExperiencesAnnotated() as fact:
                family = await _family(experiment, fact.segment, "annotation")
                _annotated(log, event, fact, family)
            case StepMeasured() as fact:
                family = await _family(experiment, fact.segment, MEASURED_ROWS)
                step = log.trainers[fact.consumer].steps[fact.step]
                step.metrics = dict(fact.metrics)
                step.measured = {n: some[0].elements for n, some in family.columns.items()}
            case fact:
                _TAKEN.get(type(fact), _nothing)(log, event, fact)
    return log


async def _family(experiment: Experiment, key: bytes, family: str) -> Segment:
    def read(s: Any) -> Segment:
        return decode_segment(blobs_of(read_segments(s, [key], [family]).parts)[key][family])

    return await experiment.database.read_session(read)


def _recorded(log: Log, event: Event, fact: ExperiencesRecorded) -> None:
    some = fact.columns
    for slot, uid in enumerate(some.uids()):
        at = address(event.position, slot)
        log.rows[at] = Row(
            at,
            uid,
            some.batch[slot],
            some.task[slot],
            some.run[slot],
            some.step[slot],
            some.reward[slot],
            some.policy_version[slot],
            some.length[slot],
            some.trained_tokens[slot],
            event.actor,
            fact.refused.get(slot),
        )


def _annotated(log: Log, event: Event, fact: ExperiencesAnnotated, family: Segment) -> None:
    own = log.sets[fact.consumer]
    own["seen"], own["calls"] = fact.seen, fact.calls
    for slot, experience in enumerate(fact.experiences):
        note = address(event.position, slot)
        log.notes[note] = experience
        own["rows"] += 1
        log.rows[experience].notes.setdefault(fact.consumer, note)
        values = _values(family, "advantages", slot)
        if values:
            log.rows[experience].advantages[fact.consumer] = fmean(values)


def _values(family: Segment, name: str, slot: int) -> list[float]:
    for column in family.columns.get(name, []):
        there = list(range(family.rows)) if column.rows is None else column.rows.tolist()
        if slot in there:
            place = there.index(slot)
            begin, end = column.offsets[place], column.offsets[place + 1]
            return [float(value) for value in column.elements[begin:end]]
    return []


def _rejected(log: Log, _: Event, fact: ExperiencesRejected) -> None:
    pairs = list(zip(fact.experiences, fact.reasons, strict=True))
    if fact.consumer in log.sets:
        own = log.sets[fact.consumer]
        own["seen"], own["calls"] = fact.seen or 0, fact.calls or 0
        own["planned"] += fact.planned_groups
        for experience, reason in pairs:
            log.rows[experience].rejected[fact.consumer] = reason
    elif fact.consumer in log.trainers:
        assert not fact.planned_groups
        log.trainers[fact.consumer].rejected |= dict(pairs)
    else:
        log.guests.setdefault(fact.consumer, Counter()).update(reason for _, reason in pairs)


def _leased(log: Log, event: Event, fact: BatchLeased) -> None:
    names = ["", *fact.sources]
    places = [
        (at, rank)
        for at, (start, stop, _, rank) in enumerate(fact.microbatches)
        for _ in range(start, stop)
    ]
    rows = [
        Eaten(note, experience, group, names[source], *place)
        for note, experience, group, source, place in zip(
            fact.annotations,
            fact.experiences,
            fact.groups,
            fact.source or [0] * len(fact.groups),
            places,
            strict=True,
        )
    ]
    log.trainers[fact.consumer].steps[fact.step] = Step(
        fact.step,
        event.position,
        event.recorded_at,
        rows,
        fact.num_groups,
        fact.planned_groups,
        len(fact.microbatches),
        fact.digest,
    )


def _dealt(log: Log, event: Event, fact: StepDealt) -> None:
    step = log.trainers[fact.consumer].steps[fact.step]
    step.rows = [step.rows[place] for place in fact.order]
    step.leased_at, step.recorded_at = event.position, event.recorded_at
    step.groups = len({row.group for row in step.rows})
    step.microbatches, step.digest = len(fact.microbatches), fact.digest
    for at, (start, stop, _, rank) in enumerate(fact.microbatches):
        for row in step.rows[start:stop]:
            row.microbatch, row.rank = at, rank


def _committed(log: Log, event: Event, fact: StepsCommitted) -> None:
    for number in fact.steps:
        step = log.trainers[fact.consumer].steps[number]
        step.commit, step.measured = event, {}
        step.metrics = dict(fact.metrics) if number == fact.steps[-1] else {}


def _rewound(log: Log, event: Event, fact: TrainerRewound) -> None:
    for number, step in log.trainers[fact.consumer].steps.items():
        if number > fact.step:
            step.commit, step.metrics, step.measured = None, {}, {}
            step.rewound_at = event.recorded_at


def _registered(log: Log, _: Event, fact: ConsumerRegistered) -> None:
    if fact.kind == "strategy":
        fresh = {"seen": 0, "calls": 0, "rows": 0, "planned": 0}
        log.sets.setdefault(fact.consumer, fresh)
    else:
        log.trainers.setdefault(fact.consumer, Trainer(fact.config["strategy"]))


def _planned(log: Log, _: Event, fact: BatchPlanned) -> None:
    log.plans[fact.batch] = (list(fact.tasks), fact.rollouts_per_group)


def _nothing(_: Log, __: Event, ___: object) -> None:
    pass


_TAKEN: dict[type, Callable[[Log, Event, Any], None]] = {
    BatchPlanned: _planned,
    BatchSealed: lambda log, _, fact: log.sealed.add(fact.batch),
    ExperiencesRecorded: _recorded,
    ConsumerRegistered: _registered,
    ExperiencesRejected: _rejected,
    PolicyPublished: lambda log, _, fact: log.published.append(fact.number),
    BatchLeased: _leased,
    StepDealt: _dealt,
    StepsCommitted: _committed,
    TrainerRewound: _rewound,
}
