"""Group commit: calls that wait together share a transaction; each hears of its own rows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import anyio

from trinity_buffer.crash_points import reached
from trinity_buffer.errors import StoreError
from trinity_buffer.identity import EID
from trinity_buffer.pipeline.events import now_us
from trinity_buffer.store import log, queries, segments
from trinity_buffer.store.database import Database
from trinity_buffer.store.dialect import lock_experiment
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.transaction import TakenKeyError, Transaction

ROWS_PER_TRANSACTION = 4096
"""A group stops growing here, so that no transaction holds the database for long."""


@dataclass(frozen=True, slots=True)
class PreparedWrite:
    """One call, encoded: everything that computes has happened.

    Attributes:
        open_batches: whose experiences are not marked as refused already; a seal of one of them
            stops the call.
    """

    experiment: int
    actor: str
    eids: Sequence[EID]
    events: Sequence[NewEvent]
    segments: Sequence[Mapping[str, object]]
    open_batches: frozenset[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a `PreparedWrite`: written up to ``position``, or not, for the other two.

    Attributes:
        known: EIDs that are stored already, with address and content digest.
        sealed: batches that were sealed before the call came.
    """

    position: int = 0
    known: Mapping[EID, tuple[int, bytes]] = field(default_factory=dict)
    sealed: frozenset[str] = frozenset()


@dataclass(eq=False, slots=True)
class _Entry:
    write: PreparedWrite
    answered: anyio.Event = field(default_factory=anyio.Event)
    outcome: Outcome | None = None
    error: Exception | None = None


class GroupCommit:
    """The one road of experiences into a database: what waits while a commit runs is the next one.

    A task of its own commits, and lives only while there is something to commit: a caller that is
    cancelled, by whichever means, cancels no transaction that others share.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[_Entry] = []
        self._committer: asyncio.Task[None] | None = None

    async def submit(self, write: PreparedWrite) -> Outcome:
        """Return once the rows of ``write`` are durable, or say why none of them was written.

        A call that is cancelled before its turn is forgotten; later, it is written or not.
        """
        entry = _Entry(write)
        self._waiting.append(entry)
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit_waiting())
        try:
            await entry.answered.wait()
        finally:
            if entry in self._waiting:  # cancelled before its turn
                self._waiting.remove(entry)
        if entry.error is not None:
            raise entry.error
        assert entry.outcome is not None
        return entry.outcome

    async def drain(self) -> None:
        """Return when no commit is under way; whoever was cancelled does not wait for his."""
        with anyio.CancelScope(shield=True):
            while self._committer is not None:
                await asyncio.wait([self._committer])

    async def _commit_waiting(self) -> None:
        group: list[_Entry] = []
        try:
            while self._waiting:
                group = self._take()
                await self._commit(group)
                for entry in group:
                    entry.answered.set()
        finally:
            self._committer = None
            for entry in (*group, *self._waiting):  # none is left, unless the event loop is ending
                if not entry.answered.is_set():
                    entry.error = StoreError(f"{self._database.name} was closed during a write")
                    entry.answered.set()

    def _take(self) -> list[_Entry]:
        """Take as many of those who wait as fit, at least one."""
        group: list[_Entry] = []
        rows = 0
        while self._waiting and rows < ROWS_PER_TRANSACTION:
            group.append(self._waiting.pop(0))
            rows += len(group[-1].write.eids)
        return group

    async def _commit(self, group: list[_Entry]) -> None:
        try:
            outcomes = await self._write([entry.write for entry in group])
        except Exception:  # noqa: BLE001 - whoever it belongs to is told, below
            # Something is stored already, or cannot be stored: find out what, call by call. A call
            # that was committed after all, over a connection that broke, is found as stored.
            await self._commit_singly(group)
        else:
            for entry, outcome in zip(group, outcomes, strict=True):
                entry.outcome = outcome

    async def _commit_singly(self, group: list[_Entry]) -> None:
        for entry in group:
            try:
                entry.outcome = await self._try_alone(entry.write)
            except Exception as error:  # noqa: BLE001 - handed to the caller it belongs to
                entry.error = error

    async def _write(self, writes: Sequence[PreparedWrite]) -> list[Outcome]:
        """Commit all of ``writes`` in one transaction.

        Raises:
            TakenKeyError: something is stored already, or a batch is sealed; nothing was written.
        """
        rows = [row for write in writes for row in write.segments]
        by_experiment: dict[int, list[PreparedWrite]] = {}
        for write in sorted(writes, key=lambda one: one.experiment):  # locks, always in one order
            by_experiment.setdefault(write.experiment, []).append(write)

        async def work(tx: Transaction) -> dict[int, int]:
            places: dict[int, int] = {}
            await segments.write(tx, rows)
            for experiment, some in by_experiment.items():
                await lock_experiment(tx, experiment)
                if await self._sealed(tx, experiment, some):
                    raise _SomebodyIsLateError
                reached("inside-append")
                said = [(write.actor, event) for write in some for event in write.events]
                positions = iter(await log.append_of_actors(tx, experiment, said, now_us=now_us()))
                places |= {id(write): max(islice(positions, len(write.events))) for write in some}
            return places

        places = await self._database.write(work, integrity_errors=True)
        return [Outcome(position=places[id(write)]) for write in writes]

    async def _try_alone(self, write: PreparedWrite) -> Outcome:
        outcome = await self._known(write)
        if outcome is None:
            try:
                return (await self._write([write]))[0]
            except TakenKeyError as error:  # another process was quicker: look again
                outcome = await self._known(write)
                if outcome is None:
                    raise StoreError(f"{self._database.name}: a key is taken: {error}") from error
        return outcome

    async def _known(self, write: PreparedWrite) -> Outcome | None:
        """Return what is in the way of ``write``, or None."""
        async with self._database.reading() as tx:
            known = await queries.stored(tx, write.experiment, write.eids)
            sealed = await self._sealed(tx, write.experiment, [write])
        return Outcome(known=known, sealed=sealed) if known or sealed else None

    async def _sealed(
        self, tx: Transaction, experiment: int, writes: Sequence[PreparedWrite]
    ) -> frozenset[str]:
        batches = frozenset[str]().union(*(write.open_batches for write in writes))
        if not batches:
            return batches
        return frozenset(await queries.sealed_among(tx, experiment, sorted(batches)))


class _SomebodyIsLateError(TakenKeyError):
    """Rolls the transaction back; the calls are then looked at one by one."""
