"""One call of a writer: validated, encoded, and encoded again without rows that are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal

import anyio
import torch

from trinity_buffer.codec.segments import is_scorable
from trinity_buffer.errors import (
    ConflictingExperienceError,
    InvalidArgumentError,
    InvalidExperienceError,
)
from trinity_buffer.events import ExperienceColumns, ExperiencesRecorded
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.encoding import RecordBatch, encode_experiences
from trinity_buffer.pipeline.handle import new_event
from trinity_buffer.pipeline.write.checks import (
    ADDRESS,
    STORABLE,
    passes,
    require,
    validate,
)
from trinity_buffer.store.log import NewEvent, Place
from trinity_buffer.store.segments import SegmentRow, SegmentStore, new_key
from trinity_buffer.writer import WriteReceipt, invalid

OnInvalid = Literal["raise", "quarantine"]
_NOWHERE = Place(0, b"")


@dataclass(eq=False, slots=True)
class PreparedWrite:
    """One call, or several of one writer as one event, encoded.

    Attributes:
        calls: whose rows they are, in this order.
        batches: the rows, of one event each.
        events: one of each batch.
        segments: what the store returned for the blobs.
        open_batches: batches of experiences that are not refused already; if one of them is sealed,
            the write fails.
    """

    calls: Sequence[WriteCall]
    batches: Sequence[RecordBatch]
    events: Sequence[NewEvent]
    segments: Sequence[SegmentRow]
    open_batches: frozenset[str]


@dataclass(eq=False)
class WriteCall:
    """The experiences of one call on their way into the log.

    Attributes:
        experiences: the experiences from the caller.
        experiment: key of their experiment.
        actor: the writing process.
        schema: name of the schema to check against.
        on_invalid: ``"raise"``, or ``"quarantine"`` to record invalid rows as rejected.
        store: where the blobs of segments are put.
        pending: those still to be written; None: nothing is checked yet.
        uids: of all experiences, which are equal where the store takes their addresses as equal.
        batches: what is to be written, with rows of the calls that share its event.
        digests: of the content of pending rows.
        place: of the last event with its rows; its position is 0 as long as nothing is written.
        answered: set once the rows are durable, or ``error`` says why they are not.
    """

    experiences: list[Experience]
    experiment: int
    actor: str
    schema: str
    on_invalid: OnInvalid
    store: SegmentStore
    pending: list[Experience] | None = None
    uids: Sequence[str] = ()
    batches: Sequence[RecordBatch] = ()
    place: Place = _NOWHERE
    answered: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None
    digests: Sequence[bytes] = ()
    _late: frozenset[str] = frozenset()  # batches that were sealed before
    _invalid: dict[EID, str] = field(default_factory=dict)  # -> the reason for their rejection
    _known: dict[str, bytes] = field(default_factory=dict)  # of rows that are stored already

    @property
    def rows(self) -> int:
        """Number of experiences still to be written."""
        return len(self.experiences if self.pending is None else self.pending)

    def prepare(self, others: Sequence[WriteCall] = ()) -> list[PreparedWrite]:
        """Return the call and ``others`` of its writer, encoded, their blobs put into the store.

        The blobs are part of it only once the transaction that attaches them has committed.

        They are one write if all rows are valid and distinct, otherwise a write each, except for
        calls that are invalid: those get their error. Computes: call it off the event loop.
        """
        calls = [self, *others]
        if self.pending is None:
            rows = [experience for call in calls for experience in call.experiences]
            batches = _batches_of(rows)
            is_valid = all(passes(batch, self.schema) for batch in batches)
            uids = [experience.eid.uid for experience in rows] if is_valid else []
            if len(set(uids)) == len(rows):
                left = iter(uids)
                for call in calls:
                    call.pending = call.experiences
                    call.uids = list(islice(left, call.rows))
                return [self._encoded(batches, calls)]
            if others:
                return [write for call in calls for write in call.prepare()]
        try:
            if self.pending is None:
                self._check()
                self.uids = [experience.eid.uid for experience in self.experiences]
                self.pending = _distinct(self.experiences)
            return [self._encoded(_batches_of(self.pending), [self])]
        except Exception as error:  # noqa: BLE001 - raised to its own caller
            self.error = error
            return []

    def _encoded(self, batches: Sequence[RecordBatch], calls: Sequence[WriteCall]) -> PreparedWrite:
        events, segments, names = [], list[SegmentRow](), set[str]()
        for batch in batches:
            batch.encode()
            names.update(map(str, batch.meta["batch"]))
            refused: dict[int, str] = {}
            # Refused rows are recorded too, so that a group is not waited for in vain.
            if self._late or self._invalid:
                reasons = enumerate(map(self._refusal, batch.experiences))
                refused = {slot: reason for slot, reason in reasons if reason is not None}
            key = new_key()
            fact = ExperiencesRecorded(
                segment=key,
                families={name: sum(map(len, blob)) for name, blob in batch.families.items()},
                columns=ExperienceColumns(**batch.meta),
                refused=refused,
                scorable=is_scorable(batch.columns) or None,
                sampling=batch.sampling,
            )
            events.append(new_event(fact))
            segments += self.store.put(key, batch.families)
        # Rows keep the order of the calls, so each call takes its digests from the front.
        digests = chain.from_iterable(batch.meta["digest"] for batch in batches)
        for call in calls:
            call.batches = batches
            call.digests = list(islice(digests, call.rows))
        return PreparedWrite(calls, batches, events, segments, frozenset(names) - self._late)

    def _refusal(self, experience: Experience) -> str | None:
        is_late = str(experience.eid.batch) in self._late
        return "late" if is_late else self._invalid.get(experience.eid)

    def _check(self) -> None:
        """Raise at the first invalid experience, or note and replace all that will be refused."""
        for row, experience in enumerate(self.experiences):
            try:
                validate(experience, self.schema)
            except InvalidExperienceError as error:
                if self.on_invalid == "raise":
                    raise
                self.experiences[row] = _storable(experience, str(error))
                self._invalid[experience.eid] = invalid(error.field)

    def learn(
        self, known: Mapping[EID, tuple[int, bytes]], sealed: frozenset[str], end: Place
    ) -> None:
        """Apply why nothing was written.

        Args:
            known: rows that are stored already -> address and content digest.
            sealed: batches that were sealed before.
            end: of the log.

        Raises:
            ConflictingExperienceError: a row is stored with other content.
        """
        self._late |= sealed
        # A retry after a lost acknowledgement is normal: rows with the same digest are dropped
        # silently.
        self.pending = without_known(self.batches, known)
        self._known |= {eid.uid: digest for eid, (_, digest) in known.items()}
        # Nothing is written yet: if no row remains, the receipt has no position.
        self.place = end._replace(position=0)

    def receipt(self) -> WriteReceipt:
        """Return the caller's receipt."""
        written = self.pending or []
        refuses = self._late or self._invalid
        rejected = sum(self._refusal(row) is not None for row in written) if refuses else 0
        digests = self.digests
        if len(written) < len(self.experiences):
            uids = (experience.eid.uid for experience in written)
            known = self._known | dict(zip(uids, self.digests, strict=False))
            digests = list(map(known.__getitem__, self.uids))
        return WriteReceipt(
            self.place.position,
            len(written),
            len(self.experiences) - len(written),
            rejected,
            tuple(self.uids),
            tuple(digests),
            self.place.head.hex(),
        )


def listed(experiences: object) -> list[Experience]:
    """Return ``experiences`` as a list.

    Raises:
        InvalidArgumentError: an item is not an experience.
    """
    if isinstance(experiences, Experience) or not isinstance(experiences, Iterable):
        raise InvalidArgumentError(f"write() takes a list of experiences, not {experiences!r:.60}")
    rows = list(experiences)
    for row, experience in enumerate(rows if set(map(type, rows)) - {Experience} else ()):
        if not isinstance(experience, Experience):
            raise InvalidArgumentError(
                f"write() takes experiences, item {row} is {experience!r:.60}"
            )
    return rows


def _batches_of(experiences: Sequence[Experience]) -> list[RecordBatch]:
    """Return ``experiences`` as one batch per event."""
    size, number = sizes.rows_per_event, len(experiences)
    return [RecordBatch(experiences[start : start + size]) for start in range(0, number, size)]


def _storable(experience: Experience, problem: str) -> Experience:
    """Return the recordable part of an invalid experience: all of it, or address and reason.

    Raises:
        InvalidExperienceError: its address is invalid.
    """
    require(experience, ADDRESS)
    try:
        require(experience, STORABLE)
    except InvalidExperienceError:
        # The row must still be recorded under its address, though its content cannot be.
        empty = torch.zeros(0, dtype=torch.int32)
        return Experience(
            eid=experience.eid,
            tokens=empty,
            action_mask=empty.bool(),
            prompt_length=0,
            info={"invalid": problem},
        )
    return experience


def _distinct(experiences: Sequence[Experience]) -> list[Experience]:
    """Return ``experiences`` without repetitions within the call."""
    by_uid: dict[str, Experience] = {}
    for experience in experiences:
        first = by_uid.setdefault(experience.eid.uid, experience)
        if first is not experience and _digest_of(first) != _digest_of(experience):
            raise _conflict(
                experience,
                "comes twice in one write, with two contents; give a deliberate second attempt "
                "another suffix, such as 'a1'",
            )
    return list(by_uid.values())


def _digest_of(experience: Experience) -> bytes:
    """Return the 16-byte digest of the content: everything but address and metrics."""
    digest: bytes = encode_experiences([experience]).meta["digest"][0]
    return digest


def without_known(
    batches: Sequence[RecordBatch], known: Mapping[EID, tuple[int, bytes]]
) -> list[Experience]:
    """Return the experiences that are not stored yet.

    Raises:
        ConflictingExperienceError: one is stored with other content.
    """
    new = []
    for batch in batches:
        for experience, digest in zip(batch.experiences, batch.meta["digest"], strict=True):
            if experience.eid not in known:
                new.append(experience)
            elif known[experience.eid][1] != digest:
                raise _conflict(
                    experience,
                    "is stored with other content; nothing of this call was written. Give a "
                    "deliberate second attempt another suffix, such as 'a1', and each explorer an "
                    "actor name of its own",
                )
    return new


def _conflict(experience: Experience, what: str) -> ConflictingExperienceError:
    error = ConflictingExperienceError(f"experience {experience.eid.uid} {what}")
    error.uid = experience.eid.uid
    return error
