"""One call of a writer: validated, encoded, and encoded again without rows that are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

from trinity_buffer.codec import is_scorable
from trinity_buffer.errors import (
    ConflictingExperienceError,
    InvalidArgumentError,
    InvalidExperienceError,
)
from trinity_buffer.events import ExperienceColumns, ExperiencesRecorded
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.encoding import (
    EncodedWrite,
    Fields,
    content_digest_of,
    encode_experiences,
)
from trinity_buffer.pipeline.handle import new_event
from trinity_buffer.pipeline.write.checks import (
    addresses,
    check_address,
    check_storable,
    first_above_zero,
    forms_pass,
    numbers_pass,
    validate,
)
from trinity_buffer.pipeline.write.group_commit import Outcome, PreparedWrite
from trinity_buffer.store.log import NewEvent, Place
from trinity_buffer.store.segments import new_key
from trinity_buffer.writer import WriteReceipt, invalid

OnInvalid = Literal["raise", "quarantine"]


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one event, encoded once even if the event's body is built several times."""

    experiences: Sequence[Experience]
    encoded: EncodedWrite
    key: bytes

    def numbers_pass(self) -> bool:
        """Return whether the numbers of all experiences are valid."""
        return numbers_pass(self.encoded.columns, map(len, self.encoded.families.values()))


class WriteCall:
    """The experiences of one call on their way into the log.

    Args:
        experiences: the experiences from the caller.
        experiment: key of their experiment.
        actor: the writing process.
        schema: name of the schema to check against.
        on_invalid: ``"raise"``, or ``"quarantine"`` to record invalid rows as rejected.

    Raises:
        InvalidArgumentError: ``experiences`` is not an iterable of experiences.
    """

    def __init__(
        self,
        experiences: Sequence[Experience],
        experiment: int,
        actor: str,
        schema: str,
        on_invalid: OnInvalid,
    ) -> None:
        self.experiences = _listed(experiences)
        self._experiment = experiment
        self._actor = actor
        self._schema = schema
        self._on_invalid = on_invalid
        self._late: frozenset[str] = frozenset()
        self._pending: list[Experience] | None = None
        self._invalid: dict[EID, str] = {}
        self._parts: list[_Part] | None = None
        self._written: Sequence[_Part] = ()  # may include rows of other calls
        self._digests: list[bytes] = []  # of pending rows
        self._known: dict[tuple[Any, ...], bytes] = {}  # of rows that turned out to be stored

    @property
    def rows(self) -> int:
        """Number of experiences still to be written."""
        return len(self.experiences if self._pending is None else self._pending)

    @property
    def joins(self) -> tuple[int, str, str] | None:
        """Key of the calls that may share an event: first attempts of the same writer."""
        return (self._experiment, self._actor, self._schema) if self._pending is None else None

    def prepare(self) -> PreparedWrite:
        """Return the encoded write to commit. Computes: call it off the event loop.

        Raises:
            InvalidExperienceError: an invalid field.
            ConflictingExperienceError: an EID that occurs twice with different content.
            InvalidArgumentError: a value that cannot be stored.
        """
        # The first attempt checks everything; later ones only drop rows that are stored.
        if self._pending is None:
            self._parts = _sound_parts(self.experiences, self._schema)
            self._invalid = self._check() if self._parts is None else {}
            self._pending = _distinct(self.experiences) if self._parts is None else self.experiences
        if self._parts is None:
            self._parts = [_encoded(event_rows) for event_rows in _events_of(self._pending)]
        self._written = self._parts
        self._digests = _digests_of(self._parts)
        return self._as_write(self._pending, self._parts)

    def join(self, others: Sequence[WriteCall]) -> PreparedWrite | None:
        """Return this call and ``others`` as one event, or None if any row may be invalid.

        Then prepare each call by itself, which names the invalid row. Computes.
        """
        calls = [self, *others]
        together = [experience for call in calls for experience in call.experiences]
        parts = _sound_parts(together, self._schema)
        if parts is None:
            return None
        # Rows keep the order of the calls, so each call takes its digests from the front.
        digests = iter(_digests_of(parts))
        for call in calls:
            call.mark_valid(list(islice(digests, len(call.experiences))), parts)
        return self._as_write(together, parts)

    def mark_valid(self, digests: list[bytes], parts: Sequence[_Part]) -> None:
        """Note that all rows are valid and distinct.

        Args:
            digests: digests of their content.
            parts: the parts that contain them, together with rows of other calls.
        """
        self._pending = self.experiences
        self._written = parts
        self._digests = digests

    def learn(self, outcome: Outcome) -> None:
        """Apply why nothing was written: rows that are stored already, batches that are sealed.

        Raises:
            ConflictingExperienceError: a row is stored with other content.
        """
        self._late |= outcome.sealed
        if outcome.known:
            # A retry after a lost acknowledgement is normal: rows with the same digest are dropped
            # silently.
            self._pending = without_known(self._parts or (), outcome.known)
            self._parts = None
            stored = outcome.known.items()
            self._known |= {_as_stored(eid): digest for eid, (_, digest) in stored}

    def suspicious_values(self) -> str | None:
        """Return a warning about values that are valid but probably wrong, or None.

        Covers all rows of the event, so that one check serves every call that shares it.
        """
        for part in self._written:
            for column in part.encoded.columns.get("logprobs", ()):
                highest = first_above_zero(column)
                if highest is not None:
                    return (
                        f"experience {part.experiences[highest[0]].eid.uid}: logprobs up to "
                        f"{highest[1]:.3g}: natural logarithms of probabilities are at most 0"
                    )
        return None

    def receipt(self, place: Place) -> WriteReceipt:
        """Return the caller's receipt; the position in ``place`` is 0 if nothing was written."""
        written = self._pending or []
        refuses = self._late or self._invalid
        rejected = sum(self._refusal(e.eid) is not None for e in written) if refuses else 0
        uids = tuple(experience.eid.uid for experience in self.experiences)
        return WriteReceipt(
            place.position,
            len(written),
            len(uids) - len(written),
            rejected,
            uids,
            self._digests_of_given(),
            place.head.hex(),
        )

    def _digests_of_given(self) -> tuple[bytes, ...]:
        pending = self._pending or []
        # The usual case, without a lookup per row.
        if len(pending) == len(self.experiences):
            return tuple(self._digests)
        keys = [_as_stored(experience.eid) for experience in pending]
        known = self._known | dict(zip(keys, self._digests, strict=False))
        return tuple(known[_as_stored(experience.eid)] for experience in self.experiences)

    def _as_write(self, experiences: Sequence[Experience], parts: Sequence[_Part]) -> PreparedWrite:
        return PreparedWrite(
            self._experiment,
            self._actor,
            [experience.eid for experience in experiences],
            [self._event(part) for part in parts],
            {part.key: part.encoded.families for part in parts},
            frozenset(map(str, {experience.eid.batch for experience in experiences})) - self._late,
        )

    def _check(self) -> dict[EID, str]:
        """Return EID -> reason of invalid experiences, which will be refused."""
        reasons: dict[EID, str] = {}
        for row, experience in enumerate(self.experiences):
            try:
                validate(experience, self._schema)
            except InvalidExperienceError as error:
                if self._on_invalid == "raise":
                    raise
                reasons[experience.eid] = invalid(error.field)
                self.experiences[row] = _storable(experience, str(error))
        return reasons

    def _refusal(self, eid: EID) -> str | None:
        return "late" if str(eid.batch) in self._late else self._invalid.get(eid)

    def _event(self, part: _Part) -> NewEvent:
        refused: dict[int, str] = {}
        # Refused rows are recorded too, so that a group is not waited for in vain.
        if self._late or self._invalid:
            reasons = [self._refusal(experience.eid) for experience in part.experiences]
            refused = {slot: reason for slot, reason in enumerate(reasons) if reason is not None}
        fact = ExperiencesRecorded(
            segment=part.key,
            families={family: len(blob) for family, blob in part.encoded.families.items()},
            columns=ExperienceColumns(**part.encoded.meta),
            refused=refused,
            scorable=is_scorable(part.encoded.columns) or None,
            sampling=part.encoded.sampling,
        )
        return new_event(fact)


def _listed(experiences: object) -> list[Experience]:
    """Return ``experiences`` as a list; raise if an item is not an experience."""
    if isinstance(experiences, Experience) or not isinstance(experiences, Iterable):
        raise InvalidArgumentError(f"write() takes a list of experiences, not {experiences!r:.60}")
    listed = list(experiences)
    for row, experience in enumerate(listed if set(map(type, listed)) - {Experience} else ()):
        if not isinstance(experience, Experience):
            raise InvalidArgumentError(
                f"write() takes experiences, item {row} is {experience!r:.60}"
            )
    return listed


def _sound_parts(experiences: Sequence[Experience], schema: str) -> list[_Part] | None:
    """Return ``experiences`` encoded, or None if one may be invalid or occurs twice."""
    every = [Fields(event_rows) for event_rows in _events_of(experiences)]
    if not all(forms_pass(fields, schema) for fields in every):
        return None
    # Repeated addresses need the comparison of contents in `_distinct`.
    if len(set().union(*map(addresses, every))) < len(experiences):
        return None
    try:
        parts = [_encoded(fields.experiences, fields) for fields in every]
    except InvalidArgumentError:  # a value of foreign code; checks row by row will name it
        return None
    return parts if all(part.numbers_pass() for part in parts) else None


def _events_of(experiences: Sequence[Experience]) -> list[Sequence[Experience]]:
    """Split ``experiences`` into one slice per event."""
    size = sizes().rows_per_event
    return [experiences[start : start + size] for start in range(0, len(experiences), size)]


def _encoded(experiences: Sequence[Experience], fields: Fields | None = None) -> _Part:
    return _Part(experiences, encode_experiences(experiences, fields), new_key())


def _digests_of(parts: Sequence[_Part]) -> list[bytes]:
    return [digest for part in parts for digest in part.encoded.meta["digest"]]


def _storable(experience: Experience, problem: str) -> Experience:
    """Return the recordable part of an invalid experience: all of it, or address and reason.

    Raises:
        InvalidExperienceError: its address is invalid.
    """
    check_address(experience)
    try:
        check_storable(experience)
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
    by_key: dict[tuple[Any, ...], Experience] = {}
    for experience in experiences:
        first = by_key.setdefault(_as_stored(experience.eid), experience)
        if first is not experience and content_digest_of(first) != content_digest_of(experience):
            raise _conflict(
                experience,
                "comes twice in one write, with two contents; give a deliberate second attempt "
                "another suffix, such as 'a1'",
            )
    return list(by_key.values())


def _as_stored(eid: EID) -> tuple[Any, ...]:
    """Return ``eid`` as the store compares it: ``7`` and ``"7"`` are equal."""
    return str(eid.batch), str(eid.task), eid.run, eid.step, eid.suffix


def without_known(
    parts: Sequence[_Part], known: Mapping[EID, tuple[int, bytes]]
) -> list[Experience]:
    """Return the experiences that are not stored yet.

    Raises:
        ConflictingExperienceError: one is stored with other content.
    """
    new = []
    for part in parts:
        for experience, digest in zip(part.experiences, part.encoded.meta["digest"], strict=True):
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
