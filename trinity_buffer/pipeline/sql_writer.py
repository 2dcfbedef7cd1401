"""The writer of explorers: durable when it returns, and writing twice is writing once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import anyio.to_thread

from trinity_buffer.crash_points import reached
from trinity_buffer.errors import (
    ConflictingExperienceError,
    InvalidArgumentError,
    InvalidExperienceError,
)
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID, Key
from trinity_buffer.pipeline import planning
from trinity_buffer.pipeline.encoding import (
    EncodedWrite,
    content_digest_of,
    encode_experiences,
)
from trinity_buffer.pipeline.events import new_event
from trinity_buffer.pipeline.group_commit import GroupCommit, PreparedWrite
from trinity_buffer.pipeline.validation import validate
from trinity_buffer.store import queries
from trinity_buffer.store.database import Database
from trinity_buffer.store.segments import new_key, rows_of
from trinity_buffer.writer import BufferWriter, WriteReceipt

ROWS_PER_EVENT = 1024
"""A larger write becomes several events of one transaction: a reader that needs one row decodes no more than this."""

OnInvalid = Literal["raise", "quarantine"]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one event will record: encoded once, however often its body has to be written anew."""

    experiences: Sequence[Experience]
    encoded: EncodedWrite
    key: bytes
    segment_rows: Sequence[Mapping[str, object]]


class SQLWriter(BufferWriter):
    """Writes the experiences of one actor. Made by `Experiment.writer`; any number of tasks may share one."""

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
        self.actor = actor

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
        call = _Call(list(experiences))
        await _in_thread(self._admit, call)
        duplicates = len(call.given) - len(call.pending)
        while call.pending:
            prepared = await _in_thread(self._prepare, call)
            reached("before-append")
            outcome = await self._group_commit.submit(prepared)
            if outcome.position:
                reached("after-append")
                return call.receipt(outcome.position)
            call.late |= outcome.sealed
            if outcome.known:
                new = _without_known(parts, outcome.known)
                duplicates += len(pending) - len(new)
                pending, parts = new, None
        return WriteReceipt(0, 0, duplicates, 0, uids)

    async def plan(
        self,
        batch: Key,
        tasks: Sequence[Key],
        rollouts_per_group: int,
        *,
        policy_version: int | Callable[[], int] | None = None,
    ) -> bool:
        """Record what the batch will hold, before it is generated; the same again is a no-op.

        Waits until the trainer needs more (see `planning.Admission`): backpressure comes before
        generation.

        Args:
            policy_version: the version that will generate, for the bound on staleness; a function
                is asked again at each look, so that an explorer that loads newer weights meanwhile
                gets on.

        Returns:
            True once planned; False if the experiment finished before there was room.

        Raises:
            ConflictingPlanError: the batch is planned with other tasks, or by another actor.
        """
        return await planning.plan(
            self._database,
            self._experiment,
            self.actor,
            batch,
            tasks,
            rollouts_per_group,
            policy_version,
        )

    async def missing(self, batch: Key) -> list[tuple[Key, int]]:
        """Return the planned (task, run) pairs that are not stored: what to generate again after a crash.

        Raises:
            InvalidArgumentError: the batch was never planned.
        """
        return await planning.missing(self._database, self._experiment, batch)

    async def unsealed(self) -> tuple[int, list[str]]:
        """Return how many batches this actor has planned, and which of them are not sealed, oldest first.

        After a crash an explorer finishes these before it plans more.
        """
        async with self._database.reading() as tx:
            return await queries.batches_of_actor(tx, self._experiment, self.actor)

    async def planned(self, batch: Key) -> tuple[tuple[Key, ...], int]:
        """Return the tasks of a planned batch and how many rollouts each shall have.

        Raises:
            InvalidArgumentError: the batch was never planned.
        """
        async with self._database.reading() as tx:
            row = await queries.batch_row(tx, self._experiment, batch)
        if row is None or row.rollouts_per_group is None:
            raise InvalidArgumentError(f"batch {batch!r} was never planned; call plan() first")
        return row.tasks, row.rollouts_per_group

    async def stored(self, batch: Key) -> int:
        """Return how many experiences of ``batch`` are stored: what `seal` expects to be told."""
        async with self._database.reading() as tx:
            return await queries.count_in_batch(tx, self._experiment, batch)

    async def seal(self, batch: Key, expected: int) -> None:
        """Record that the batch is complete with ``expected`` experiences; the same again is a no-op.

        Raises:
            ConflictingSealError: the batch holds another number, or was sealed with another.
        """
        await planning.seal(self._database, self._experiment, self.actor, batch, expected)

    async def acquire(self) -> int:
        """Register one more user; return how many there are."""
        self._users += 1
        return self._users

    async def release(self) -> int:
        """Take back one `acquire`; return how many users are left."""
        self._users = max(0, self._users - 1)
        return self._users

    def _invalid(self, experiences: Sequence[Experience]) -> dict[EID, str]:
        found: dict[EID, str] = {}
        for experience in experiences:
            try:
                validate(experience, self._schema)
            except InvalidExperienceError:
                if self._on_invalid == "raise":
                    raise
                found[experience.eid] = "invalid"
        return found

    def _prepare(
        self, parts: Sequence[_Part], invalid: Mapping[EID, str], late: frozenset[str]
    ) -> PreparedWrite:
        events = []
        for part in parts:
            refused = {
                slot: "late" if str(experience.eid.batch) in late else invalid[experience.eid]
                for slot, experience in enumerate(part.experiences)
                if str(experience.eid.batch) in late or experience.eid in invalid
            }
            sizes = {family: len(blob) for family, blob in part.encoded.families.items()}
            body = {
                "segment": part.key,
                "families": sizes,
                "meta": part.encoded.meta,
                "refused": refused,
            }
            events.append(new_event("ExperiencesRecorded", body))
        return PreparedWrite(
            self._experiment,
            self.actor,
            [experience.eid for part in parts for experience in part.experiences],
            events,
            [row for part in parts for row in part.segment_rows],
            late,
        )


def _encode(experiences: Sequence[Experience]) -> list[_Part]:
    parts = []
    for start in range(0, len(experiences), ROWS_PER_EVENT):
        some = experiences[start : start + ROWS_PER_EVENT]
        encoded, key = encode_experiences(some), new_key()
        parts.append(_Part(some, encoded, key, rows_of(key, encoded.families)))
    return parts


def _distinct(experiences: Sequence[Experience]) -> list[Experience]:
    """Return ``experiences`` without repetitions within the call."""
    by_eid: dict[EID, Experience] = {}
    for experience in experiences:
        first = by_eid.setdefault(_as_text(experience.eid), experience)
        if first is not experience and content_digest_of(first) != content_digest_of(experience):
            raise ConflictingExperienceError(
                f"experience {experience.eid.uid} comes twice in one write, with two contents; "
                "give a deliberate second attempt another suffix, such as 'a1'"
            )
    return list(by_eid.values())


def _as_text(eid: EID) -> EID:
    """Return ``eid`` as the store compares it: ``7`` and ``"7"`` are one key."""
    return replace(eid, batch=str(eid.batch), task=str(eid.task))


def _without_known(
    parts: Sequence[_Part], known: Mapping[EID, tuple[int, bytes]]
) -> list[Experience]:
    new = []
    for part in parts:
        for experience, digest in zip(part.experiences, part.encoded.meta["digest"], strict=True):
            if experience.eid not in known:
                new.append(experience)
            elif known[experience.eid][1] != digest:
                raise ConflictingExperienceError(
                    f"experience {experience.eid.uid} is stored with other content; nothing of this call was written. "
                    "Give a deliberate second attempt another suffix, such as 'a1'"
                )
    return new
