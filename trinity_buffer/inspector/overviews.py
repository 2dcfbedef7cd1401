"""What is in a store, how far each process is, who holds what, and what was left out by whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any

from trinity_buffer.errors import UnknownNameError
from trinity_buffer.events import BatchPlanned, BatchSealed, PolicyPublished, now_us
from trinity_buffer.inspector.source import Source
from trinity_buffer.pipeline.manifest import leased_steps
from trinity_buffer.pipeline.store import Store
from trinity_buffer.store import counters, counts, inspection, log, trainer_queries, writer_queries
from trinity_buffer.store.counts import PlanCounts, StrategyCounts, TrainerCounts
from trinity_buffer.store.leases import holder
from trinity_buffer.store.rows import ConsumerRow, format_address
from trinity_buffer.store.sqlite import log_state
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.writer_queries import DOOR

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


def _overview(tx: Transaction, name: str, key: int, as_of: int | None = None) -> ExperimentOverview:
    numbers, consumers = counters.numbers_of(tx, key), writer_queries.consumers(tx, key)

    def progress(row: ConsumerRow) -> TrainerProgress:
        backlog = trainer_queries.backlog(tx, key, row.name)
        steps = trainer_queries.steps(tx, key, row.name, after=row.leased_step - STEPS_OF_STALENESS)
        leased = leased_steps(tx, key, name, [step.leased_at for step in steps]).values()
        # An expert's rows were generated by no version of this trainer's policy.
        rows = [
            (step.manifest.step, address)
            for step in leased
            for address, source in zip_longest(step.manifest.experiences, step.manifest.source)
            if not source
        ]
        stored = writer_queries.experience_rows(tx, key, [address for _, address in rows])
        versions = {at.address: at.policy_version for at in stored if at.policy_version is not None}
        lags = [step - 1 - versions[address] for step, address in rows if address in versions]
        mean, terms = fmean(lags) if lags else None, counts.of_trainer(tx, key, row, numbers)
        last = (row.leased_step, row.committed_step)
        groups = (backlog.undelivered, backlog.uncommitted)
        return TrainerProgress(row.name, *last, mean, *groups, terms)

    own = {state: number for (consumer, state), number in numbers.items() if not consumer}
    strategies = [row for row in consumers.values() if row.kind == "strategy"]
    trainers = [row for row in consumers.values() if row.kind == "trainer"]
    config, finished = writer_queries.config_of(tx, key) or ({}, False)
    policy = writer_queries.newest_policy(tx, key, config.get("trainer") or "trainer")
    head = log.head(tx, key) if as_of is None else as_of
    times = {at: us / 1e6 for at, us in log.recorded_at(tx, key, [1, head]).items()}
    guests = sorted({consumer for consumer, _ in numbers if "/" in consumer})
    return ExperimentOverview(
        name=name,
        finished=finished,
        head=head,
        events=dict(sorted(counters.kinds(numbers).items())),
        first_at=times.get(1),
        last_at=times.get(head),
        experiences=own.get(counters.RECORDED, 0),
        batches=own.get(BatchPlanned.__name__, 0),
        sealed=own.get(BatchSealed.__name__, 0),
        plans=counts.of_plans(tx, key, numbers),
        strategies=tuple(counts.of_strategy(tx, key, row, numbers) for row in strategies),
        trainers=tuple(map(progress, trainers)),
        versions=(own.get(counters.LOWEST_VERSION), own.get(counters.HIGHEST_VERSION)),
        published=None if policy is None else policy[0],
        policies=own.get(PolicyPublished.__name__, 0),
        refused=counters.reasons(numbers, ""),
        guests={guest: counters.reasons(numbers, guest) for guest in guests},
    )


@dataclass(frozen=True, slots=True)
class Rejected:
    """One experience that was left out.

    Attributes:
        by: the strategy or trainer, or ``door``; a trainer of another experiment, which mixes in
            rows of this one, is ``EXPERIMENT/TRAINER``.
        kind: ``strategy``, ``trainer`` or ``door``.
        position: of the event that says so.
        address: ``position:slot`` of the experience; of a trainer, of the annotation.
    """

    by: str
    kind: str
    reason: str
    uid: str
    position: int
    address: str


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds a trainer's work, or decides for a strategy.

    Attributes:
        trainer: its name; of a strategy that of its set.
        state: ``held``, ``expired`` (and not taken since), or ``free``; ``forgotten`` where it is
            asked how it was: leases are in no log.
        expires_in_s: seconds from now; negative: so long ago.
        leased_step, committed_step: the last handed out, and the last committed; None of a
            strategy.
        kind: ``trainer`` or ``strategy``.
    """

    trainer: str
    state: str
    owner: str | None
    token: int
    expires_in_s: float | None
    leased_step: int | None
    committed_step: int | None
    kind: str


async def rejections(
    source: Source,
    *,
    by: str | None = None,
    reason: str | None = None,
    limit: int = 20,
    before: int | None = None,
) -> list[Rejected]:
    """Return the last rejected rows, the newest first.

    Args:
        by: only by this strategy or trainer; ``door``: what was late or invalid.
        reason: only for this reason, or for those of this kind: ``invalid`` finds
            ``invalid: reward`` too.
        limit: at most so many.
        before: only behind the row of this address; a page of one consumer begins where the last
            one ended.

    Raises:
        UnknownNameError: no such consumer.
    """
    name, key = source.name, source.key
    page: dict[str, Any] = {"reason": reason, "limit": limit, "before": before}

    def read(tx: Transaction) -> list[Rejected]:
        consumers = writer_queries.consumers(tx, key)
        # A trainer of another experiment rejects rows of this one, and is no consumer of it.
        names = list(dict.fromkeys([*consumers, *inspection.who_rejected(tx, key)]))
        if by is not None and by not in {*names, DOOR}:
            there = ", ".join([*names, DOOR])
            raise UnknownNameError(f"{name!r} has no strategy or trainer {by!r} (there: {there})")
        kinds = {name: consumers[name].kind if name in consumers else "trainer" for name in names}
        # No index finds what was refused: where nothing was, all rows would be read for it.
        refuses = counters.reasons(counters.numbers_of(tx, key), "")
        asked = [name for name in [*names, *([DOOR] if refuses else ())] if by in (None, name)]
        rows = [row for name in asked for row in inspection.rejected(tx, key, name, **page)]
        # Each consumer has given its newest; the newest of all are among them.
        rows = sorted(rows, key=lambda row: (-row.position, row.address))[:limit]
        sets = [name for name, row in consumers.items() if row.kind == "strategy"]
        noted = [row.address for row in rows if kinds.get(row.consumer) == "trainer"]
        # A trainer rejects annotations; people look for the experience.
        of_note = inspection.annotated_experiences(tx, key, sets, noted)
        addresses = [of_note.get(row.address, row.address) for row in rows]
        stored = writer_queries.experience_rows(tx, key, sorted(set(addresses)))
        uids = {row.address: row.eid.uid for row in stored}
        return [
            Rejected(
                row.consumer,
                kinds.get(row.consumer, DOOR),
                row.reason,
                uids.get(address, ""),
                row.position,
                format_address(row.address),
            )
            for row, address in zip(rows, addresses, strict=True)
        ]

    return await source.read(read)


async def rejection_counts(source: Source) -> Mapping[str, Mapping[str, int]]:
    """Return consumer -> reason -> how many it rejected; ``door`` is who refuses at the door."""
    numbers = await source.read(counters.numbers_of, source.key)
    names = sorted({name for name, _ in numbers if name})
    counted = {name: counters.reasons(numbers, name) for name in names}
    counted[DOOR] = counters.reasons(numbers, "")
    return {name: reasons for name, reasons in counted.items() if reasons}


async def leases(source: Source) -> list[Lease]:
    """Return every trainer and who holds its work, and the strategies that a process decides for.

    As it was: how far each trainer had come.
    """
    key, leases = source.key, []
    consumers = (await source.read(writer_queries.consumers, key)).values()
    for row in sorted(consumers, key=lambda row: row.kind != "trainer"):
        # Leases are in no log, so how they were is unknown: `forgotten`.
        state, trains = "free" if source.position is None else "forgotten", row.kind == "trainer"
        lease = await source.database.read(holder, key, row.name) if state == "free" else None
        if not trains and lease is None:
            continue
        owner, token, left = None, row.token, None
        if lease is not None:
            owner, token, left = lease[0], lease[1], (lease[2] - now_us()) / 1e6
            state = "held" if left > 0 else "expired"
        handed, done = (row.leased_step, row.committed_step) if trains else (None, None)
        leases.append(Lease(row.name, state, owner, token, left, handed, done, row.kind))
    return leases
