"""Group commit: calls that wait together share a transaction, and each gets its own result.

Calls of one writer also share an event, as long as all their rows are valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import anyio

from trinity_buffer.errors import StoreBusyError, StoreError, StoreUnavailableError
from trinity_buffer.faultpoints import reached
from trinity_buffer.identity import EID
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.coordination.presence import Presence
from trinity_buffer.pipeline.handle import now_us
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.log import Place
from trinity_buffer.store.transaction import Session, TakenKeyError, Transaction, lock_experiment

if TYPE_CHECKING:  # the calls need torch, which readers of a store do not
    from trinity_buffer.pipeline.write.batch import PreparedWrite, WriteCall

_OF_THE_STORE = (StoreBusyError, StoreUnavailableError)
"""Errors of the store, not of a single call."""


class _Group:
    """Calls that share a transaction."""

    def __init__(self, calls: Sequence[WriteCall], commits: GroupCommit) -> None:
        self.calls = calls
        self.rows = sum(call.rows for call in calls)
        self.writes: list[PreparedWrite] = []
        self.preparing: asyncio.Task[None] | None = None
        self._is_prepared = False
        self._commits = commits

    def prepare(self) -> None:
        """Encode the calls, those of one writer together. Computes: call it off the event loop."""
        self._is_prepared = True
        together: dict[object, list[WriteCall]] = {}
        for call in self.calls:
            partners = together.setdefault(call.writer or call, [])
            if sum(other.rows for other in partners) + call.rows > sizes().rows_per_event:
                self._prepare(partners)
                partners.clear()
            partners.append(call)
        for partners in together.values():
            self._prepare(partners)

    def _prepare(self, calls: list[WriteCall]) -> None:
        if calls:
            self.writes += calls[0].prepare(calls[1:])

    def commit(self, s: Session) -> None:
        """Commit all calls in one transaction, prepared now at the latest.

        Raises:
            TakenKeyError: a row is stored already, which the unique index of `experience` tells, or
                a batch is sealed; nothing was written.
        """
        if not self._is_prepared:
            s.compute(self.prepare)
        s.write(self._append)
        # That has committed, so a receipt may name the place.
        for write in self.writes:
            for call in write.calls:
                call.place = write.place

    def _append(self, tx: Transaction) -> None:
        rows = [row for write in self.writes for row in write.segments]
        self._commits.database.segments.attach(tx, rows)
        # Locks are always taken in one order.
        self.writes.sort(key=lambda write: write.calls[0].experiment)
        for experiment, same in groupby(self.writes, key=lambda write: write.calls[0].experiment):
            writes = list(same)
            lock_experiment(tx, experiment)
            open_batches = sorted(set[str]().union(*(write.open_batches for write in writes)))
            last = log.end_if_open(tx, experiment, open_batches)
            if last is None:
                raise _BatchSealedError
            events = [(write.calls[0].actor, event) for write in writes for event in write.events]
            places = iter(log.append_of_actors(tx, experiment, events, now_us=now_us(), last=last))
            for write in writes:
                write.place = max(next(places) for _ in write.events)
        reached("inside-append")
        # Heartbeats that are due go along, which saves them a transaction of their own.
        for writer in sorted(
            {(write.calls[0].experiment, write.calls[0].actor) for write in self.writes}
        ):
            self._commits.presence_of(*writer).note(tx)


class _BatchSealedError(TakenKeyError):
    """Rolls the transaction back; its calls are then committed one by one."""


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
        self._ahead: _Group | None = None  # the next group, prepared during a commit

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
        self.database.require_usable()  # the committer is a task of that event loop
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
        group: _Group | None = None
        try:
            while self._ahead is not None or self._waiting:
                group, self._ahead = self._ahead or self._group(), None
                await self._commit(group)
                for call in group.calls:
                    call.answered.set()
        finally:
            self._committer = None
            # None is left, unless the event loop is ending.
            groups = [cut.calls for cut in (group, self._ahead) if cut is not None]
            for call in [call for calls in (*groups, self._waiting) for call in calls]:
                if not call.answered.is_set():
                    call.error = StoreError(f"{self.database.name} was closed during a write")
                    call.answered.set()

    def _group(self) -> _Group:
        """Take queued calls: half of their rows, if that fills two commits, at least one call."""
        rows = sum(call.rows for call in self._waiting)
        if rows >= 2 * sizes().rows_prepared_ahead and not self._commits:
            rows = -(-rows // 2)
        calls: list[WriteCall] = []
        taken, most = 0, min(rows, sizes().rows_per_transaction)
        while self._waiting and taken < most:
            calls.append(self._waiting.pop(0))
            taken += calls[-1].rows
        return _Group(calls, self)

    def _prepare_ahead(self) -> None:
        """Start preparing queued calls during the current commit."""
        rows = sum(call.rows for call in self._waiting)
        if self._commits and self._ahead is None and rows >= sizes().rows_prepared_ahead:
            self._ahead = group = self._group()
            group.preparing = asyncio.create_task(self.database.compute(group.prepare))

    async def _commit(self, group: _Group) -> None:
        try:
            if group.preparing is not None:
                await group.preparing
            elif group.rows > sizes().rows_per_trip:
                await self.database.compute(group.prepare)
            self._commits = True
            self._prepare_ahead()
            await self.database.session(group.commit)
        except _OF_THE_STORE as error:  # queued calls have waited through the same timeout
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead.preparing is not None:
                await asyncio.wait([ahead.preparing])  # its result does not matter
            refused = [*group.calls, *(ahead.calls if ahead is not None else ()), *self._waiting]
            self._waiting.clear()
            _refuse(refused, error)
        except Exception:  # noqa: BLE001 - raised to its own caller below
            # Some row is stored already or cannot be stored: find it, call by call.
            await self._commit_singly([call for call in group.calls if call.error is None])
        finally:
            self._commits = False

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
            group = _Group([call], self)
            await self.database.compute(group.prepare)
            if call.error is not None:
                return
            known, sealed, end = await self.database.read(_conflicts, group.writes[0])
            if known or sealed:
                call.learn(known, sealed, end)
                continue
            if taken is not None:
                raise StoreError(f"a key is taken: {taken}") from taken
            try:
                await self.database.session(group.commit)
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
