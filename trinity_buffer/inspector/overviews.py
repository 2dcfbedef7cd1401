"""What is in a store, and how far everybody is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import fmean

from trinity_buffer.events import BatchLeased
from trinity_buffer.inspector.source import Source
from trinity_buffer.pipeline.leased_steps import leased_steps
from trinity_buffer.pipeline.store import Store
from trinity_buffer.store import counters, counts, inspection, log, trainer_queries
from trinity_buffer.store.counts import (
    BatchCounts,
    LogCounts,
    PlanCounts,
    PolicyCounts,
    StrategyCounts,
    TrainerCounts,
    TrainerTally,
)
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.write_ahead_log import log_state

STEPS_OF_STALENESS = 20


@dataclass(frozen=True, slots=True)
class TrainerProgress:
    """How far a trainer is.

    Attributes:
        leased, committed: the last gradient step handed out, and the last one committed.
        staleness: mean of (step - 1 - policy version) over the rows of the last 20 steps; None
            where no version is known.
        undelivered, uncommitted: planned groups on their way to it, and to its commits.
    """

    name: str
    leased: int
    committed: int
    staleness: float | None
    undelivered: int
    uncommitted: int
    counts: TrainerCounts


@dataclass(frozen=True, slots=True)
class ExperimentOverview:
    """One experiment in numbers.

    Attributes:
        events: of each kind.
        first_at, last_at: seconds since 1970.
        batches, sealed: planned, and sealed.
        plans: planned rollouts, and those stored.
        refused: experiences that were recorded as late or invalid, by reason; a strategy counts
            them among those that it rejected.
        guests: ``EXPERIMENT/TRAINER`` of each trainer of another experiment that rejected rows of
            this one, its expert -> reason -> how many.
        versions: the lowest and highest policy version that generated something.
        published: the newest policy version, None before the first; ``policies`` counts them.
    """

    name: str
    finished: bool
    head: int
    events: dict[str, int]
    first_at: float | None
    last_at: float | None
    experiences: int
    batches: int
    sealed: int
    plans: PlanCounts
    strategies: tuple[StrategyCounts, ...]
    trainers: tuple[TrainerProgress, ...]
    versions: tuple[int | None, int | None]
    published: int | None
    policies: int
    refused: dict[str, int]
    guests: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Overview:
    """A store in numbers.

    Attributes:
        version: of the SQLite library, or of the PostgreSQL server.
        size_bytes: of the database on disk, with its write-ahead log.
        segment_parts: blobs of tensors, of all experiments.
        growth: what lets the write-ahead log grow beyond its size, None where nothing does.
    """

    url: str
    version: str
    size_bytes: int
    segment_parts: int
    experiments: tuple[ExperimentOverview, ...]
    growth: str | None


async def overview(store: Store, experiment: str | None = None) -> Overview:
    """Return what is in ``store``; of one experiment, or of all.

    Raises:
        UnknownExperimentError: there is none of this name.
    """
    database, of = store.database, None
    if experiment is not None:
        of = (await store.experiment(experiment)).key
    found = await database.read(_experiments, experiment, of)
    size = await database.read(inspection.size_bytes)
    parts = await database.read(database.segments.segment_parts)
    growth = None
    if database.dialect == "sqlite":
        state = await database.compute(log_state, database.path)
        size += state.size_bytes
        growth = state.told() if state.has_grown else None
    version = f"{'SQLite' if database.dialect == 'sqlite' else 'PostgreSQL'} {database.version}"
    return Overview(store.url, version, size, parts, tuple(found), growth)


async def overview_of(source: Source) -> ExperimentOverview:
    """Return one experiment in numbers, as it is or as it was."""
    projected = (await source.read(_projected, [source.key], source.key))[source.key]
    logged = (await source.database.read(counts.logs, source.key, source.position))[source.key]
    staleness: dict[str, float | None] = {}
    for name, served_at in projected.served.items():
        own = _own_rows((await source.leases(served_at)).values())
        addresses = [address for _, address in own]
        versions = await source.read(inspection.known_policy_versions, source.key, addresses)
        staleness[name] = _mean_lag(own, versions)
    return _of_experiment(source.name, logged, projected, staleness)


def _experiments(tx: Transaction, name: str | None, of: int | None) -> list[ExperimentOverview]:
    keys = log.experiment_names(tx) if name is None or of is None else {name: of}
    logs, projected = counts.logs(tx, of), _projected(tx, list(keys.values()), of)
    found = []
    for one, key in keys.items():
        staleness = {
            trainer: _staleness(tx, key, one, served_at)
            for trainer, served_at in projected[key].served.items()
        }
        found.append(_of_experiment(one, logs[key], projected[key], staleness))
    return found


@dataclass(frozen=True, slots=True)
class _Projected:
    """What the projections say of one experiment.

    Attributes:
        trainers: each with its name, and how far it was handed out and committed.
        served: trainer -> where its last steps were handed out.
    """

    finished: bool
    batches: BatchCounts
    policies: PolicyCounts
    numbers: counters.Numbers
    rows: Mapping[str, ConsumerRow]
    strategies: tuple[StrategyCounts, ...]
    trainers: tuple[TrainerTally, ...]
    served: Mapping[str, Sequence[int]]


def _projected(tx: Transaction, keys: Sequence[int], of: int | None) -> dict[int, _Projected]:
    finished, consumers = counts.finished(tx, of), counts.consumers(tx, of)
    numbers = counters.all_numbers(tx) if of is None else {of: counters.numbers_of(tx, of)}
    found = {}
    for key in keys:
        own, rows = numbers.get(key, {}), consumers.get(key, [])
        trainers = [row for row in rows if row.kind == "trainer"]
        found[key] = _Projected(
            finished.get(key, False),
            counts.batches(tx, key, own),
            counts.policies(tx, key, own),
            own,
            {row.name: row for row in rows},
            tuple(counts.of_strategy(tx, key, r, own) for r in rows if r.kind == "strategy"),
            tuple(counts.of_trainer(tx, key, row, own) for row in trainers),
            {row.name: _last_served(tx, key, row) for row in trainers},
        )
    return found


def _last_served(tx: Transaction, key: int, row: ConsumerRow) -> list[int]:
    after = row.leased_step - STEPS_OF_STALENESS
    return [step.leased_at for step in trainer_queries.steps(tx, key, row.name, after=after)]


def _of_experiment(
    name: str,
    logged: LogCounts,
    projected: _Projected,
    staleness: Mapping[str, float | None],
) -> ExperimentOverview:
    numbers, plans = projected.numbers, projected.batches
    recorded = counts.recorded(numbers)
    guests = sorted({consumer for consumer, _ in numbers if "/" in consumer})
    return ExperimentOverview(
        name=name,
        finished=projected.finished,
        head=logged.events,
        events=dict(sorted(counters.kinds(numbers).items())),
        first_at=None if logged.first_at is None else logged.first_at / 1e6,
        last_at=None if logged.last_at is None else logged.last_at / 1e6,
        experiences=recorded.number,
        batches=plans.planned,
        sealed=plans.sealed,
        plans=plans.plans,
        strategies=projected.strategies,
        trainers=tuple(_progress(projected, tally, staleness) for tally in projected.trainers),
        versions=(recorded.lowest_version, recorded.highest_version),
        published=projected.policies.newest,
        policies=projected.policies.number,
        refused=recorded.refused,
        guests={guest: counters.reasons(numbers, guest) for guest in guests},
    )


def _progress(
    projected: _Projected, tally: TrainerTally, staleness: Mapping[str, float | None]
) -> TrainerProgress:
    row = projected.rows[tally.counts.consumer]
    strategy = projected.rows.get(tally.counts.annotation_set)
    rejected = row.rejected_groups + (strategy.rejected_groups if strategy else 0)
    groups = projected.batches.groups - rejected
    return TrainerProgress(
        row.name,
        row.leased_step,
        row.committed_step,
        staleness[row.name],
        groups - tally.groups_delivered,
        groups - tally.groups_committed,
        tally.counts,
    )


def _staleness(tx: Transaction, key: int, name: str, served_at: Sequence[int]) -> float | None:
    own = _own_rows(leased_steps(tx, key, name, served_at).values())
    versions = inspection.known_policy_versions(tx, key, [address for _, address in own])
    return _mean_lag(own, versions)


def _own_rows(steps: Iterable[BatchLeased]) -> list[tuple[int, int]]:
    """Return (step, address) of each experience that is no expert's."""
    own: list[tuple[int, int]] = []
    for leased in steps:
        sources = leased.source or repeat(0)
        own += [
            (leased.step, address)
            for address, source in zip(leased.experiences, sources, strict=False)
            if source == 0
        ]
    return own


def _mean_lag(own: Sequence[tuple[int, int]], versions: Mapping[int, int]) -> float | None:
    lags = [step - 1 - versions[address] for step, address in own if address in versions]
    return fmean(lags) if lags else None
