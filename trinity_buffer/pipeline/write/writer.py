"""The writer of explorers: durable on return, and idempotent.

Calls that wait together share a transaction, and each gets its own result. Calls of one writer also
share an event, as long as all their rows are valid.

Durable: committed, which outlives a kill -9 of any process. On SQLite it outlives a power loss too
where the store was opened with ``durability="full"``, which is not the default.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain, groupby
from typing import Any

import anyio
from typing_extensions import override

from trinity_buffer import errors
from trinity_buffer.codec.objects import new_event
from trinity_buffer.events import BatchPlanned
from trinity_buffer.experience import Experience
from trinity_buffer.identity import Key, freeze
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.coordination import diagnosis, waiting
from trinity_buffer.pipeline.write import planning
from trinity_buffer.pipeline.write.batch import (
    OnInvalid,
    PreparedWrite,
    WriteCall,
    suspicious_values,
)
from trinity_buffer.store import leases, log, writer_queries
from trinity_buffer.store.connection import Database
from trinity_buffer.store.leases import PresenceRow
from trinity_buffer.store.log import Place
from trinity_buffer.store.rows import BatchRow
from trinity_buffer.store.transaction import Session, TakenKeyError, Transaction
from trinity_buffer.writer import BufferWriter, WriteReceipt

_OF_THE_STORE = (errors.StoreBusyError, errors.StoreUnavailableError)
"""Errors of the store, not of a single call."""


class _BatchSealedError(TakenKeyError):
    """Rolls the transaction back; its calls are then committed one by one."""


def _prepared(calls: Sequence[WriteCall]) -> list[PreparedWrite]:
    """Encode ``calls``, those of one writer together. Computes: call it off the event loop."""
    together: dict[object, list[list[WriteCall]]] = {}
    for call in calls:
        # First attempts of the same writer may share an event. One that was examined (it has uids)
        # knows its own late and invalid rows, and stays alone.
        writer = (call.experiment, call.actor, call.schema)
        events = together.setdefault(call if call.uids else writer, [[]])
        if sum(len(other.experiences) for other in (*events[-1], call)) > sizes.rows_per_event:
            events.append([])
        events[-1].append(call)
    groups = chain.from_iterable(together.values())
    return [write for group in groups if group for write in group[0].prepare(group[1:])]


class GroupCommit:
    """Commits the experiences of all writers of a database; calls queue up during a commit.

    A call that finds nothing under way is committed at once: no timer waits for company. The next
    group is prepared during the commit if it is large enough for a thread: SQLite and digests
    release the interpreter lock. A separate task commits, which lives only while there is something
    to commit: cancelling a caller never cancels a transaction that others share.

    A call is in `_waiting`, then perhaps in `_ahead`, then in the group of `_commit_waiting`; only
    from the first can its caller take it back.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._waiting: list[WriteCall] = []
        self._presences: dict[tuple[int, str], waiting.Presence] = {}
        self._committer: asyncio.Task[None] | None = None
        self._commits = False  # whether a transaction is under way
        self._ahead: list[WriteCall] = []  # the next group, prepared during a commit
        self._preparing: asyncio.Task[list[PreparedWrite]] | None = None  # it does that

    def presence_of(self, experiment: int, actor: str) -> waiting.Presence:
        """Return the presence of an explorer, shared by all its writers; writes renew it."""
        presence = self._presences.get((experiment, actor))
        if presence is None:
            presence = waiting.Presence(self.database, experiment, "explorer", actor)
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
        elif self._commits:  # callers answered together call again together: wait for all of them
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
            # None is left, unless the event loop ends and cancels this task: all other errors are
            # in their calls already.
            closed = f"{self.database.name} was closed during a write"
            for call in (*calls, *self._ahead, *self._waiting):
                if not call.answered.is_set():
                    call.error = call.error or errors.StoreError(closed)
                    call.answered.set()

    def _group(self) -> list[WriteCall]:
        """Take queued calls, up to the one that reaches ``rows_per_transaction``.

        Half of them while no transaction runs, if there are enough for two: the second half is
        prepared beside the first commit.
        """
        rows = sum(len(call.experiences) for call in self._waiting)
        if rows >= 2 * sizes.rows_prepared_ahead and not self._commits:
            rows = -(-rows // 2)
        calls: list[WriteCall] = []
        taken, most = 0, min(rows, sizes.rows_per_transaction)
        while self._waiting and taken < most:
            calls.append(self._waiting.pop(0))
            taken += len(calls[-1].experiences)
        return calls

    def _prepare_ahead(self) -> None:
        """Start preparing queued calls during the current commit."""
        rows = sum(len(call.experiences) for call in self._waiting)
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
            elif sum(len(call.experiences) for call in calls) > sizes.rows_per_trip:
                writes = await self.database.compute(_prepared, calls)
            self._commits = True
            if self._waiting:
                self._prepare_ahead()
            await self.database.session(partial(self._write, calls, writes))
        except _OF_THE_STORE as error:
            # Tried again below already, for the busy timeout or reconnect_s: the queued calls have
            # waited as long. A server that was lost during its commit may have stored the rows:
            # a caller that writes them again is told that they are duplicates.
            refused = [*calls, *self._ahead, *self._waiting]
            self._ahead = []
            self._waiting.clear()
            preparing, self._preparing = self._preparing, None
            if preparing is not None:
                await asyncio.wait([preparing])  # its result does not matter
            _refuse(refused, error)
        except Exception:  # noqa: BLE001 - raised to its own caller below
            # Some row is stored already or cannot be stored: find it, call by call. So each call
            # gets its own error of a full disk or a replaced file, too.
            await self._commit_singly([call for call in calls if call.error is None])
        finally:
            self._commits = False

    def _write(
        self, calls: Sequence[WriteCall], writes: list[PreparedWrite] | None, s: Session
    ) -> None:
        """Commit all calls in one transaction, prepared now at the latest.

        It runs in the thread of a connection, off the event loop.

        Raises:
            TakenKeyError: a row is stored already, which the unique index of `experience` tells, or
                a batch is sealed; nothing was written.
        """
        if writes is None:
            writes = _prepared(calls)
        # Also if every call was invalid: that transaction is empty.
        places = s.write(self._append, writes)
        # That has committed, so a receipt may name the place.
        for write, place in zip(writes, places, strict=True):
            for call in write.calls:
                call.place = place

    def _append(self, tx: Transaction, writes: list[PreparedWrite]) -> list[Place]:
        """Record ``writes``, in order of their experiments; return the place of each.

        It runs again each time that a server's connection is lost before the outcome is known.
        """
        # Before the lock: on a server, other writers of the experiment do not wait for the blobs.
        self.database.segments.attach(tx, [row for write in writes for row in write.segments])
        # Locks are always taken in one order.
        writes.sort(key=lambda write: write.calls[0].experiment)
        ends: list[Place] = []
        for experiment, same in groupby(writes, key=lambda write: write.calls[0].experiment):
            mine = list(same)
            # Until the transaction ends. SQLite has locked the whole database at its beginning.
            tx.lock(experiment)
            open_batches = sorted(set[str]().union(*(write.open_batches for write in mine)))
            # Rows that are stored already, the unique index tells, at the insert.
            last = log.end_if_open(tx, experiment, open_batches)
            if last is None:
                raise _BatchSealedError
            events = [(write.calls[0].actor, event) for write in mine for event in write.events]
            places = log.append(tx, experiment, events, last=last)
            # The last event of each write: one of several events is of a single call, since calls
            # that are prepared together fit into one.
            ends += [places[end - 1] for end in accumulate(len(write.events) for write in mine)]
        # Heartbeats that are due go along, which saves them a transaction of their own. One that is
        # rolled back counts as sent all the same: the next comes long before it would be missed.
        for writer in sorted(
            {(write.calls[0].experiment, write.calls[0].actor) for write in writes}
        ):
            heartbeat = self.presence_of(*writer).due_row()
            if heartbeat is not None:
                leases.record_presence(tx, writer[0], heartbeat)
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
        while call.experiences:
            writes = await self.database.compute(_prepared, [call])
            if call.error is not None:
                return
            known, sealed, end = await self.database.read(_conflicts, writes[0])
            if known or sealed:
                call.learn(known, sealed, end)
                taken = None
                continue
            # Taken, yet neither stored nor sealed: a damaged index, which another try cannot mend.
            if taken is not None:
                raise errors.StoreError(f"a key is taken: {taken}") from taken
            try:
                await self.database.session(partial(self._write, [call], writes))
            except TakenKeyError as error:  # another process wrote it meanwhile: check again
                taken = error
            else:
                return


def _refuse(calls: Sequence[WriteCall], error: errors.StoreError) -> None:
    """Answer the unanswered of ``calls``; each without an error gets its own copy of ``error``."""
    for call in calls:
        if call.error is None and not call.answered.is_set():
            call.error = type(error)(*error.args)
            call.error.__cause__ = error
        call.answered.set()


def _conflicts(
    tx: Transaction, write: PreparedWrite
) -> tuple[dict[str, bytes], frozenset[str], Place]:
    """Return rows of ``write`` that are stored, its batches that are sealed, the end of the log."""
    experiment = write.calls[0].experiment
    eids = [experience.eid for batch in write.batches for experience in batch.experiences]
    batches = writer_queries.batches(tx, experiment, sorted(write.open_batches))
    sealed = frozenset(key for key, row in batches.items() if row.sealed_at is not None)
    known = writer_queries.stored(tx, experiment, eids)
    return known, sealed, log.end(tx, experiment)


_logger = logging.getLogger(__name__)

CHECKED_CALLS = 16
"""Number of first calls that are checked for suspicious values: later calls repeat them."""


LOOK_FOR_HEIRS_S = 2.0
"""Polling interval: a killed process leaves no event that would wake the wait."""


class SQLWriter(BufferWriter):
    """Writes the experiences of one actor. Made by `Experiment.writer`; tasks may share it."""

    def __init__(
        self,
        database: Database,
        group_commit: GroupCommit,
        experiment: int,
        *,
        actor: str,
        schema: str,
        on_invalid: OnInvalid = "raise",
    ) -> None:
        if on_invalid not in ("raise", "quarantine"):
            raise errors.InvalidArgumentError(
                f"on_invalid={on_invalid!r}: accepted are 'raise' and 'quarantine'"
            )
        self._database = database
        self._group_commit = group_commit
        self._experiment = experiment
        self._schema = schema
        self._on_invalid = on_invalid
        self._users = 0
        self._calls_to_check = CHECKED_CALLS
        self.actor = actor
        self._presence = group_commit.presence_of(experiment, actor)
        self._warns_of_unpublished = True
        self._taken_over: dict[str, waiting.Presence] = {}

    @override
    async def write(self, experiences: Sequence[Experience]) -> WriteReceipt:
        """Record ``experiences``; on return they are durable.

        A call is written completely or not at all. Concurrent calls share a transaction, but one
        can fail without the others. Experiences stored already with the same content count as
        duplicates; those of a sealed batch are recorded as rejected (``late``).

        All rows of a run belong in one call: a group is decided as soon as each of its runs has
        one. Rows that come before that still join it; strategies reject later ones as late.

        Raises:
            InvalidExperienceError: an invalid field (with ``on_invalid="quarantine"``, the
                experience is recorded as rejected instead).
            ConflictingExperienceError: an EID is stored with other content.
        """
        items: Any = experiences  # of a caller who may not check types
        if isinstance(items, Experience) or not isinstance(items, Iterable):
            raise errors.InvalidArgumentError(
                f"write() takes a list of experiences, not {items!r:.60}"
            )
        rows = list(items)
        for row, experience in enumerate(rows if set(map(type, rows)) - {Experience} else ()):
            if not isinstance(experience, Experience):
                raise errors.InvalidArgumentError(
                    f"write() takes experiences, item {row} is {experience!r:.60}"
                )
        call = WriteCall(
            rows,
            self._experiment,
            self.actor,
            self._schema,
            self._on_invalid,
            self._database.segments,
        )
        if rows:
            await self._group_commit.submit(call)
        if self._calls_to_check:
            self._calls_to_check -= 1
            # Of all rows of the event, so that one check serves every call that shares it.
            warning = suspicious_values(call.batches)
            if warning is not None:
                # One warning is enough: the other calls most likely repeat the mistake.
                self._calls_to_check = 0
                _logger.warning("%s", waiting.one_line(warning))
        # A changed EID would no longer name the stored row.
        freeze(experience.eid for experience in rows)
        return call.receipt()

    @override
    async def plan(
        self,
        batch: Key,
        tasks: Sequence[Key],
        rollouts_per_group: int,
        *,
        policy_version: int | Callable[[], int | None] | None = None,
        contents: bytes | None = None,
    ) -> bool:
        """Record the content of a batch before it is generated; repeating a plan is a no-op.

        Waits until the trainer needs more (see `planning.Admission`): backpressure acts before
        generation.

        Args:
            policy_version: the version that will generate, for the bound on staleness; a function
                is called at each check, so that loading newer weights can end the wait.
            contents: digest of the contents of ``tasks``; planning the batch again with another one
                is an error.

        Returns:
            True once planned; False if the experiment finished before there was room.

        Raises:
            ConflictingPlanError: the batch is planned with other tasks.
            BatchTakenError: another actor has planned it, with the same tasks.
        """
        database, experiment, actor = self._database, self._experiment, self.actor
        if isinstance(tasks, str):  # a list of its letters
            raise errors.InvalidArgumentError(
                f"batch {batch!r}: tasks={tasks!r:.60} is a text: give a list of task ids"
            )
        wanted = BatchPlanned(
            batch=batch, tasks=list(tasks), rollouts_per_group=rollouts_per_group, contents=contents
        )
        planning.check_plan(wanted)
        database.require_writable()  # fail before waiting, not after
        event = new_event(wanted)

        def append(tx: Transaction, own: int | None) -> planning.AdmissionCheck:
            # Check again under the lock: two explorers must not both take the last place.
            tx.lock(experiment)
            check = planning.check_admission(tx, experiment, actor, wanted, own)
            if check.answer is planning.Answer.PLAN:
                log.append(tx, experiment, [(actor, event)])
                # In the plan's transaction: bounds ignore batches of explorers without a heartbeat.
                leases.record_presence(tx, experiment, self._presence.first())
            return check

        async def tell() -> str:
            who = await database.read(diagnosis.of_admission, experiment, check.rules.trainer)
            return f"explorer {actor!r} waits to plan batch {batch!r}: {check.describe(own)}; {who}"

        wait = waiting.ReportedWait(database, experiment, tell, self._presence)
        while True:
            # Taken before all is read, so that what is committed meanwhile ends the wait.
            state = await database.changes.state()
            own = policy_version() if callable(policy_version) else policy_version
            check = await database.read(planning.check_admission, experiment, actor, wanted, own)
            self._warn_if_unpublished(check, own)
            if check.answer is planning.Answer.PLAN:
                check = await database.write(append, own)
            if check.answer is not planning.Answer.WAIT:
                wait.over()
                await self._presence.seen(at_once=True)
                return check.answer is not planning.Answer.FINISHED
            planning.require_fresh(batch, policy_version, check)
            await wait.changed(state)

    def _warn_if_unpublished(
        self, check: planning.AdmissionCheck, policy_version: int | None
    ) -> None:
        """Warn once if the trainer commits steps but publishes no weights."""
        rules, backlog = check.rules, check.backlog
        concerned = policy_version is not None or rules.max_staleness is not None
        if concerned and self._warns_of_unpublished and planning.is_unpublished(rules, backlog):
            self._warns_of_unpublished = False
            what = f"{planning.unpublished(rules, backlog)}: {planning.PUBLISHING}"
            what = f"explorer {self.actor!r}: {what}"
            _logger.warning("%s", waiting.one_line(what))

    @override
    async def missing(self, batch: Key) -> list[tuple[Key, int]]:
        """Return the planned (task, run) pairs that are not stored yet.

        Raises:
            InvalidArgumentError: the batch was never planned.
        """
        return await self._database.read(planning.missing, self._experiment, batch)

    async def unsealed(self) -> tuple[int, list[str]]:
        """Return the number of batches this actor planned, and the unsealed ones, oldest first.

        After a crash an explorer finishes these before it plans more.
        """
        return await self._database.read(
            writer_queries.batches_of_actor, self._experiment, self.actor
        )

    async def take_over(self, batches: Collection[str] | None = None) -> list[str]:
        """Claim planned batches whose explorers are gone, and return them, oldest first.

        This writer then has to write their missing runs and seal them. `stay_present` keeps the
        claim; an explorer restarted under its old name waits for this process.

        Args:
            batches: the batches that may be claimed; None: all.
        """
        of_experiment = partial(self._group_commit.presence_of, self._experiment)
        taken = await self._database.write(
            planning.take_over, self._experiment, of_experiment, set(self._taken_over), batches
        )
        # `stay_present` sends heartbeats for these names too, or others would claim the batches
        # again.
        for actor in {batch.actor for batch in taken}:
            self._taken_over[actor] = of_experiment(actor)
        for batch in taken:
            _logger.warning(
                "explorer %r takes over batch %r: %r, which planned it, is gone",
                self.actor,
                batch.key,
                batch.actor,
            )
        return [batch.key for batch in taken]

    async def batches(self, batches: Sequence[str]) -> dict[str, BatchRow]:
        """Return those of ``batches`` that are planned or sealed."""
        return await self._database.read(writer_queries.batches, self._experiment, batches)

    async def contents_of(self, batches: Sequence[BatchRow]) -> dict[str, bytes]:
        """Return batch -> digest of the contents of its tasks, for plans that recorded one."""
        return await self._database.read(planning.contents_of, self._experiment, batches)

    async def planned(self, batch: Key) -> tuple[tuple[Key, ...], int]:
        """Return the tasks of a planned batch and the planned number of rollouts of each.

        Raises:
            InvalidArgumentError: the batch was never planned.
        """
        return await self._database.read(planning.planned, self._experiment, batch)

    async def stored(self, batch: Key) -> int:
        """Return the number of stored experiences of ``batch``, which `seal` takes."""
        return await self._database.read(writer_queries.count_in_batch, self._experiment, batch)

    @override
    async def seal(self, batch: Key, expected: int) -> None:
        """Record that the batch is complete with ``expected`` experiences; repeating is a no-op.

        Raises:
            ConflictingSealError: the batch holds, or was sealed with, another number.
            InvalidArgumentError: an impossible batch, or ``expected`` is no int.
        """
        if batch != "":  # of an EID that names none; nothing plans it
            planning.check_batch(batch)
        if not hasattr(expected, "__index__"):
            raise errors.InvalidArgumentError(
                f"batch {batch!r}: expected={expected!r}, it must be an int"
            )
        await self._database.write(
            planning.seal, self._experiment, batch, expected, actor=self.actor
        )

    async def begin_exploring(self) -> None:
        """Register this explorer and warn if another process uses the same actor name.

        A process that also has another name has taken over this explorer's open batches: wait until
        it seals them, or ends. A process with only this name may be a remnant of this explorer
        before it was killed.
        """
        database, presence, left = self._database, self._presence, None
        # Before looking for namesakes: of two that start at once, at least one sees the other.
        await presence.seen(at_once=True)

        def load(tx: Transaction) -> tuple[list[PresenceRow], list[PresenceRow], list[str]]:
            here = leases.processes(tx, self._experiment)
            _, unsealed = writer_queries.batches_of_actor(tx, self._experiment, self.actor)
            namesakes = list(filter(presence.is_namesake, here))
            return namesakes, planning.heirs_of(presence, here), unsealed

        async def tell() -> str:
            return (
                f"explorer {self.actor!r} waits for batch {unsealed[0]!r}, which another process "
                f"took over ({waiting.describe_process(heirs[0])})"
            )

        wait = waiting.ReportedWait(database, self._experiment, tell, presence)
        while True:
            state = await database.changes.state()
            namesakes, heirs, unsealed = await database.read(load)
            for row in namesakes if left is None else ():
                if row not in heirs:
                    what = (
                        f"another process explores as {self.actor!r} too "
                        f"({waiting.describe_process(row)}): give each process an actor name of "
                        "its own"
                    )
                    _logger.warning("%s", waiting.one_line(what))
            left = unsealed if left is None else [batch for batch in left if batch in unsealed]
            if not (heirs and left):
                wait.over()
                return
            await wait.changed(state, LOOK_FOR_HEIRS_S)

    async def stay_present(self) -> None:
        """Send heartbeats until cancelled, then remove the presence."""
        try:
            async with self._presence.heartbeats():
                while True:
                    await anyio.sleep(waiting.SEEN_EVERY_S)
                    for presence in list(self._taken_over.values()):  # more may be taken meanwhile
                        with suppress(errors.StoreError):  # writes report the store's themselves
                            await presence.seen()
        finally:
            for presence in self._taken_over.values():
                await presence.gone()

    async def waits_for(self, reason: str) -> None:
        """Show other processes what this explorer waits for, until `waits_no_more`."""
        self._presence.waiting_for = reason
        with suppress(errors.StoreError):  # writes report errors of the store themselves
            await self._presence.seen()

    async def stay_at_work(self, is_under_way: Callable[[], bool] = lambda: True) -> None:
        """Record until cancelled whether rollouts are under way, which counts as progress."""
        await self._presence.keep_at_work(is_under_way, waiting.wait_report_s())

    def waits_no_more(self) -> None:
        """End the reported wait."""
        self._presence.waiting_for = None

    @override
    async def acquire(self) -> int:
        """Register one more user; return how many there are."""
        self._users += 1
        return self._users

    @override
    async def release(self) -> int:
        """Undo one `acquire`; return the number of remaining users."""
        self._users = max(0, self._users - 1)
        return self._users
