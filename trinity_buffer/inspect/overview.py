"""What is in a store, and how far everybody is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from statistics import fmean

from trinity_buffer.pipeline.leased_steps import leased_steps
from trinity_buffer.pipeline.store import Store
from trinity_buffer.store import conservation, inspection, log, queries, tallies, trainer_queries
from trinity_buffer.store.conservation import PlanCounts, StrategyCounts, TrainerCounts
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.write_ahead_log import log_state

STEPS_OF_STALENESS = 100


@dataclass(frozen=True, slots=True)
class TrainerProgress:
    """How far a trainer is.

    Attributes:
        leased, committed: the last gradient step handed out, and the last one committed.
        staleness: mean of (step - 1 - policy version) over the rows of the last 100 steps; None
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
        refused: experiences that were recorded as late or invalid, by reason.
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
    database = store.database
    if experiment is None:
        keys = await database.read(log.experiment_names)
    else:
        keys = {experiment: (await store.experiment(experiment)).key}
    found = [await database.read(_of_experiment, key, name) for name, key in keys.items()]
    size = await database.read(inspection.size_bytes)
    parts = await database.read(inspection.segment_parts)
    growth = None
    if database.dialect == "sqlite":
        state = log_state(database.path)
        size += state.size_bytes
        growth = state.told() if state.has_grown else None
    version = f"{'SQLite' if database.dialect == 'sqlite' else 'PostgreSQL'} {database.version}"
    return Overview(store.url, version, size, parts, tuple(found), growth)


def _of_experiment(tx: Transaction, key: int, name: str) -> ExperimentOverview:
    config = queries.config_of(tx, key)
    bounds = inspection.log_bounds(tx, key)
    kinds = inspection.kinds(tx, key)
    batches, sealed = inspection.batch_counts(tx, key)
    consumers = queries.consumers(tx, key).values()
    newest = queries.newest_policy(tx, key)
    strategies = [row for row in consumers if row.kind == "strategy"]
    recorded = tallies.recorded(tx, key)
    trainers = [_of_trainer(tx, key, name, row) for row in consumers if row.kind == "trainer"]
    return ExperimentOverview(
        name=name,
        finished=config is not None and config[1],
        head=bounds.events,
        events=kinds,
        first_at=None if bounds.first_at is None else bounds.first_at / 1e6,
        last_at=None if bounds.last_at is None else bounds.last_at / 1e6,
        experiences=recorded.number,
        batches=batches,
        sealed=sealed,
        plans=conservation.of_plans(tx, key),
        strategies=tallies.of_strategies(tx, key, strategies, recorded),
        trainers=tuple(trainers),
        versions=(recorded.lowest_version, recorded.highest_version),
        published=None if newest is None else newest[0],
        policies=inspection.published_versions(tx, key),
    )


def _of_trainer(tx: Transaction, key: int, name: str, row: ConsumerRow) -> TrainerProgress:
    backlog = trainer_queries.backlog(tx, key, row.name)
    return TrainerProgress(
        row.name,
        row.leased_step,
        row.committed_step,
        _staleness(tx, key, name, row),
        backlog.undelivered,
        backlog.uncommitted,
        tallies.of_trainer(tx, key, row),
    )


def _staleness(tx: Transaction, key: int, name: str, row: ConsumerRow) -> float | None:
    after = row.leased_step - STEPS_OF_STALENESS
    recent = trainer_queries.steps(tx, key, row.name, after=after)
    own: list[tuple[int, int]] = []
    for leased in leased_steps(tx, key, name, [step.leased_at for step in recent]).values():
        sources = leased.source or repeat(0)
        own += [
            (leased.step, address)
            for address, source in zip(leased.experiences, sources, strict=False)
            if source == 0
        ]
    versions = inspection.known_policy_versions(tx, key, [address for _, address in own])
    lags = [step - 1 - versions[address] for step, address in own if address in versions]
    return fmean(lags) if lags else None
