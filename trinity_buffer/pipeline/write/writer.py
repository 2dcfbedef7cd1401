"""The writer of explorers: durable when it returns, and writing twice is writing once."""

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
from trinity_buffer.pipeline.coordination.presence import (
    SEEN_EVERY_S,
    Presence,
    Work,
    describe_process,
)
from trinity_buffer.pipeline.coordination.waiting import one_line, wait_report_s
from trinity_buffer.pipeline.write import planning
from trinity_buffer.pipeline.write.batch import OnInvalid, WriteCall
from trinity_buffer.pipeline.write.group_commit import GroupCommit
from trinity_buffer.store import heartbeats, writer_queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.log import Place
from trinity_buffer.store.rows import BatchRow
from trinity_buffer.writer import BufferWriter, WriteReceipt

_logger = logging.getLogger(__name__)

CHECKED_CALLS = 16
"""The first calls of a writer, in which mistakes show that all of its calls make."""


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

        All of the call is written, or nothing: calls that run at the same time share a transaction,
        but not their fate. What is stored already with the same content is counted as a duplicate;
        what belongs to a sealed batch is recorded as rejected (``late``).

        Raises:
            InvalidExperienceError: a field that cannot be right (with ``on_invalid="quarantine"``
                it is recorded as rejected instead).
            ConflictingExperienceError: an EID is stored with other content.
        """
        call = WriteCall(experiences, self._experiment, self.actor, self._schema, self._on_invalid)
        place = Place(0, b"")
        while call.rows:
            reached("before-append")
            outcome = await self._group_commit.submit(call)
            place = outcome.place
            if not (outcome.known or outcome.sealed):
                reached("after-append")
                break
            call.learn(outcome)
            place = place._replace(position=0)
        self._warn_of_suspicious_values(call)
        freeze(experience.eid for experience in call.experiences)
        return call.receipt(place)

    def _warn_of_suspicious_values(self, call: WriteCall) -> None:
        if not self._calls_to_check:
            return
        self._calls_to_check -= 1
        warning = call.suspicious_values()
        if warning is not None:
            self._calls_to_check = 0
            _logger.warning("%s", one_line(warning))

    @override
    async def plan(
        self,
        batch: Key,
        tasks: Sequence[Key],
        rollouts_per_group: int,
        *,
        policy_version: int | Callable[[], int] | None = None,
        contents: bytes | None = None,
    ) -> bool:
        """Record what the batch will hold, before it is generated; the same again is a no-op.

        Waits until the trainer needs more (see `planning.Admission`): backpressure comes before
        generation.

        Args:
            policy_version: the version that will generate, for the bound on staleness; a function
                is asked again at each look, so that an explorer that loads newer weights meanwhile
                gets on.
            contents: digest of what stands behind ``tasks``; who plans the batch again with another
                one is refused.

        Returns:
            True once planned; False if the experiment finished before there was room.

        Raises:
            ConflictingPlanError: the batch is planned with other tasks.
            BatchTakenError: another actor has planned it, with the same tasks.
        """
        wanted = BatchPlanned(
            batch=batch,
            tasks=list(tasks),
            rollouts_per_group=rollouts_per_group,
            contents=contents,
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
        """Return the planned (task, run) pairs that are not stored: what is left to generate.

        Raises:
            InvalidArgumentError: the batch was never planned.
        """
        return await planning.missing(self._database, self._experiment, batch)

    async def unsealed(self) -> tuple[int, list[str]]:
        """Return how many batches this actor has planned, and which are not sealed, oldest first.

        After a crash an explorer finishes these before it plans more.
        """
        return await self._database.read(
            writer_queries.batches_of_actor, self._experiment, self.actor
        )

    async def take_over(self, batches: Collection[str] | None = None) -> list[str]:
        """Claim planned batches whose explorers are gone, and return them, oldest first.

        What is missing of them is this writer's to write, and they are its to seal. `stay_present`
        keeps the claim; an explorer that is started again under its own name waits for this one.

        Args:
            batches: those that may be claimed; None: all.
        """
        of_experiment = partial(self._group_commit.presence_of, self._experiment)
        taken = await self._database.write(
            planning.take_over, self._experiment, of_experiment, set(self._taken_over), batches
        )
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
        """Return those of ``batches`` that somebody has planned or sealed."""
        return await self._database.read(writer_queries.batches, self._experiment, batches)

    async def contents_of(self, batches: Sequence[BatchRow]) -> dict[str, bytes]:
        """Return batch -> digest of what stands behind its tasks, where its plan says that."""
        return await self._database.read(planning.contents_of, self._experiment, batches)

    async def planned(self, batch: Key) -> tuple[tuple[Key, ...], int]:
        """Return the tasks of a planned batch and how many rollouts each shall have.

        Raises:
            InvalidArgumentError: the batch was never planned.
        """
        row = await self._database.read(writer_queries.batch_row, self._experiment, batch)
        if row is None or row.rollouts_per_group is None:
            raise InvalidArgumentError(f"batch {batch!r} was never planned; call plan() first")
        return row.tasks, row.rollouts_per_group

    async def stored(self, batch: Key) -> int:
        """Return how many experiences of ``batch`` are stored: what `seal` expects to be told."""
        return await self._database.read(writer_queries.count_in_batch, self._experiment, batch)

    @override
    async def seal(self, batch: Key, expected: int) -> None:
        """Record that the batch is complete with ``expected`` experiences; again is a no-op.

        Raises:
            ConflictingSealError: the batch holds another number, or was sealed with another.
        """
        await planning.seal(self._database, self._experiment, self.actor, batch, expected)

    async def begin_exploring(self) -> None:
        """Say that this explorer is there; warn of namesakes, and wait for who took its batches.

        A process that is there under another name too has taken over what this one left behind: it
        makes that, and seals it, or ends. One of the same name alone may be what is left of this
        explorer, as it was before it was killed.
        """
        await self._presence.seen(at_once=True)
        here = await self._database.read(heartbeats.processes, self._experiment)
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
        """Say until cancelled that this explorer is there, and then take it back."""
        try:
            async with self._presence.heartbeats():
                while True:
                    await anyio.sleep(SEEN_EVERY_S)
                    for presence in self._taken_over.values():
                        with suppress(StoreError):  # whoever writes hears of it
                            await presence.seen()
        finally:
            for presence in self._taken_over.values():
                await presence.gone()

    async def waits_for(self, reason: str) -> None:
        """Tell others what this explorer waits for, until `waits_no_more`."""
        self._presence.waiting_for = reason
        with suppress(StoreError):  # whoever writes hears of it
            await self._presence.seen()

    async def stay_at_work(self, is_under_way: Callable[[], bool] = lambda: True) -> None:
        """Say until cancelled, while rollouts are under way, that they are: the run moves."""
        await Work(self._presence, is_under_way).keep(wait_report_s())

    def waits_no_more(self) -> None:
        """Note that what was waited for came."""
        self._presence.waiting_for = None

    @override
    async def acquire(self) -> int:
        """Register one more user; return how many there are."""
        self._users += 1
        return self._users

    @override
    async def release(self) -> int:
        """Take back one `acquire`; return how many users are left."""
        self._users = max(0, self._users - 1)
        return self._users
