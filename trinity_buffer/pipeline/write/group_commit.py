"""Group commit: calls that wait together share a transaction, and each gets its own result.

Calls of one writer also share an event, as long as all their rows are valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING

import anyio

from trinity_buffer.errors import StoreBusyError, StoreError, StoreUnavailableError
from trinity_buffer.faultpoints import reached
from trinity_buffer.identity import EID
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.coordination.waiting import Presence
from trinity_buffer.pipeline.handle import now_us
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.log import Place
from trinity_buffer.store.transaction import Session, TakenKeyError, Transaction

if TYPE_CHECKING:  # the calls need torch, which readers of a store do not
    from trinity_buffer.pipeline.write.batch import PreparedWrite, WriteCall

_OF_THE_STORE = (StoreBusyError, StoreUnavailableError)
"""Errors of the store, not of a single call."""


class _BatchSealedError(TakenKeyError):
    """Rolls the transaction back; its calls are then committed one by one."""


def _prepared(calls: Sequence[WriteCall]) -> list[PreparedWrite]:
    """Encode ``calls``, those of one writer together. Computes: call it off the event loop."""
    together: dict[object, list[list[WriteCall]]] = {}
    for call in calls:
        # First attempts of the same writer may share an event.
        writer = (call.experiment, call.actor, call.schema)
        events = together.setdefault(writer if call.pending is None else call, [[]])
        if sum(other.rows for other in events[-1]) + call.rows > sizes.rows_per_event:
            events.append([])
        events[-1].append(call)
    groups = chain.from_iterable(together.values())
    return [write for group in groups if group for write in group[0].prepare(group[1:])]


class GroupCommit:
    """Commits the experiences of all writers of a database; calls queue up during a commit.

    The next group is prepared during the commit if it is large enough for a thread: SQLite and
    digests release the interpreter lock. A separate task commits, which lives only while there is
    something to commit: cancelling a caller never cancels a transaction that others share.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._waiting: list[WriteCall] = []
        self._presences: dict[tuple[int, str], Presence] = {}
        self._committer: asyncio.Task[None] | None = None
        self._commits = False  # whether a transaction is under way
        self._ahead: list[WriteCall] = []  # the next group, prepared during a commit
        self._preparing: asyncio.Task[list[PreparedWrite]] | None = None  # it does that

    def presence_of(self, experiment: int, actor: str) -> Presence:
        """Return the presence of an explorer, shared by all its writers; writes renew it."""
        presence = self._presences.get((experiment, actor))
        if presence is None:
            presence = Presence(self.database, experiment, "explorer", actor)
            self._presences[experiment, actor] = presence
        return presence

    async def submit(self, call: WriteCall) -> None:
        """Wait until the rows of ``call`` are durable; it then knows their place.

        A call that is cancelled while it is queued is not written; later, it may or may not be.
        """
        self.database.owner.require()  # the committer is a task of that event loop
        self._waiting.append(call)
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit_waiting())
        elif self._commits:  # callers answered together call again together
            asyncio.get_running_loop().call_soon(self._prepare_ahead)
        try:
            await call.answered.wait()
        finally:
            if call in self._waiting:  # cancelled while queued
                self._waiting.remove(call)
        if call.error is not None:
            raise call.error

    async def drain(self) -> None:
        """Wait until no commit is under way, including those of cancelled callers."""
        with anyio.CancelScope(shield=True):
            while self._committer is not None:
                await asyncio.wait([self._committer])

    async def _commit_waiting(self) -> None:
        calls: list[WriteCall] = []
        try:
            while self._ahead or self._waiting:
                calls, self._ahead = self._ahead or self._group(), []
                preparing, self._preparing = self._preparing, None
                await self._commit(calls, preparing)
                for call in calls:
                    call.answered.set()
        finally:
            self._committer = None
            # None is left, unless the event loop is ending.
            for call in (*calls, *self._ahead, *self._waiting):
                if not call.answered.is_set():
                    call.error = StoreError(f"{self.database.name} was closed during a write")
                    call.answered.set()

    def _group(self) -> list[WriteCall]:
        """Take queued calls: half of their rows, if that fills two commits, at least one call."""
        rows = sum(call.rows for call in self._waiting)
        if rows >= 2 * sizes.rows_prepared_ahead and not self._commits:
            rows = -(-rows // 2)
        calls: list[WriteCall] = []
        taken, most = 0, min(rows, sizes.rows_per_transaction)
        while self._waiting and taken < most:
            calls.append(self._waiting.pop(0))
            taken += calls[-1].rows
        return calls

    def _prepare_ahead(self) -> None:
        """Start preparing queued calls during the current commit."""
        rows = sum(call.rows for call in self._waiting)
        if self._commits and not self._ahead and rows >= sizes.rows_prepared_ahead:
            self._ahead = self._group()
            self._preparing = asyncio.create_task(self.database.compute(_prepared, self._ahead))

    async def _commit(
        self, calls: Sequence[WriteCall], preparing: asyncio.Task[list[PreparedWrite]] | None
    ) -> None:
        writes: list[PreparedWrite] | None = None
        try:
            if preparing is not None:
                writes = await preparing
            elif sum(call.rows for call in calls) > sizes.rows_per_trip:
                writes = await self.database.compute(_prepared, calls)
            self._commits = True
            if self._waiting:
                self._prepare_ahead()
            await self.database.session(partial(self._write, calls, writes))
        except _OF_THE_STORE as error:  # queued calls have waited through the same timeout
            refused = [*calls, *self._ahead, *self._waiting]
            self._ahead = []
            self._waiting.clear()
            preparing, self._preparing = self._preparing, None
            if preparing is not None:
                await asyncio.wait([preparing])  # its result does not matter
            _refuse(refused, error)
        except Exception:  # noqa: BLE001 - raised to its own caller below
            # Some row is stored already or cannot be stored: find it, call by call.
            await self._commit_singly([call for call in calls if call.error is None])
        finally:
            self._commits = False

    def _write(
        self, calls: Sequence[WriteCall], writes: list[PreparedWrite] | None, s: Session
    ) -> None:
        """Commit all calls in one transaction, prepared now at the latest.

        Raises:
            TakenKeyError: a row is stored already, which the unique index of `experience` tells, or
                a batch is sealed; nothing was written.
        """
        if writes is None:
            writes = _prepared(calls)
        places = s.write(self._append, writes)
        # That has committed, so a receipt may name the place.
        for write, place in zip(writes, places, strict=True):
            for call in write.calls:
                call.place = place

    def _append(self, tx: Transaction, writes: list[PreparedWrite]) -> list[Place]:
        """Record ``writes``, in order of their experiments; return the place of each."""
        self.database.segments.attach(tx, [row for write in writes for row in write.segments])
        # Locks are always taken in one order.
        writes.sort(key=lambda write: write.calls[0].experiment)
        ends: list[Place] = []
        for experiment, same in groupby(writes, key=lambda write: write.calls[0].experiment):
            mine = list(same)
            tx.lock(experiment)
            open_batches = sorted(set[str]().union(*(write.open_batches for write in mine)))
            last = log.end_if_open(tx, experiment, open_batches)
            if last is None:
                raise _BatchSealedError
            events = [(write.calls[0].actor, event) for write in mine for event in write.events]
            places = log.append(tx, experiment, events, now_us=now_us(), last=last)
            ends += [places[end - 1] for end in accumulate(len(write.events) for write in mine)]
        reached("inside-append")
        # Heartbeats that are due go along, which saves them a transaction of their own.
        for writer in sorted(
            {(write.calls[0].experiment, write.calls[0].actor) for write in writes}
        ):
            self.presence_of(*writer).note(tx)
        return ends

    async def _commit_singly(self, calls: Sequence[WriteCall]) -> None:
        for number, call in enumerate(calls):
            try:
                await self._commit_alone(call)
            except _OF_THE_STORE as error:  # the other calls would time out one by one
                _refuse(calls[number:], error)
                return
            except Exception as error:  # noqa: BLE001 - handed to the caller it belongs to
                call.error = error

    async def _commit_alone(self, call: WriteCall) -> None:
        taken: TakenKeyError | None = None
        # Each conflict removes rows or marks batches as late, so this ends.
        while call.rows:
            writes = await self.database.compute(_prepared, [call])
            if call.error is not None:
                return
            known, sealed, end = await self.database.read(_conflicts, writes[0])
            if known or sealed:
                call.learn(known, sealed, end)
                continue
            if taken is not None:
                raise StoreError(f"a key is taken: {taken}") from taken
            try:
                await self.database.session(partial(self._write, [call], writes))
            except TakenKeyError as error:  # another process wrote it meanwhile: check again
                taken = error
            else:
                return


def _refuse(calls: Sequence[WriteCall], error: StoreBusyError | StoreUnavailableError) -> None:
    """Answer ``calls``; each that has no error yet gets its own copy of ``error``."""
    for call in calls:
        if call.error is None:
            call.error = type(error)(*error.args)
            call.error.__cause__ = error
        call.answered.set()


def _conflicts(
    tx: Transaction, write: PreparedWrite
) -> tuple[dict[EID, tuple[int, bytes]], frozenset[str], Place]:
    """Return rows of ``write`` that are stored, its batches that are sealed, the end of the log."""
    experiment = write.calls[0].experiment
    eids = [experience.eid for batch in write.batches for experience in batch.experiences]
    batches = sorted(write.open_batches)
    sealed = writer_queries.sealed_among(tx, experiment, batches) if batches else ()
    known = writer_queries.stored(tx, experiment, eids)
    return known, frozenset(sealed), log.end(tx, experiment)
