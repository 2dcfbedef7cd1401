"""Does the store keep its promises? Checked from its log, and from outside of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio.to_thread

from trinity_buffer.errors import StoreError
from trinity_buffer.events import (
    BatchLeased,
    ExperiencesRecorded,
    PlacedFact,
    SegmentsArchived,
    StepDealt,
    kinds_of,
)
from trinity_buffer.pipeline.background import made_ahead, task_group
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.verify.evidence import (
    Evidence,
    examine_chain,
    manifest_text,
    read_evidence,
    require_trainer,
)
from trinity_buffer.pipeline.verify.log_audit import EventChain, LogAudit
from trinity_buffer.pipeline.verify.projections import (
    Progress,
    compare,
    no_progress,
    pages,
    readable_events,
    scratch_for,
)
from trinity_buffer.pipeline.verify.report import Problem, VerifyReport
from trinity_buffer.pipeline.verify.segments import (
    check_archives,
    check_segments,
    check_surroundings,
)
from trinity_buffer.store import counters, counts, log, refold, writer_queries
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.refold import Difference, Scratch, UnfoldableError
from trinity_buffer.store.rows import address_of, written_as
from trinity_buffer.store.transaction import Transaction

__all__ = ["Problem", "VerifyReport", "verify"]


async def verify(
    experiment: Experiment,
    acknowledged: Path | None = None,
    checkpoint: Path | None = None,
    *,
    quick: bool = False,
    consumer: str | None = None,
    head: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check everything that the log, its segments and its projections say of each other.

    Whether something was lost is no question to the store: ``lost`` and ``duplicated`` compare the
    log's events (never a projection) with what explorers and checkpoints noted for themselves;
    ``duplicated`` also counts what the log itself holds twice.
    Others may go on writing meanwhile; no transaction is long.

    Args:
        acknowledged: a file of lines of receipts, or of uids alone, or a folder of such files.
        checkpoint: folder of a checkpoint with its ``manifests.json``.
        quick: open no segment, and count the rows of projections instead of comparing them: a
            changed value in a projection and damage in a segment stay unseen.
        consumer: which trainer wrote the checkpoint, where several could have.
        head: of an earlier log, as hex: the log must still have it.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        InvalidArgumentError: ``acknowledged`` cannot be read, ``consumer`` is no trainer, or
            ``head`` is not a head.
        CheckpointError: the checkpoint is missing or names no manifests.
    """
    begin = time.perf_counter()
    read = partial(read_evidence, acknowledged, checkpoint, head)
    evidence = await anyio.to_thread.run_sync(read)
    verification = _Verification(experiment, evidence, progress or no_progress, quick=quick)
    await verification.run()
    return await verification.report(consumer, begin)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What the projections said in one transaction, and the head of the log then.

    Attributes:
        damage: why they cannot be counted, which are no numbers then; None: they were.
    """

    head: int
    rows: dict[str, int]
    numbers: counters.Numbers
    strategies: tuple[counts.StrategyCounts, ...]
    trainers: tuple[counts.TrainerCounts, ...]
    plans: counts.PlanCounts
    damage: str | None = None


def _snapshot(tx: Transaction, experiment: int) -> _Snapshot:
    head, rows = log.head(tx, experiment), refold.counts(tx, experiment)
    try:
        consumers = writer_queries.consumers(tx, experiment).values()
        strategies = [row for row in consumers if row.kind == "strategy"]
        trainers = [row for row in consumers if row.kind == "trainer"]
        return _Snapshot(
            head,
            rows,
            counters.numbers_of(tx, experiment),
            tuple(counts.recount_strategy(tx, experiment, row) for row in strategies),
            tuple(counts.recount_trainer(tx, experiment, row) for row in trainers),
            counts.recount_plans(tx, experiment),
        )
    except (StoreError, TypeError, ValueError) as error:
        # A value of another type, as one flipped bit makes it on SQLite, must not keep the rest
        # from being looked at.
        damage = f"the projections cannot be counted: {error}"
        return _Snapshot(head, rows, {}, (), (), counts.PlanCounts(0, 0), damage)


class _Verification:
    """One run of `verify`, on the log as it is when it begins."""

    def __init__(
        self, experiment: Experiment, evidence: Evidence, progress: Progress, *, quick: bool
    ) -> None:
        self._experiment = experiment
        self._evidence = evidence
        self._database = experiment.database
        self._key = experiment.key
        self._quick = quick
        self._progress = progress
        chain = EventChain(experiment.name, evidence.heads)
        self._audit = LogAudit(chain, contents=evidence.has_contents)
        self._unfoldable: UnfoldableError | None = None
        self._problems: list[Problem] = []
        self._segments = 0
        self._in_segments: list[tuple[bytes, Problem]] = []
        self._live: _Snapshot

    async def run(self) -> None:
        """Read the log and compare everything with it."""
        with nullcontext() if self._quick else scratch_for(self._database, self._key) as scratch:
            # Before the log is read, and up to the head of then: what comes later is neither
            # audited nor counted.
            self._live = await self._database.read(_snapshot, self._key)
            await self._read_log(scratch)
            await anyio.to_thread.run_sync(self._audit.finish)
            self._problems += self._audit.problems
            await self._compare_projections(scratch)
        self._add_up()
        await self._check_archives()
        await self._report_segments()
        around = check_surroundings(self._database, self._audit.segments, quick=self._quick)
        self._problems += await around

    async def _read_log(self, scratch: Scratch | None) -> None:
        """Audit and fold the log; a page is read while the one before is worked on."""
        log_pages = pages(self._database, self._key, after=0, up_to=self._live.head)

        async def next_page() -> list[StoredEvent] | None:
            return await anext(log_pages, None)

        async with aclosing(log_pages), made_ahead(next_page) as ahead:
            async for page in ahead:
                await self._take(page, scratch)
                self._progress("log", page[-1].position, self._live.head)

    async def _take(self, page: Sequence[StoredEvent], scratch: Scratch | None) -> None:
        leases = await self._leases_of_dealt(page)
        events = await anyio.to_thread.run_sync(self._audit.add, page, leases)
        if scratch is None:
            return
        async with task_group() as group:  # SQLite folds while segments are decoded beside it
            group.start_soon(self._fold, scratch, events)
            count, problems = await check_segments(self._database, events)
        self._segments += count
        self._in_segments += problems

    async def _fold(self, scratch: Scratch, events: Sequence[PlacedFact]) -> None:
        if self._unfoldable is None:
            try:
                await anyio.to_thread.run_sync(scratch.fold, events)
            except UnfoldableError as error:
                self._unfoldable = error

    async def _leases_of_dealt(self, page: Sequence[StoredEvent]) -> dict[int, BatchLeased]:
        """Read once more the leases of the steps that this page deals anew: they are few."""
        dealt = readable_events([stored for stored in page if stored.kind == StepDealt.__name__])
        places = {placed.fact.leased_at for placed in dealt if isinstance(placed.fact, StepDealt)}
        if not places:
            return {}
        before = sorted(place for place in places if 0 < place < page[-1].position)
        leases = readable_events(await self._database.read(log.read_at, self._key, before))
        return {at.position: at.fact for at in leases if isinstance(at.fact, BatchLeased)}

    async def _compare_projections(self, scratch: Scratch | None) -> None:
        """Compare the projections with those of another fold, and with what the audit counted."""
        miscounted, differences = self._miscounted(), list[Difference]()
        if scratch is not None and self._unfoldable is None:
            try:
                compared = compare(self._database, scratch, self._progress, readable_events)
                differences = await compared
            except UnfoldableError as error:
                self._unfoldable = error
        if (wrong := self._unfoldable) is not None:
            what = f"{wrong.kind} contradicts the events before it: {wrong.cause}"
            self._problems.append(Problem("fold", f"position {wrong.position}", what))
        if scratch is None or wrong is not None:
            self._problems += miscounted
        elif miscounted and not differences and not self._problems:
            # The fold agrees with itself, so only the audit, which shares no code with it, can
            # tell that it is the fold that is wrong.
            what = (
                "they are what the fold of this version makes of the log, and not what its events "
                f"add up to: {miscounted[0].where}: {miscounted[0].what}; please report it"
            )
            self._problems.append(Problem("projections", "all", what))
        else:
            self._problems += (
                Problem("projections", difference.table, str(difference))
                for difference in differences
            )

    def _miscounted(self) -> list[Problem]:
        """Return which tables have another number of rows, and which counters say another."""
        problems = [
            Problem("projections", table, f"it has {self._live.rows[table]} rows, the log says {n}")
            for table, n in self._audit.rows().items()
            if self._live.rows[table] != n
        ]
        live, audited = self._live.numbers, self._audit.numbers()
        problems += [
            Problem("projections", "counter", f"{key} is {live[key]}, the log says {audited[key]}")
            for key in sorted(live.keys() & audited.keys())
            if live[key] != audited[key]
        ]
        return problems

    def _add_up(self) -> None:
        if self._live.damage is not None:
            self._problems.append(Problem("conservation", "projections", self._live.damage))
            return
        everything: list[counts.StrategyCounts | counts.TrainerCounts]
        everything = [*self._live.strategies, *self._live.trainers]
        for terms in everything:
            if not terms.holds:
                what = f"the terms do not add up: {terms}"
                self._problems.append(Problem("conservation", terms.consumer, what))
        plans, stored = self._live.plans, self._audit.batches.stored()
        if plans.stored != stored:
            what = f"{plans.stored} planned runs are stored, by the log {stored}"
            self._problems.append(Problem("conservation", "plan", what))

    async def _report_segments(self) -> None:
        """Report damaged segments, except those that were archived, maybe just now."""
        archived = self._audit.archived
        if any(key not in archived for key, _ in self._in_segments):
            later = await self._database.read(
                log.read_after,
                self._key,
                self._live.head,
                limit=1 << 31,
                kinds=kinds_of(SegmentsArchived),
            )
            for event in readable_events(later):
                if isinstance(event.fact, SegmentsArchived):
                    archived |= dict.fromkeys(event.fact.segments, event.fact.uri)
        self._problems += [problem for key, problem in self._in_segments if key not in archived]

    async def _check_archives(self) -> None:
        files, archived = self._audit.files, dict(self._audit.archived)
        check = partial(check_archives, files, archived, quick=self._quick)
        self._problems += await anyio.to_thread.run_sync(lambda: list(check()))

    async def report(self, consumer: str | None, begin: float) -> VerifyReport:
        """Return everything that was found, with the proof from outside."""
        audit, chain, acknowledged = self._audit, self._evidence.chain, self._evidence.acknowledged
        if consumer is not None:
            require_trainer(audit.trainers, consumer)
        lost: tuple[str, ...] = ()
        if acknowledged is not None:
            lost = await anyio.to_thread.run_sync(acknowledged.lost, audit.uids, audit.contents)
        duplicated = await self._recorded_twice()
        trained_twice = {
            manifest_text(digest, trainer.steps.get(step))
            for trainer in audit.trainers.values()
            for step, digest in trainer.twice
        }
        if chain is not None:
            examine = partial(examine_chain, chain, audit.trainers, consumer)
            examined = await anyio.to_thread.run_sync(examine)
            lost += examined.lost
            trained_twice |= set(examined.duplicated)
            self._problems += examined.problems
        return VerifyReport(
            experiment=self._experiment.name,
            store=self._database.name,
            version=f"{self._database.dialect} {self._database.version}",
            quick=self._quick,
            events=audit.events,
            experiences=audit.experiences,
            manifests=sum(len(trainer.steps) for trainer in audit.trainers.values()),
            segments=self._segments,
            head=audit.chain.head.hex(),
            acknowledged=None if acknowledged is None else acknowledged.uids.number,
            contents=0 if acknowledged is None else acknowledged.compared.number,
            chain=None if chain is None else chain.manifests.length,
            lost_items=lost,
            duplicated_items=(*duplicated, *sorted(trained_twice)),
            problems=tuple(self._problems),
            strategies=self._live.strategies,
            trainers=self._live.trainers,
            plans=self._live.plans,
            seconds=time.perf_counter() - begin,
        )

    async def _recorded_twice(self) -> list[str]:
        """Return the experiences that two events recorded; their uids are looked up again."""
        suspected = self._audit.uids.repeated()
        if not suspected:
            return []
        places: dict[str, list[int]] = {}
        head = self._audit.position
        async for page in pages(self._database, self._key, after=0, up_to=head):
            places = await anyio.to_thread.run_sync(partial(_places, places, page, suspected))
        return [
            f"experience {uid} ({', '.join(map(written_as, addresses))})"
            for uid, addresses in places.items()
            if len(addresses) > 1
        ]


def _places(
    known: dict[str, list[int]], page: Sequence[StoredEvent], suspected: set[int]
) -> dict[str, list[int]]:
    """Return ``known`` with the addresses of the uids on this page whose hash is suspected."""
    for event in readable_events(page):
        if not isinstance(event.fact, ExperiencesRecorded):
            continue
        for slot, uid in enumerate(event.fact.columns.uids()):
            if hash(uid) in suspected:
                known.setdefault(uid, []).append(address_of(event.position, slot))
    return known
