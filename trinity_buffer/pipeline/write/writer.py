"""The writer of explorers: durable on return, and idempotent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

import anyio
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError, StoreError
from trinity_buffer.events import BatchPlanned
from trinity_buffer.experience import Experience
from trinity_buffer.faultpoints import reached
from trinity_buffer.identity import Key, freeze
from trinity_buffer.pipeline.coordination.waiting import (
    SEEN_EVERY_S,
    Presence,
    describe_process,
    one_line,
    wait_report_s,
)
from trinity_buffer.pipeline.write import planning
from trinity_buffer.pipeline.write.batch import OnInvalid, WriteCall, listed, suspicious_values
from trinity_buffer.pipeline.write.group_commit import GroupCommit
from trinity_buffer.store import leases, writer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.rows import BatchRow
from trinity_buffer.writer import BufferWriter, WriteReceipt

_logger = logging.getLogger(__name__)

CHECKED_CALLS = 16
"""Number of first calls that are checked for suspicious values: later calls repeat them."""


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
            raise InvalidArgumentError(
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
        self._unpublished = planning.UnpublishedWatch(actor)
        self._taken_over: dict[str, Presence] = {}

    @override
    async def write(self, experiences: Sequence[Experience]) -> WriteReceipt:
        """Record ``experiences``; on return they are durable.

        A call is written completely or not at all. Concurrent calls share a transaction, but one
        can fail without the others. Experiences stored already with the same content count as
        duplicates; those of a sealed batch are recorded as rejected (``late``).

        Raises:
            InvalidExperienceError: an invalid field (with ``on_invalid="quarantine"``, the
                experience is recorded as rejected instead).
            ConflictingExperienceError: an EID is stored with other content.
        """
        call = WriteCall(
            listed(experiences),
            self._experiment,
            self.actor,
            self._schema,
            self._on_invalid,
            self._database.segments,
        )
        if call.experiences:
            reached("before-append")
            await self._group_commit.submit(call)
            if call.place.position:  # else nothing was new
                reached("after-append")
        if self._calls_to_check:
            self._calls_to_check -= 1
            # Of all rows of the event, so that one check serves every call that shares it.
            warning = suspicious_values(call.batches)
            if warning is not None:
                # One warning is enough: the other calls most likely repeat the mistake.
                self._calls_to_check = 0
                _logger.warning("%s", one_line(warning))
        # A changed EID would no longer name the stored row.
        freeze(experience.eid for experience in call.experiences)
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
        wanted = BatchPlanned(
            batch=batch, tasks=list(tasks), rollouts_per_group=rollouts_per_group, contents=contents
        )
        return await planning.plan(
            self._database,
            self._experiment,
            self._unpublished,
            self._presence,
            wanted,
            policy_version,
        )

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
        planning.check_batch(batch)
        if not hasattr(expected, "__index__"):
            raise InvalidArgumentError(f"batch {batch!r}: expected={expected!r}, it must be an int")
        await self._database.write(
            planning.seal, self._experiment, batch, expected, actor=self.actor
        )

    async def begin_exploring(self) -> None:
        """Register this explorer and warn if another process uses the same actor name.

        A process that also has another name has taken over this explorer's open batches: wait until
        it seals them, or ends. A process with only this name may be a remnant of this explorer
        before it was killed.
        """
        # Before looking for namesakes: of two that start at once, at least one sees the other.
        await self._presence.seen(at_once=True)
        here = await self._database.read(leases.processes, self._experiment)
        heirs = planning.heirs_of(self._presence, here)
        for row in filter(self._presence.is_namesake, here):
            if row not in heirs:
                _logger.warning(
                    "%s",
                    one_line(
                        f"another process explores as {self.actor!r} too "
                        f"({describe_process(row)}): give "
                        "each process an actor name of its own"
                    ),
                )
        if heirs:
            await planning.wait_for_heirs(self._database, self._experiment, self._presence)

    async def stay_present(self) -> None:
        """Send heartbeats until cancelled, then remove the presence."""
        try:
            async with self._presence.heartbeats():
                while True:
                    await anyio.sleep(SEEN_EVERY_S)
                    for presence in self._taken_over.values():
                        with suppress(StoreError):  # writes report errors of the store themselves
                            await presence.seen()
        finally:
            for presence in self._taken_over.values():
                await presence.gone()

    async def waits_for(self, reason: str) -> None:
        """Show other processes what this explorer waits for, until `waits_no_more`."""
        self._presence.waiting_for = reason
        with suppress(StoreError):  # writes report errors of the store themselves
            await self._presence.seen()

    async def stay_at_work(self, is_under_way: Callable[[], bool] = lambda: True) -> None:
        """Record until cancelled whether rollouts are under way, which counts as progress."""
        await self._presence.keep_at_work(is_under_way, wait_report_s())

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
