"""Group commit: calls that wait together share a transaction; each hears of its own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import anyio

from trinity_buffer.crash_points import reached
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
    turn: anyio.Event = field(default_factory=anyio.Event)
    outcome: Outcome | None = None
    error: BaseException | None = None


class GroupCommit:
    """The one road of experiences into a database: one caller commits for all who wait."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[_Entry] = []
        self._committing = False

    async def submit(self, write: PreparedWrite) -> Outcome:
        """Return once the rows of ``write`` are durable, or say why none of them was written."""
        entry = _Entry(write)
        self._waiting.append(entry)
        try:
            while entry.outcome is None and entry.error is None:
                if self._committing:
                    await entry.turn.wait()
                    entry.turn = anyio.Event()
                else:
                    await self._commit_waiting()
        finally:
            if entry in self._waiting:  # cancelled before its turn
                self._waiting.remove(entry)
        if entry.error is not None:
            raise entry.error
        assert entry.outcome is not None
        return entry.outcome

    async def _commit_waiting(self) -> None:
        group = self._take()
        self._committing = True
        try:
            with anyio.CancelScope(shield=True):
                await self._commit(group)
        finally:
            self._committing = False
            for entry in (*group, *self._waiting[:1]):
                entry.turn.set()

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
        except TakenKeyError:  # something is stored already: find out what, call by call
            await self._commit_singly(group)
        except Exception as error:  # noqa: BLE001 - handed to every caller of the group
            for entry in group:
                entry.error = error
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
        places: dict[int, int] = {}
        async with self._database.writing(integrity_errors=True) as tx:
            await segments.write(tx, [row for write in writes for row in write.segments])
            for experiment in sorted({write.experiment for write in writes}):  # no two in a circle
                some = [write for write in writes if write.experiment == experiment]
                await lock_experiment(tx, experiment)
                if await self._sealed(tx, experiment, some):
                    raise _SomebodyIsLateError
                reached("inside-append")
                said = [(write.actor, event) for write in some for event in write.events]
                positions = iter(await log.append_of_actors(tx, experiment, said, now_us=now_us()))
                places |= {id(write): max(islice(positions, len(write.events))) for write in some}
        return [Outcome(position=places[id(write)]) for write in writes]

    async def _try_alone(self, write: PreparedWrite) -> Outcome:
        while True:
            async with self._database.reading() as tx:
                known = await queries.stored(tx, write.experiment, write.eids)
                sealed = await self._sealed(tx, write.experiment, [write])
            if known or sealed:
                return Outcome(known=known, sealed=sealed)
            try:
                return (await self._write([write]))[0]
            except TakenKeyError:
                continue  # another process was quicker between the two transactions: look again

    async def _sealed(
        self, tx: Transaction, experiment: int, writes: Sequence[PreparedWrite]
    ) -> frozenset[str]:
        batches = frozenset[str]().union(*(write.open_batches for write in writes))
        if not batches:
            return batches
        return frozenset(await queries.sealed_among(tx, experiment, sorted(batches)))


class _SomebodyIsLateError(TakenKeyError):
    """Rolls the transaction back; the calls are then looked at one by one."""
