"""Does the store keep its promises? Checked from its log, and from outside of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeAlias

import anyio.to_thread

from trinity_buffer.errors import CodecError
from trinity_buffer.pipeline import outside
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.findings import Problem, VerifyReport
from trinity_buffer.pipeline.log_audit import LogAudit, uids_of
from trinity_buffer.pipeline.refold import (
    SHORT_TAIL,
    Progress,
    Suspects,
    confirmed,
    decoded_events,
    no_progress,
    pages,
    scratch_for,
    suspects,
)
from trinity_buffer.pipeline.segment_audit import check_segments
from trinity_buffer.store import comparison, conservation, log, queries
from trinity_buffer.store.address import address_of, written_as
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.scratch import Scratch, Unfoldable
from trinity_buffer.store.transaction import Transaction

__all__ = ["Problem", "VerifyReport", "verify"]


async def verify(
    experiment: Experiment,
    acknowledged: Path | None = None,
    checkpoint: Path | None = None,
    *,
    quick: bool = False,
    consumer: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check everything that the log, its segments and its projections say of each other.

    Whether something was lost is no question to the store: ``lost`` and ``duplicated`` compare the
    log's events (never a projection) with what explorers and checkpoints noted for themselves.
    Others may go on writing meanwhile; no transaction is long.

    Args:
        acknowledged: a file of uids, one a line, or a folder of such files.
        checkpoint: folder of a checkpoint with its ``manifests.json``.
        quick: open no segment, and count the rows of projections instead of comparing them.
        consumer: which trainer wrote the checkpoint, where several could have.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        InvalidArgumentError: ``acknowledged`` cannot be read, or ``consumer`` is no trainer.
        CheckpointError: the checkpoint is missing or names no manifests.
    """
    begin = time.perf_counter()
    uids = None
    if acknowledged is not None:
        uids = await anyio.to_thread.run_sync(outside.read_acknowledged, Path(acknowledged))
    chain = None
    if checkpoint is not None:
        chain = await anyio.to_thread.run_sync(outside.read_chain, Path(checkpoint))
    async with AsyncExitStack() as stack:
        scratch = None
        if not quick:
            opening = scratch_for(experiment.database, experiment.key)
            scratch = await stack.enter_async_context(opening)
        run = _Verification(experiment, scratch, progress or no_progress)
        await run.look()
    return await run.report(uids, chain, consumer, begin)


Counts: TypeAlias = conservation.StrategyCounts | conservation.TrainerCounts


class _Verification:
    """One run of `verify`; with a scratch it is not a quick one."""

    def __init__(self, experiment: Experiment, scratch: Scratch | None, progress: Progress) -> None:
        self._experiment = experiment
        self._database = experiment.database
        self._key = experiment.key
        self._scratch = scratch
        self._progress = progress
        self._audit = LogAudit()
        self._problems: list[Problem] = []
        self._segments = 0
        self._in_segments: list[tuple[bytes, Problem]] = []
        self._unfoldable: Unfoldable | None = None
        self._strategies: list[conservation.StrategyCounts] = []
        self._trainers: list[conservation.TrainerCounts] = []
        self._plans = conservation.PlanCounts(0, 0)

    async def look(self) -> None:
        """Read the log and compare everything with it."""
        await self._read_log()
        found = None
        if self._scratch is not None and self._unfoldable is None:
            found = await suspects(self._database, self._scratch, self._progress)
            await self._read_log()
        async with self._database.reading() as tx:
            tail = await log.read_after(tx, self._key, self._audit.position, limit=1 << 31)
            await self._take(tail)
            await self._compare(tx, found)
        await self._look_into_segments(tail)
        await anyio.to_thread.run_sync(self._audit.finish)
        archived = self._audit.archived
        self._problems += [problem for key, problem in self._in_segments if key not in archived]
        self._problems[:0] = self._audit.problems

    async def _read_log(self) -> None:
        """Read what is in the log, and go on while many more events come."""
        behind = 1 + SHORT_TAIL
        while behind > SHORT_TAIL:
            async with self._database.reading() as tx:
                head = await log.head(tx, self._key)
            after = self._audit.position
            async for page in pages(self._database, self._key, after=after, up_to=head):
                await self._take(page)
                await self._look_into_segments(page)
                self._progress("log", page[-1].position, head)
            async with self._database.reading() as tx:
                behind = await log.head(tx, self._key) - head

    async def _take(self, page: Sequence[StoredEvent]) -> None:
        events = await anyio.to_thread.run_sync(self._audit.add, page)
        if self._scratch is None or self._unfoldable is not None:
            return
        self._unfoldable = wrong = await self._scratch.fold(events)
        if wrong is not None:
            what = f"{wrong.kind} contradicts the events before it: {wrong.cause}"
            self._problems.append(Problem("fold", f"position {wrong.position}", what))

    async def _look_into_segments(self, page: Sequence[StoredEvent]) -> None:
        if self._scratch is None:
            return
        try:
            events = await anyio.to_thread.run_sync(decoded_events, page)
        except CodecError:
            return  # the audit has said so
        count, problems = await check_segments(self._database, events)
        self._segments += count
        self._in_segments += problems

    async def _compare(self, tx: Transaction, found: Suspects | None) -> None:
        """Compare the projections with the log, both as they are in this transaction."""
        if self._scratch is not None and found is not None and self._unfoldable is None:
            spans = await found.to_confirm(tx, self._scratch)
            for difference in await confirmed(tx, self._scratch, spans):
                self._problems.append(Problem("projections", difference.table, str(difference)))
        else:
            self._compare_counts(await comparison.counts(tx, self._key))
        consumers = (await queries.consumers(tx, self._key)).values()
        for row in consumers:
            if row.kind == "strategy":
                self._strategies.append(await conservation.of_strategy(tx, self._key, row))
            else:
                self._trainers.append(await conservation.of_trainer(tx, self._key, row))
        self._plans = await conservation.of_plans(tx, self._key)
        self._add_up()

    def _compare_counts(self, live: dict[str, int]) -> None:
        for table, expected in self._audit.rows().items():
            if live[table] != expected:
                what = f"it has {live[table]} rows, the log says {expected}"
                self._problems.append(Problem("projections", table, what))

    def _add_up(self) -> None:
        everything: list[Counts] = [*self._strategies, *self._trainers]
        for counts in everything:
            if not counts.holds:
                what = f"the terms do not add up: {counts}"
                self._problems.append(Problem("conservation", counts.consumer, what))
        stored = self._audit.stored_runs()
        if self._plans.stored != stored:
            what = f"{self._plans.stored} planned runs are stored, by the log {stored}"
            self._problems.append(Problem("conservation", "plan", what))

    async def report(
        self,
        uids: list[str] | None,
        chain: outside.Chain | None,
        consumer: str | None,
        begin: float,
    ) -> VerifyReport:
        """Return everything that was found, with the proof from outside."""
        audit = self._audit
        lost = outside.lost_experiences(uids or (), audit.uids)
        duplicated = await self._recorded_twice()
        trained_twice = {
            outside.named(digest, trainer.steps.get(step))
            for trainer in audit.trainers.values()
            for step, digest in trainer.twice
        }
        if chain is not None:
            found = outside.examine_chain(chain, audit.trainers, consumer)
            lost += found.lost
            trained_twice |= set(found.duplicated)
            self._problems += found.problems
        return VerifyReport(
            experiment=self._experiment.name,
            store=self._database.name,
            version=f"{self._database.dialect} {self._database.version}",
            quick=self._scratch is None,
            events=audit.events,
            experiences=audit.experiences,
            manifests=sum(len(trainer.steps) for trainer in audit.trainers.values()),
            segments=self._segments,
            acknowledged=None if uids is None else len(uids),
            chain=None if chain is None else len(chain.manifests),
            lost_items=lost,
            duplicated_items=(*duplicated, *sorted(trained_twice)),
            problems=tuple(self._problems),
            strategies=tuple(self._strategies),
            trainers=tuple(self._trainers),
            plans=self._plans,
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
    recorded = [stored for stored in page if stored.kind == "ExperiencesRecorded"]
    for event in decoded_events(recorded):
        for slot, uid in enumerate(uids_of(event.body["meta"])):
            if hash(uid) in suspected:
                known.setdefault(uid, []).append(address_of(event.position, slot))
    return known
