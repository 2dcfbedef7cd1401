"""Gradient steps: which rows each one trained on, and how stale they were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, repeat
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.events import BatchLeased, StepsCommitted
from trinity_buffer.inspector.experience import (
    Measured,
    Numbers,
    events_with_segments,
    mean_of,
    measured,
)
from trinity_buffer.inspector.source import Source
from trinity_buffer.pipeline.annotate.run_rewards import mean_over_runs, rewards_by_run
from trinity_buffer.pipeline.handle import Event
from trinity_buffer.store import inspection, log, trainer_queries, writer_queries
from trinity_buffer.store.row_numbers import NO_VERSION, row_numbers
from trinity_buffer.store.rows import ExperienceRow, StepRow, position_of, slot_of, written_as
from trinity_buffer.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class StepLine:
    """One gradient step.

    Attributes:
        state: ``committed`` on the live line, or ``leased``.
        leased_at, committed_at: positions of the events.
        recorded_at: when it was handed out, in seconds since 1970.
        seconds: from then to its commit; None before, and where the clock of the one or the other
            was wrong: it went backward in between, or two machines differ.
        rows, groups: of it, an expert's included; all that follows leaves the expert's out.
        tokens, trained_tokens: of its rows.
        reward: mean over its runs, each taken once: its reward is the mean of its rows', of which
            one without a reward has that of the last.
        staleness, oldest: mean and greatest (step - 1 - policy version) of its rows.
        metrics: what the trainer measured; without `StepMeasured` only at the last of a commit.
    """

    trainer: str
    step: int
    state: str
    leased_at: int
    committed_at: int | None
    recorded_at: float
    seconds: float | None
    rows: int
    groups: int
    microbatches: int
    tokens: int
    trained_tokens: int
    reward: float | None
    staleness: float | None
    oldest: int | None
    checkpoint: str | None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EatenRow:
    """A row of a gradient step, in the order of its manifest.

    Attributes:
        experiment: "" for the trainer's own, else the expert's.
        run: of its task; the rows of a run share it and the group.
        run_reward: of that run, as `StepLine.reward` takes it; None of an expert's rows.
        advantage: mean over its tokens, or the number that stands before the mask.
        annotation, address: ``position:slot`` of its annotation and of the experience.
        actor: who recorded the experience.
        measured: what the trainer measured of the row, such as its ``loss_share``.
    """

    slot: int
    uid: str
    experiment: str
    microbatch: int
    rank: int
    group: int
    run: int | None
    reward: float | None
    run_reward: float | None
    advantage: float | None
    policy_version: int | None
    staleness: int | None
    length: int
    trained_tokens: int
    actor: str
    annotation: str
    address: str
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepContents:
    """Exactly what one gradient step was given.

    Attributes:
        digest: of the manifest, as the lease recorded it.
        proven: whether the commit names the same digest; None: it is not committed.
    """

    line: StepLine
    annotation_set: str
    layout: str
    digest: str
    proven: bool | None
    rows: tuple[EatenRow, ...]


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old the rows of one step were that one actor generated, in policy versions.

    Attributes:
        state: of the step, ``committed`` or ``leased``.
    """

    step: int
    actor: str
    rows: int
    mean: float
    greatest: int
    state: str = "committed"


class _Counted(NamedTuple):
    """`NUMBERS` of the trainer's own rows of a lease, and the group of each in the step."""

    numbers: Numbers
    groups: Numbers


class _Eaten(NamedTuple):
    """Rows of a lease: for each its experience, where it is known, and the experiment it is of."""

    fact: BatchLeased
    rows: tuple[ExperienceRow | None, ...]
    experiments: tuple[str, ...]


async def trainer_of(source: Source, wanted: str | None) -> str:
    """Return the trainer to ask about: the one that is named, or the only or busiest one.

    Raises:
        UnknownNameError: there is none of this name, or none at all.
    """
    consumers = await source.read(writer_queries.consumers, source.key)
    trainers = [row for row in consumers.values() if row.kind == "trainer"]
    if wanted is None and trainers:
        return max(trainers, key=lambda row: row.leased_step).name
    if wanted not in {row.name for row in trainers} or wanted is None:
        known = ", ".join(row.name for row in trainers) or "none"
        named = "no trainer" if wanted is None else f"no trainer {wanted!r}"
        raise UnknownNameError(f"{named} in {source.name!r} (there: {known})")
    return wanted


async def steps(
    source: Source, *, trainer: str | None = None, after: int | None = None, limit: int = 20
) -> list[StepLine]:
    """Return gradient steps in order: those above ``after``, or the last ones.

    Raises:
        UnknownNameError: no such trainer.
    """
    name = await trainer_of(source, trainer)
    some = await _some(source, name, after, limit)
    events = await source.events(_positions(some))
    facts = {row.leased_at: events[row.leased_at].fact for row in some}
    leases = {at: fact for at, fact in facts.items() if isinstance(fact, BatchLeased)}
    leases |= await source.leases(list(facts.keys() - leases.keys()))
    given = [leases[row.leased_at] for row in some]
    known = await measured(source, name, [row.step for row in some])
    rows = zip(some, given, await _numbers(source, given), strict=True)
    lines = [_line(name, row, events, fact, numbers) for row, fact, numbers in rows]
    return [_with_metrics(line, known.get(line.step)) for line in lines]


async def blame(source: Source, step: int, *, trainer: str | None = None) -> StepContents:
    """Return what gradient step ``step`` was given, row by row.

    Raises:
        UnknownNameError: no such trainer, or no such step of it.
        DamagedSegmentError: a checksum of the advantages does not hold.
    """
    name = await trainer_of(source, trainer)
    found = [await _the_step(source, name, step)]
    events = await source.events(_positions(found))
    (eaten,) = await _eaten(source, found)
    (numbers,) = await _numbers(source, [eaten.fact])
    line = _line(name, found[0], events, eaten.fact, numbers)
    committed = None if line.committed_at is None else events[line.committed_at].fact
    proven = None
    if isinstance(committed, StepsCommitted):
        at = list(committed.steps).index(step)
        proven = committed.manifests[at] == eaten.fact.digest
    known = (await measured(source, name, [step])).get(step)
    return StepContents(
        _with_metrics(line, known),
        eaten.fact.annotation_set,
        eaten.fact.layout,
        eaten.fact.digest.hex(),
        proven,
        await _rows(source, eaten, known),
    )


async def rows_of_step(
    source: Source, step: int, *, trainer: str | None = None
) -> list[ExperienceRow]:
    """Return the trainer's own experiences in gradient step ``step``, each once, by address.

    Raises:
        UnknownNameError: no such trainer, or no such step of it.
    """
    row = await _the_step(source, await trainer_of(source, trainer), step)
    (eaten,) = await _eaten(source, [row])
    own = {one.address: one for one in _own(eaten)}
    return [own[address] for address in sorted(own)]


async def _the_step(source: Source, trainer: str, step: int) -> StepRow:
    found = await source.read(trainer_queries.steps, source.key, trainer, after=step - 1, limit=1)
    if not found or found[0].step != step:
        raise UnknownNameError(
            f"trainer {trainer!r} was never handed step {step}; `trinity-buffer steps` shows them"
        )
    return found[0]


async def staleness(
    source: Source, *, trainer: str | None = None, after: int | None = None, limit: int = 100
) -> list[Staleness]:
    """Return how stale steps were, by who generated their rows, where the version is known.

    Raises:
        UnknownNameError: no such trainer.
    """
    name = await trainer_of(source, trainer)
    some = await _some(source, name, after, limit)
    eaten = await _eaten(source, some)
    own = {r.address for one in eaten for r in _own(one)}
    who = await _actors(source, own)
    lags: dict[tuple[int, str], list[int]] = {}
    for one in eaten:
        for row in _own(one):
            if row.policy_version is not None:
                key = (one.fact.step, who.get(position_of(row.address), ""))
                lags.setdefault(key, []).append(one.fact.step - 1 - row.policy_version)
    states = {row.step: "leased" if row.committed_at is None else "committed" for row in some}
    return [
        Staleness(step, by, len(ages), fmean(ages), max(ages), states[step])
        for (step, by), ages in sorted(lags.items())
    ]


async def _some(source: Source, trainer: str, after: int | None, limit: int) -> list[StepRow]:
    """Return the steps above ``after``, or the last ones."""
    if after is None:
        consumer = await source.read(writer_queries.consumer_row, source.key, trainer)
        after = max(0, (consumer.leased_step if consumer else 0) - limit)
    return await source.read(trainer_queries.steps, source.key, trainer, after=after, limit=limit)


def _own(eaten: _Eaten) -> list[ExperienceRow]:
    pairs = zip(eaten.rows, eaten.experiments, strict=True)
    return [row for row, of in pairs if row is not None and of == ""]


async def _actors(source: Source, addresses: set[int]) -> dict[int, str]:
    positions = sorted({position_of(address) for address in addresses})
    return await source.database.read(inspection.actors, source.key, positions)


def _positions(some: Sequence[StepRow]) -> list[int]:
    return [at for row in some for at in (row.leased_at, row.committed_at) if at is not None]


async def _eaten(source: Source, steps: Sequence[StepRow]) -> list[_Eaten]:
    """Return the rows of steps; those of another experiment are looked up there."""
    leases = await source.leases([row.leased_at for row in steps])
    facts = [leases[row.leased_at] for row in steps]
    wanted: dict[str, set[int]] = {}
    for fact in facts:
        for of, address in zip(_experiments(fact), fact.experiences, strict=True):
            wanted.setdefault(of, set()).add(address)
    known: dict[tuple[str, int], ExperienceRow] = {}
    for of, addresses in wanted.items():
        for row in await _experiences(source, of, sorted(addresses)):
            known[of, row.address] = row
    return [
        _Eaten(
            fact,
            tuple(map(known.get, zip(_experiments(fact), fact.experiences, strict=True))),
            _experiments(fact),
        )
        for fact in facts
    ]


def _experiments(fact: BatchLeased) -> tuple[str, ...]:
    if not fact.source:
        return tuple(repeat("", len(fact.experiences)))
    names = ["", *fact.sources]
    return tuple(names[at] for at in fact.source)


async def _experiences(source: Source, of: str, addresses: list[int]) -> list[ExperienceRow]:
    if not of:
        return await source.read(writer_queries.experience_rows, source.key, addresses)

    def look(tx: Transaction) -> list[ExperienceRow]:
        key = log.find_experiment(tx, of)
        return [] if key is None else writer_queries.experience_rows(tx, key, addresses)

    return await source.database.read(look)


async def _numbers(source: Source, facts: Sequence[BatchLeased]) -> list[_Counted]:
    """Return what is counted of the trainer's own rows of each lease, where they are known."""
    sides = [[not of for of in _experiments(fact)] for fact in facts]
    own = [list(compress(f.experiences, mine)) for f, mine in zip(facts, sides, strict=True)]
    groups = [list(compress(f.groups, mine)) for f, mine in zip(facts, sides, strict=True)]
    wanted = sorted(set(chain.from_iterable(own)))
    numbers = await source.read(row_numbers, source.key, wanted)
    known, ended = numbers["address"], np.append(numbers["address"], -1)
    places = [np.searchsorted(known, some) for some in own]
    found = []
    for some, of, at in zip(own, groups, places, strict=True):
        there = ended[at] == some
        found.append(_Counted(numbers[at[there]], np.array(of, np.int64)[there]))
    return found


def _line(
    name: str, row: StepRow, events: Mapping[int, Event], fact: BatchLeased, counted: _Counted
) -> StepLine:
    leased = events[row.leased_at]
    commit = None if row.committed_at is None else events[row.committed_at]
    seconds = None if commit is None else commit.recorded_at - leased.recorded_at
    numbers = counted.numbers
    versions = numbers["policy_version"]
    lags = row.step - 1 - versions[versions != NO_VERSION]
    return StepLine(
        trainer=name,
        step=row.step,
        state="leased" if commit is None else "committed",
        leased_at=row.leased_at,
        committed_at=row.committed_at,
        recorded_at=leased.recorded_at,
        seconds=seconds if seconds is not None and seconds >= 0 else None,
        rows=row.rows,
        groups=row.groups,
        microbatches=len(fact.microbatches),
        tokens=int(numbers["length"].sum()),
        trained_tokens=int(numbers["trained_tokens"].sum()),
        reward=mean_over_runs(numbers["reward"], counted.groups, numbers["run"], numbers["step"]),
        staleness=fmean(lags.tolist()) if len(lags) else None,
        oldest=int(lags.max()) if len(lags) else None,
        checkpoint=row.checkpoint,
        metrics=_metrics(commit, row.step),
    )


def _with_metrics(line: StepLine, known: Measured | None) -> StepLine:
    """Return a line with all that its step measured, where that was recorded."""
    return line if known is None else replace(line, metrics=known.metrics)


def _metrics(commit: Event | None, step: int) -> Mapping[str, Any]:
    """Return the metrics of a commit at its last step: of the others none are recorded."""
    fact = None if commit is None else commit.fact
    if not isinstance(fact, StepsCommitted) or fact.steps[-1] != step:
        return {}
    return fact.metrics


def _run_rewards(eaten: _Eaten) -> dict[int, float]:
    """Return slot -> reward of the run, of the trainer's own rows where one is known."""
    slots = [at for at, row in enumerate(eaten.rows) if row and not eaten.experiments[at]]
    rows = [row for row in map(eaten.rows.__getitem__, slots) if row is not None]
    rewards = rewards_by_run(
        np.array([row.reward for row in rows], np.float64),
        np.array([eaten.fact.groups[slot] for slot in slots], np.int64),
        np.array([row.eid.run for row in rows], np.int64),
        np.array([row.eid.step for row in rows], np.int64),
    )
    pairs = zip(slots, rewards.tolist(), strict=True)
    return {slot: reward for slot, reward in pairs if not math.isnan(reward)}


def rewards_of_runs(rows: Sequence[EatenRow]) -> list[float]:
    """Return the rewards of the trainer's own runs among rows of a step, each once."""
    runs = {(r.group, r.run): r.run_reward for r in rows if r.run_reward is not None}
    return list(runs.values())


async def _rows(source: Source, eaten: _Eaten, known: Measured | None) -> tuple[EatenRow, ...]:
    fact = eaten.fact
    rows = zip(fact.annotations, eaten.experiments, eaten.rows, strict=True)
    own = {position_of(a): "" if row is None else row.eid.uid for a, of, row in rows if not of}
    events = await events_with_segments(source, own, ["annotation"])
    who = await _actors(source, {row.address for row in _own(eaten)})
    of_runs = _run_rewards(eaten)
    found = []
    for slot, (row, of) in enumerate(zip(eaten.rows, eaten.experiments, strict=True)):
        note = fact.annotations[slot]
        segment = None if of else events[position_of(note)].families.get("annotation")
        at, (_, _, _, rank) = next(
            (i, span) for i, span in enumerate(fact.microbatches) if span[0] <= slot < span[1]
        )
        version = None if row is None else row.policy_version
        found.append(
            EatenRow(
                slot=slot,
                uid="" if row is None else row.eid.uid,
                experiment=of,
                microbatch=at,
                rank=rank,
                group=fact.groups[slot],
                run=None if row is None else row.eid.run,
                reward=None if row is None else row.reward,
                run_reward=of_runs.get(slot),
                advantage=None
                if segment is None
                else mean_of(segment, "advantages", slot_of(note)),
                policy_version=version,
                staleness=None if version is None else fact.step - 1 - version,
                length=0 if row is None else row.length,
                trained_tokens=0 if row is None else row.trained_tokens,
                actor="" if row is None or of else who.get(position_of(row.address), ""),
                annotation=written_as(note),
                address=written_as(fact.experiences[slot]),
                measured={} if known is None else known.of_row(note, of),
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Tenth:
    """One end of some steps.

    Attributes:
        first, last: step of it.
        mean: staleness of an actor's rows in these steps; None: it has none there.
    """

    first: int
    last: int
    mean: float | None


@dataclass(frozen=True, slots=True)
class StalenessGrowth:
    """How stale the rows of one actor were over some steps, and whether that grew.

    Attributes:
        actor: None: all of them.
        first_step, last_step: of all these steps, whoever generated their rows.
        begin, end: the first tenth of them and the last.
    """

    actor: str | None
    first_step: int
    last_step: int
    rows: int
    mean: float
    greatest: int
    begin: Tenth
    end: Tenth


def growth_by_actor(found: Sequence[Staleness]) -> list[StalenessGrowth]:
    """Return the growth for each actor and, if there are several, for all of them at the end."""
    names: Sequence[str | None] = sorted({one.actor for one in found})
    steps = sorted({one.step for one in found})
    return [
        _growth(name, [one for one in found if name in (None, one.actor)], steps)
        for name in (names if len(names) < 2 else [*names, None])
    ]


def _growth(actor: str | None, own: list[Staleness], steps: list[int]) -> StalenessGrowth:
    tenth = -(-len(steps) // 10)
    begin, end = (
        Tenth(some[0], some[-1], _mean([one for one in own if some[0] <= one.step <= some[-1]]))
        for some in (steps[:tenth], steps[-tenth:])
    )
    return StalenessGrowth(
        actor,
        first_step=steps[0],
        last_step=steps[-1],
        rows=sum(one.rows for one in own),
        mean=_mean(own) or 0.0,
        greatest=max(one.greatest for one in own),
        begin=begin,
        end=end,
    )


def _mean(some: list[Staleness]) -> float | None:
    rows = sum(one.rows for one in some)
    return sum(one.mean * one.rows for one in some) / rows if rows else None
