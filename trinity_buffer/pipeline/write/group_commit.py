"""Group commit: calls that wait together share a transaction, and each gets its own result.

Calls of one writer also share an event, as long as all their rows are valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from typing import Any, Protocol

import anyio

from trinity_buffer.codec.blob import Blob
from trinity_buffer.errors import StoreBusyError, StoreError, StoreUnavailableError
from trinity_buffer.faultpoints import reached
from trinity_buffer.identity import EID
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.coordination.presence import Presence
from trinity_buffer.pipeline.handle import now_us
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.log import NewEvent, Place
from trinity_buffer.store.segments import SegmentRow, SegmentStore
from trinity_buffer.store.transaction import Session, TakenKeyError, Transaction, lock_experiment


@dataclass(frozen=True, slots=True)
class PreparedWrite:
    """One call, or several as one event, fully encoded.

    Attributes:
        segments: key -> blob of each column family.
        open_batches: batches of experiences that are not refused already; if one of them is sealed,
            the write fails.
    """

    experiment: int
    actor: str
    eids: Sequence[EID]
    events: Sequence[NewEvent]
    segments: Mapping[bytes, Mapping[str, Blob]]
    open_batches: frozenset[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a `PreparedWrite`; it was written unless ``known`` or ``sealed`` says why not.

    Attributes:
        place: place of its last event; if it was not written, of the last event of the log.
        known: EIDs that are stored already -> address and content digest.
        sealed: batches that were sealed before.
    """

    place: Place
    known: Mapping[EID, tuple[int, bytes]] = field(default_factory=dict)
    sealed: frozenset[str] = frozenset()


class Call(Protocol):
    """A write request. `prepare` and `join` compute: they run in a thread."""

    @property
    def rows(self) -> int:
        """Number of its experiences."""

    @property
    def joins(self) -> Hashable:
        """Calls with an equal key may share an event; None: this one does not."""

    def prepare(self) -> PreparedWrite:
        """Return the write to commit; errors are raised to the caller."""

    def join(self, others: Sequence[Any]) -> PreparedWrite | None:
        """Return this call and ``others`` as one event, or None to check each by itself."""


@dataclass(eq=False, slots=True)
class _Entry:
    call: Call
    answered: anyio.Event = field(default_factory=anyio.Event)
    outcome: Outcome | None = None
    error: Exception | None = None


class _Group:
    """Calls that share a transaction."""

    def __init__(self, entries: Sequence[_Entry], store: SegmentStore) -> None:
        self.entries = entries
        self.store = store
        self.rows = sum(entry.call.rows for entry in entries)
        self.writes: list[tuple[PreparedWrite, Sequence[_Entry]]] = []
        self.segment_rows: list[SegmentRow] = []
        self.prepared = False
        self.preparing: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        """Prepare the writes of all entries and put their blobs into the store.

        Computes: call it off the event loop.
        """
        self.prepared = True
        for entries in _partners(self.entries):
            first, *others = [entry.call for entry in entries]
            joined = first.join(others) if others else None
            if joined is not None:
                self.writes.append((joined, entries))
                continue
            for entry in entries:
                try:
                    self.writes.append((entry.call.prepare(), [entry]))
                except Exception as error:  # noqa: BLE001 - handed to the caller it belongs to
                    entry.error = error
        for write, _ in self.writes:
            for key, families in write.segments.items():
                self.segment_rows += self.store.put(key, families)

    def append(
        self, tx: Transaction, presence_of: Callable[[int, str], Presence]
    ) -> dict[int, Place]:
        """Record the prepared writes; return id(write) -> place of its last event."""
        self.store.attach(tx, self.segment_rows)
        writes = [write for write, _ in self.writes]
        places = record(tx, writes)
        reached("inside-append")
        for writer in sorted({(write.experiment, write.actor) for write in writes}):
            presence_of(*writer).note(tx)
        return places


def _partners(entries: Sequence[_Entry]) -> list[list[_Entry]]:
    """Group ``entries`` into lists that may share an event."""
    lists: list[list[_Entry]] = []
    open_lists: dict[Hashable, tuple[list[_Entry], int]] = {}
    for entry in entries:
        key = entry.call.joins
        together, rows = open_lists.get(key, ([], 0))
        if key is None or not together or rows + entry.call.rows > sizes().rows_per_event:
            together, rows = [], 0
            lists.append(together)
        together.append(entry)
        open_lists[key] = together, rows + entry.call.rows
    return lists


def _answer(entries: Sequence[_Entry]) -> None:
    for entry in entries:
        entry.answered.set()


_OF_THE_STORE = (StoreBusyError, StoreUnavailableError)
"""Errors of the store, not of a single call."""


def _tell_all(entries: Sequence[_Entry], error: StoreBusyError | StoreUnavailableError) -> None:
    """Give each entry that has no error yet its own copy of ``error``."""
    for entry in entries:
        if entry.error is None:
            entry.error = type(error)(*error.args)
            entry.error.__cause__ = error


class GroupCommit:
    """Commits the experiences of all writers of a database; calls queue up during a commit.

    The next group is prepared during the commit if it is large enough for a thread: SQLite and
    digests release the interpreter lock. A separate task commits, which lives only while there is
    something to commit: cancelling a caller never cancels a transaction that others share.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[_Entry] = []
        self._presences: dict[tuple[int, str], Presence] = {}
        self._committer: asyncio.Task[None] | None = None
        self._commits = False  # whether a transaction is under way
        self._ahead: _Group | None = None  # the next group, prepared during a commit

    def presence_of(self, experiment: int, actor: str) -> Presence:
        """Return the presence of an explorer, shared by all its writers; writes renew it."""
        presence = self._presences.get((experiment, actor))
        if presence is None:
            presence = Presence(self._database, experiment, "explorer", actor)
            self._presences[experiment, actor] = presence
        return presence

    async def submit(self, call: Call) -> Outcome:
        """Wait until the rows of ``call`` are durable, or return why none was written.

        A call that is cancelled while it is queued is not written; later, it may or may not be.
        """
        self._database.require_usable()  # the committer is a task of that event loop
        entry = _Entry(call)
        self._waiting.append(entry)
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit_waiting())
        elif self._commits:  # callers answered together call again together
            asyncio.get_running_loop().call_soon(self._prepare_ahead)
        try:
            await entry.answered.wait()
        finally:
            if entry in self._waiting:  # cancelled while queued
                self._waiting.remove(entry)
        if entry.error is not None:
            raise entry.error
        assert entry.outcome is not None
        return entry.outcome

    async def drain(self) -> None:
        """Wait until no commit is under way, including those of cancelled callers."""
        with anyio.CancelScope(shield=True):
            while self._committer is not None:
                await asyncio.wait([self._committer])

    async def _commit_waiting(self) -> None:
        group: _Group | None = None
        try:
            while self._ahead is not None or self._waiting:
                group, self._ahead = self._ahead or self._group(self._share()), None
                await self._commit(group)
                _answer(group.entries)
        finally:
            self._committer = None
            late = [cut.entries for cut in (group, self._ahead) if cut is not None]
            for entry in chain(*late, self._waiting):  # empty, unless the event loop is ending
                if not entry.answered.is_set():
                    entry.error = StoreError(f"{self._database.name} was closed during a write")
                    entry.answered.set()

    def _share(self) -> int:
        """Return the number of queued rows to take: half of them, if that fills two commits."""
        rows = sum(entry.call.rows for entry in self._waiting)
        return rows if rows < 2 * sizes().rows_prepared_ahead else -(-rows // 2)

    def _group(self, most: int) -> _Group:
        """Take queued calls with about ``most`` rows, at least one call."""
        entries: list[_Entry] = []
        rows, most = 0, min(most, sizes().rows_per_transaction)
        while self._waiting and rows < most:
            entries.append(self._waiting.pop(0))
            rows += entries[-1].call.rows
        return _Group(entries, self._database.segments)

    def _prepare_ahead(self) -> None:
        """Start preparing queued calls during the current commit."""
        rows = sum(entry.call.rows for entry in self._waiting)
        if self._commits and self._ahead is None and rows >= sizes().rows_prepared_ahead:
            self._ahead = group = self._group(rows)
            group.preparing = asyncio.create_task(self._database.compute(group.prepare))

    async def _commit(self, group: _Group) -> None:
        try:
            if group.preparing is not None:
                await group.preparing
            elif group.rows > sizes().rows_per_trip:
                await self._database.compute(group.prepare)
            self._commits = True
            self._prepare_ahead()
            await self._write(group)
        except _OF_THE_STORE as error:  # queued calls have waited through the same timeout
            await self._refuse_all(group, error)
        except Exception:  # noqa: BLE001 - raised to its own caller below
            # Some row is stored already or cannot be stored: find it, call by call.
            await self._commit_singly([entry for entry in group.entries if entry.error is None])
        finally:
            self._commits = False

    async def _refuse_all(
        self, group: _Group, error: StoreBusyError | StoreUnavailableError
    ) -> None:
        ahead, self._ahead = self._ahead, None
        refused = [*group.entries, *(ahead.entries if ahead is not None else ()), *self._waiting]
        self._waiting.clear()
        _tell_all(refused, error)
        if ahead is not None and ahead.preparing is not None:
            await asyncio.wait([ahead.preparing])  # its result does not matter
        _answer(refused)

    async def _commit_singly(self, entries: list[_Entry]) -> None:
        for number, entry in enumerate(entries):
            try:
                await self._try_alone(entry)
            except _OF_THE_STORE as error:  # the other calls would time out one by one
                _tell_all(entries[number:], error)
                return
            except Exception as error:  # noqa: BLE001 - handed to the caller it belongs to
                entry.error = error

    async def _write(self, group: _Group) -> None:
        """Prepare ``group`` and commit it in one transaction.

        Raises:
            TakenKeyError: a row is stored already, or a batch is sealed; nothing was written.
        """

        def work(s: Session) -> dict[int, Place]:
            if not group.prepared:
                s.compute(group.prepare)
            return s.write(group.append, self.presence_of)

        places = await self._database.session(work)
        for write, entries in group.writes:
            for entry in entries:
                entry.outcome = Outcome(place=places[id(write)])

    async def _try_alone(self, entry: _Entry) -> None:
        group = _Group([entry], self._database.segments)
        await self._database.compute(group.prepare)
        for write, _ in group.writes:  # empty if the call is invalid
            entry.outcome = await self._database.read(_known, write)
            if entry.outcome is not None:
                return
            try:
                await self._write(group)
            except TakenKeyError as error:  # another process wrote it meanwhile: check again
                entry.outcome = await self._database.read(_known, write)
                if entry.outcome is None:
                    raise StoreError(f"a key is taken: {error}") from error


def record(tx: Transaction, writes: list[PreparedWrite]) -> dict[int, Place]:
    """Record ``writes``, whose blobs are stored; return id(write) -> place of its last event.

    Keyed by identity, because calls may have equal content.

    Raises:
        TakenKeyError: a row is stored already, or a batch is sealed.
    """
    places: dict[int, Place] = {}
    writes.sort(key=lambda write: write.experiment)  # locks are always taken in one order
    for experiment, same in groupby(writes, key=lambda write: write.experiment):
        own = list(same)
        lock_experiment(tx, experiment)
        last = log.end_if_open(tx, experiment, _open_batches(own))
        if last is None:
            raise _BatchSealedError
        events = [(write.actor, event) for write in own for event in write.events]
        new = iter(log.append_of_actors(tx, experiment, events, now_us=now_us(), last=last))
        places |= {id(write): max(islice(new, len(write.events))) for write in own}
    return places


def _known(tx: Transaction, write: PreparedWrite) -> Outcome | None:
    """Return the outcome that prevents ``write``, or None."""
    known = writer_queries.stored(tx, write.experiment, write.eids)
    batches = _open_batches([write])
    sealed = frozenset(
        writer_queries.sealed_among(tx, write.experiment, batches) if batches else ()
    )
    return Outcome(log.end(tx, write.experiment), known, sealed) if known or sealed else None


def _open_batches(writes: Sequence[PreparedWrite]) -> list[str]:
    return sorted(frozenset[str]().union(*(write.open_batches for write in writes)))


class _BatchSealedError(TakenKeyError):
    """Rolls the transaction back; its calls are then committed one by one."""
