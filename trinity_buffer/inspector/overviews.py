"""What is in a store, and how far each process is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from statistics import fmean

from trinity_buffer.events import BatchPlanned, BatchSealed, PolicyPublished
from trinity_buffer.inspector.source import Source
from trinity_buffer.pipeline.manifest import leased_steps
from trinity_buffer.pipeline.store import Store
from trinity_buffer.store import counters, counts, inspection, log, trainer_queries, writer_queries
from trinity_buffer.store.counters import Numbers
from trinity_buffer.store.counts import PlanCounts, StrategyCounts, TrainerCounts
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.wal import log_state

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
    """Return the overview of a store: of one experiment, or of all.

    Raises:
        UnknownExperimentError: there is none of this name.
    """
    database = store.database
    chosen = None if experiment is None else (await store.experiment(experiment)).key

    # One transaction for all, so that the numbers of a store fit together.
    def read(tx: Transaction) -> tuple[ExperimentOverview, ...]:
        keys = log.experiment_names(tx) if experiment is None else {experiment: chosen or 0}
        return tuple(_overview(tx, name, key) for name, key in keys.items())

    experiments = await database.read(read)
    size = await database.read(inspection.size_bytes)
    parts = await database.read(database.segments.segment_parts)
    growth = None
    if database.dialect == "sqlite":
        state = await database.compute(log_state, database.path)
        size += state.size_bytes
        growth = state.message() if state.has_grown else None
    version = f"{'SQLite' if database.dialect == 'sqlite' else 'PostgreSQL'} {database.version}"
    return Overview(store.url, version, size, parts, experiments, growth)


async def overview_of(source: Source) -> ExperimentOverview:
    """Return one experiment in numbers, as it is or as it was."""
    return await source.read(_overview, source.name, source.key, source.position)


def _overview(
    tx: Transaction, name: str, key: int, position: int | None = None
) -> ExperimentOverview:
    numbers, consumers = counters.numbers_of(tx, key), writer_queries.consumers(tx, key)
    config, finished = writer_queries.config_of(tx, key) or ({}, False)
    policy = writer_queries.newest_policy(tx, key, config.get("trainer", "trainer"))
    head, first_at, last_at = counts.log_ends(tx, key, position)
    guests = sorted({consumer for consumer, _ in numbers if "/" in consumer})
    return ExperimentOverview(
        name=name,
        finished=finished,
        head=head,
        events=dict(sorted(counters.kinds(numbers).items())),
        first_at=first_at,
        last_at=last_at,
        experiences=numbers.get(("", counters.RECORDED), 0),
        batches=numbers.get(("", BatchPlanned.__name__), 0),
        sealed=numbers.get(("", BatchSealed.__name__), 0),
        plans=counts.of_plans(tx, key, numbers),
        strategies=tuple(
            counts.of_strategy(tx, key, row, numbers)
            for row in consumers.values()
            if row.kind == "strategy"
        ),
        trainers=tuple(
            _progress(tx, name, key, row, consumers, numbers)
            for row in consumers.values()
            if row.kind == "trainer"
        ),
        versions=(
            numbers.get(("", counters.LOWEST_VERSION)),
            numbers.get(("", counters.HIGHEST_VERSION)),
        ),
        published=None if policy is None else policy[0],
        policies=numbers.get(("", PolicyPublished.__name__), 0),
        refused=counters.reasons(numbers, ""),
        guests={guest: counters.reasons(numbers, guest) for guest in guests},
    )


def _progress(
    tx: Transaction,
    experiment: str,
    key: int,
    row: ConsumerRow,
    consumers: Mapping[str, ConsumerRow],
    numbers: Numbers,
) -> TrainerProgress:
    counted, delivered, committed = counts.of_trainer(tx, key, row, numbers)
    strategy = consumers.get(counted.annotation_set)
    # A rejected group is on its way to no trainer any more.
    rejected = row.rejected_groups + (strategy.rejected_groups if strategy else 0)
    groups = numbers.get(("", counters.PLANNED_GROUPS), 0) - rejected
    steps = trainer_queries.steps(tx, key, row.name, after=row.leased_step - STEPS_OF_STALENESS)
    leased = leased_steps(tx, key, experiment, [step.leased_at for step in steps]).values()
    # An expert's rows were generated by no version of this trainer's policy.
    rows = [
        (manifest.step, address)
        for manifest in (step.manifest for step in leased)
        for address, source in zip(manifest.experiences, manifest.source or repeat(0), strict=False)
        if source == 0
    ]
    versions = inspection.known_policy_versions(tx, key, [address for _, address in rows])
    lags = [step - 1 - versions[address] for step, address in rows if address in versions]
    return TrainerProgress(
        row.name,
        row.leased_step,
        row.committed_step,
        fmean(lags) if lags else None,
        groups - delivered,
        groups - committed,
        counted,
    )
