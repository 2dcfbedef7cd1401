"""Gradient steps: which rows each one trained on, and how stale they were."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from trinity_buffer.codec.segments import Segment
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.events import BatchLeased, StepsCommitted, TrainerRewound, kinds_of
from trinity_buffer.inspector import experience
from trinity_buffer.inspector.experience import Measured, Numbers, experiments_of
from trinity_buffer.inspector.source import Source
from trinity_buffer.pipeline.handle import decoded, fact_of, require_positions
from trinity_buffer.pipeline.load.reading import rewards_by_run
from trinity_buffer.pipeline.manifest import plans_of
from trinity_buffer.store import inspection, log, trainer_queries, writer_queries
from trinity_buffer.store.row_numbers import NO_VERSION, row_numbers
from trinity_buffer.store.rows import ExperienceRow, StepRow, format_address, position_of, slot_of


@dataclass(frozen=True, slots=True)
class StepLine:
    """One gradient step.

    Attributes:
        state: ``committed`` on the live line, ``skipped`` if its commit says that the step changed
            no weights, or ``leased``.
        leased_at, committed_at: positions of the events.
        recorded_at: when it was handed out, in seconds since 1970.
        seconds: from then, or from the last rewind after which it was handed out again, to its
            commit; None before, and where the clock of the one or the other was wrong: it went
            backward in between, or two machines differ.
        rows, groups: of it, an expert's included; all that follows leaves the expert's out.
        tokens, trained_tokens: of its rows; a pair is two of them, each with the prompt.
        reward: mean over its runs, each taken once: its reward is the mean of its rows', of which
            one without a reward has that of the last. Of a set that takes the rewards of a scoring,
            these are meant, as the scoring has them now.
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
class TrainedRow:
    """A row of a gradient step, in the order of its manifest.

    Attributes:
        experiment: "" for the trainer's own, else the expert's.
        run: of its task; the rows of a run share it and the group.
        reward, run_reward: of the row and of that run, as `StepLine.reward` takes them; of an
            expert's rows as it was recorded, and None.
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


RowOrder = Literal["slot", "abs-advantage", "reward", "staleness", "length", "loss-share"]

# The slot breaks ties, so that two calls show the same order. Rows without the number come last.
ROW_ORDERS: dict[str, Callable[[TrainedRow], tuple[float, int]]] = {
    "slot": lambda row: (0, row.slot),
    "abs-advantage": lambda row: (-abs(row.advantage or 0.0), row.slot),
    "reward": lambda row: (math.inf if row.reward is None else -row.reward, row.slot),
    "staleness": lambda row: (math.inf if row.staleness is None else -row.staleness, row.slot),
    "length": lambda row: (-row.length, row.slot),
    "loss-share": lambda row: (-row.measured.get("loss_share", 0.0), row.slot),
}


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
    rows: tuple[TrainedRow, ...]


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


async def trainer_of(source: Source, wanted: str | None) -> str:
    """Return the trainer to ask about: the one that is named, or the only or busiest one.

    Raises:
        UnknownNameError: there is none of this name, or none at all.
    """
    consumers = await source.read(writer_queries.consumers, source.key)
    trainers = [row for row in consumers.values() if row.kind == "trainer"]
    # Most runs have one trainer; of several, the one furthest ahead is meant most often.
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
    rows = await _step_rows(source, name, after, limit)
    return [step.line for step in await _steps(source, name, rows)]


class _Step(NamedTuple):
    """A step as it is shown, and what that was read from.

    Attributes:
        numbers: `row_numbers` of the trainer's own rows, where known; ``slots`` of them.
    """

    line: StepLine
    lease: BatchLeased
    commit: StepsCommitted | None
    measured: Measured | None
    numbers: Numbers
    slots: Numbers


async def _steps(source: Source, trainer: str, rows: Sequence[StepRow]) -> list[_Step]:
    served, committed = [row.leased_at for row in rows], [row.committed_at or 0 for row in rows]
    times = await source.read(log.recorded_at, source.key, served)
    commits, leases = await source.events(committed), await source.leases(served)
    require_positions(source.name, filter(None, committed), commits)
    leased = [leases[at] for at in served]
    measures = await experience.measured(source, trainer, rows)
    places, kinds = [at for at in served + committed if at] or [0], kinds_of(TrainerRewound)
    stored = await source.read(
        log.read_after, source.key, min(places), limit=1 << 31, up_to=max(places), kinds=kinds
    )
    rewinds = {
        event.position: event.recorded_at
        for event in (decoded(source.name, event) for event in stored)
        if isinstance(event.fact, TrainerRewound) and event.fact.consumer == trainer
    }
    steps = []
    for row, lease, own in zip(rows, leased, await _numbers(source, leased), strict=True):
        recorded_at, seconds = times[row.leased_at] / 1e6, None
        numbers, slots = own
        versions, groups = numbers["policy_version"], _groups(lease, slots)
        lags = row.step - 1 - versions[versions != NO_VERSION]
        commit: StepsCommitted | None = None
        metrics, state = dict[str, Any](), "leased"
        if row.committed_at is not None:
            # Clocks of two machines may differ: a negative time is shown as unknown.
            # A rewind in between handed it out again: there is no lease of that.
            span = range(row.leased_at, row.committed_at)
            again = [when for at, when in rewinds.items() if at in span]
            seconds = commits[row.committed_at].recorded_at - [recorded_at, *again][-1]
            commit = fact_of(commits[row.committed_at], StepsCommitted)
            state = "skipped" if row.step in commit.skipped_steps else "committed"
            # A commit of several steps has the metrics of the last one.
            metrics = dict(commit.metrics) if commit.steps[-1] == row.step else {}
        line = StepLine(
            trainer=trainer,
            step=row.step,
            state=state,
            leased_at=row.leased_at,
            committed_at=row.committed_at,
            recorded_at=recorded_at,
            seconds=seconds if seconds is not None and seconds >= 0 else None,
            rows=row.rows,
            groups=row.groups,
            microbatches=len(lease.microbatches),
            tokens=int(numbers["length"].sum()),
            trained_tokens=int(numbers["trained_tokens"].sum()),
            reward=rewards_by_run(numbers["reward"], groups, numbers["run"], numbers["step"]).mean,
            staleness=fmean(lags.tolist()) if len(lags) else None,
            oldest=int(lags.max()) if len(lags) else None,
            checkpoint=row.checkpoint,
            metrics=measures[row.step].metrics if row.step in measures else metrics,
        )
        steps.append(_Step(line, lease, commit, measures.get(row.step), *own))
    return steps


async def blame(source: Source, step: int, *, trainer: str | None = None) -> StepContents:
    """Return the rows that gradient step ``step`` was given.

    Raises:
        UnknownNameError: no such trainer, or no such step of it.
        DamagedSegmentError: a checksum of the advantages does not hold.
    """
    name = await trainer_of(source, trainer)
    (read,) = await _steps(source, name, [await _step_at(source, name, step)])
    lease, numbers = read.lease, read.numbers
    known, experiments = await _experiences(source, lease), experiments_of(lease)
    # Annotations of an expert are events of another log, and are not read.
    named = zip(lease.annotations, experiments, known, strict=True)
    uids = {position_of(note): row.eid.uid if row else "" for note, of, row in named if not of}
    events = await experience.events_with_segments(source, uids, ["annotation"])
    actors = await _actors(source, (position_of(row.address) for row in known if row))
    of_runs = (_groups(lease, read.slots), numbers["run"], numbers["step"])
    by_run = rewards_by_run(numbers["reward"], *of_runs)
    both = zip(numbers["reward"].tolist(), by_run.means[by_run.runs].tolist(), strict=True)
    rewards = dict(zip(read.slots.tolist(), both, strict=True))
    plans = enumerate(plans_of(lease))
    parts = [(at, plan.rank) for at, plan in plans for _ in range(plan.start, plan.stop)]
    rows = []
    for slot, (row, of) in enumerate(zip(known, experiments, strict=True)):
        note, recorded = lease.annotations[slot], math.nan if row is None else row.reward
        reward, run_reward = rewards.get(slot, (recorded, math.nan))
        segment = Segment(0) if of else events[position_of(note)].segment
        version = None if row is None else row.policy_version
        rows.append(
            TrainedRow(
                slot=slot,
                uid="" if row is None else row.eid.uid,
                experiment=of,
                microbatch=parts[slot][0],
                rank=parts[slot][1],
                group=lease.groups[slot],
                run=None if row is None else row.eid.run,
                reward=None if reward is None or math.isnan(reward) else reward,
                run_reward=None if math.isnan(run_reward) else run_reward,
                advantage=experience.mean_of(segment, "advantages", slot_of(note)),
                policy_version=version,
                staleness=None if version is None else step - 1 - version,
                length=0 if row is None else row.num_tokens,
                trained_tokens=0 if row is None else row.trained_tokens,
                actor="" if row is None or of else actors.get(position_of(row.address), ""),
                annotation=format_address(note),
                address=format_address(lease.experiences[slot]),
                measured={} if read.measured is None else read.measured.of_row(note, of),
            )
        )
    digest, proven = lease.digest, None
    if read.commit is not None:
        proven = read.commit.manifests[list(read.commit.steps).index(step)] == digest
    contents = (lease.annotation_set, lease.layout, digest.hex(), proven)
    return StepContents(read.line, *contents, tuple(rows))


async def rows_of_step(
    source: Source, step: int, *, trainer: str | None = None
) -> list[ExperienceRow]:
    """Return the trainer's own experiences in gradient step ``step``, each once, by address.

    Raises:
        UnknownNameError: no such trainer, or no such step of it.
    """
    at = (await _step_at(source, await trainer_of(source, trainer), step)).leased_at
    fact = (await source.leases([at]))[at]
    places = zip(fact.experiences, experiments_of(fact), strict=True)
    own = sorted({address for address, of in places if not of})
    return await source.read(writer_queries.experience_rows, source.key, own)


async def staleness(
    source: Source, *, trainer: str | None = None, after: int | None = None, limit: int = 100
) -> list[Staleness]:
    """Return how stale steps were, by who generated their rows, where the version is known.

    Raises:
        UnknownNameError: no such trainer.
    """
    name = await trainer_of(source, trainer)
    rows = await _step_rows(source, name, after, limit)
    leases = await source.leases([row.leased_at for row in rows])
    counted = await _numbers(source, [leases[row.leased_at] for row in rows])
    dated = [numbers[numbers["policy_version"] != NO_VERSION] for numbers, _ in counted]
    positions = [[*map(position_of, numbers["address"].tolist())] for numbers in dated]
    actors = await _actors(source, chain.from_iterable(positions))
    lines = []
    for row, numbers, recorded in zip(rows, dated, positions, strict=True):
        lags: dict[str, list[int]] = defaultdict(list)
        for at, version in zip(recorded, numbers["policy_version"].tolist(), strict=True):
            lags[actors.get(at, "")].append(row.step - 1 - version)
        state = "leased" if row.committed_at is None else "committed"
        lines += [
            Staleness(row.step, by, len(ages), fmean(ages), max(ages), state)
            for by, ages in sorted(lags.items())
        ]
    return lines


async def _step_rows(source: Source, trainer: str, after: int | None, limit: int) -> list[StepRow]:
    """Return the steps above ``after``, or the last ones."""
    if after is None:
        consumer = await source.read(writer_queries.consumer_row, source.key, trainer)
        after = max(0, (consumer.leased_step if consumer else 0) - limit)
    return await source.read(trainer_queries.steps, source.key, trainer, after=after, limit=limit)


async def _actors(source: Source, positions: Iterable[int]) -> dict[int, str]:
    return await source.database.read(inspection.actors, source.key, sorted(set(positions)))


async def _step_at(source: Source, trainer: str, step: int) -> StepRow:
    row = await source.read(trainer_queries.step_at, source.key, trainer, step)
    if row is None:
        raise UnknownNameError(
            f"trainer {trainer!r} was never handed step {step}; `trinity-buffer steps` shows them"
        )
    return row


async def _experiences(source: Source, fact: BatchLeased) -> list[ExperienceRow | None]:
    """Return the experience of each row, where it is known; an expert's are looked up there."""
    names = list(zip(experiments_of(fact), fact.experiences, strict=True))
    # An address is unique within its experiment alone.
    known: dict[tuple[str, int], ExperienceRow] = {}
    for of in dict.fromkeys(name for name, _ in names):
        read = source.database.read if of else source.read
        key = await read(log.find_experiment, of) if of else source.key
        addresses = sorted({address for by, address in names if by == of})
        if key is not None:
            rows = await read(writer_queries.experience_rows, key, addresses)
            known |= {(of, row.address): row for row in rows}
    return [known.get(name) for name in names]


async def _numbers(source: Source, facts: Sequence[BatchLeased]) -> list[tuple[Numbers, Numbers]]:
    """Return `row_numbers` and slots of the trainer's own rows of each lease, where known.

    Rewards are those of the scoring that the annotation set was run with, where it was.
    """
    own = [np.flatnonzero([not of for of in experiments_of(fact)]) for fact in facts]
    asked = [np.array(f.experiences, np.int64)[slots] for f, slots in zip(facts, own, strict=True)]
    wanted = sorted({*chain.from_iterable(addresses.tolist() for addresses in asked)})
    numbers = await source.read(row_numbers, source.key, wanted)
    consumers = await source.read(writer_queries.consumers, source.key)
    # One more, so that what sorts behind the last known address is found unequal to it.
    ended, counted = np.append(numbers["address"], -1), []
    for fact, slots, addresses in zip(facts, own, asked, strict=True):
        # Sorted by address: a dict of all rows of some hundred steps would cost more.
        places = np.searchsorted(numbers["address"], addresses)
        known = ended[places] == addresses
        counted.append((numbers[places[known]], slots[known]))
        strategy = consumers.get(fact.annotation_set)
        if strategy is not None and (scoring := strategy.config.get("rewards")) is not None:
            rewarded = (source.key, scoring, addresses[known].tolist())
            given = await source.read(writer_queries.assigned_rewards, *rewarded)
            counted[-1][0]["reward"] = [given.get(at, math.nan) for at in rewarded[-1]]
    return counted


def _groups(lease: BatchLeased, slots: Numbers) -> Numbers:
    return np.array(lease.groups, np.int64)[slots]


def rewards_of_runs(rows: Sequence[TrainedRow]) -> list[float]:
    """Return the rewards of the trainer's own runs among rows of a step, each once."""
    runs = {(r.group, r.run): r.run_reward for r in rows if r.run_reward is not None}
    return list(runs.values())


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
        first_step, last_step: of all these steps, of all actors.
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


def growth_by_actor(ages: Sequence[Staleness]) -> list[StalenessGrowth]:
    """Return the growth for each actor and, if there are several, for all of them at the end."""
    actors: list[str | None] = [*sorted({age.actor for age in ages})]
    steps = sorted({age.step for age in ages})
    tenth = -(-len(steps) // 10)  # rounded up: of few steps at least one
    growths = []
    for actor in actors if len(actors) < 2 else [*actors, None]:
        own = [age for age in ages if actor in (None, age.actor)]
        begin, end = (
            Tenth(part[0], part[-1], _mean([age for age in own if age.step in part]))
            for part in (steps[:tenth], steps[-tenth:])
        )
        greatest, rows = max(age.greatest for age in own), sum(age.rows for age in own)
        ends = (steps[0], steps[-1])
        growths.append(StalenessGrowth(actor, *ends, rows, _mean(own) or 0.0, greatest, begin, end))
    return growths


def _mean(ages: list[Staleness]) -> float | None:
    rows = sum(age.rows for age in ages)
    return sum(age.mean * age.rows for age in ages) / rows if rows else None
