"""One call of a writer: validated, encoded, and encoded again without rows that are stored.

Each rule of validation is a function of a `RecordBatch` that returns the first problem it sees, or
None. A batch of many rows passes if each rule passes over its columns. If one fails, the same rules
are applied to each row by itself, as a batch of one, to name the invalid experience and its field.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from operator import sub
from typing import Any, Literal

import anyio
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trinity_buffer import errors
from trinity_buffer.codec.arrays import DTYPES
from trinity_buffer.codec.objects import new_event
from trinity_buffer.codec.segments import Column, is_scorable
from trinity_buffer.events import ExperiencesRecorded, NewEvent
from trinity_buffer.experience import ZERO_OR_ONE, CustomField, Experience
from trinity_buffer.identity import EID, SCHEMAS, problem_of_key, problem_of_name, problem_of_text
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.encoding import (
    DTYPE_NAMES,
    EXPERIENCE_TYPES,
    OBJECTS,
    RecordBatch,
    encode_experiences,
)
from trinity_buffer.sampling import SEGMENTS, problem_of_segments
from trinity_buffer.store.log import Place
from trinity_buffer.store.segments import SegmentRow, SegmentStore, new_key
from trinity_buffer.writer import WriteReceipt, invalid

MAX_BYTES = 64 << 20
"""Upper bound of one experience's bytes: more would not fit one part of a segment."""

MAX_INT32, MAX_INT64 = (1 << 31) - 1, (1 << 63) - 1
MAX_FLOAT32 = torch.finfo(torch.float32).max
"""Largest finite number in float32, the dtype of micro-batches."""
INTEGERS = frozenset(
    {*("uint8", "uint16", "uint32", "uint64"), *("int8", "int16", "int32", "int64")}
)
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
MASKS = FLOATS | INTEGERS | {"bool"}
PER_TOKEN = ("logprobs", "token_level_reward", "teacher_logprobs", "advantages", "returns")
TEXTS = ("response_text", "prompt_text", "truncate_status")
LISTS = ("messages", "tools", "chosen_messages", "rejected_messages")
NO_ADDRESS = EID()
"""The default address, of an experience without one."""

ROUNDING = 0.01
"""How far rounding may lift the logarithm of a probability above 0, in any precision."""

_TENSORS = ("tokens", "action_mask", *PER_TOKEN, "chosen", "rejected", "routed_experts")
_VECTORS: dict[str, tuple[frozenset[str], str]] = {
    **dict.fromkeys(("tokens", "chosen", "rejected"), (INTEGERS, "integer token ids")),
    "action_mask": (MASKS, "bool, integers or floats"),
    **dict.fromkeys(PER_TOKEN, (FLOATS, "floats")),
}
_FORMS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_TENSORS, (Tensor, type(None))),
    **dict.fromkeys(TEXTS, (str, type(None))),
    **dict.fromkeys(LISTS, (list, type(None))),
    "multi_modal_inputs": (dict, type(None)),
    **dict.fromkeys(("info", "metrics"), (dict,)),
    "tokens": (Tensor,),
    "custom_fields": (list,),
}
"""Field -> the types of its values; without None it is an empty container at least."""

_INT, _KEY, _NONE = frozenset({int}), frozenset({int, str}), frozenset({type(None)})


Problem = tuple[str, str]
"""The invalid field, and a sentence that begins with it: of the first row, which is the only one
where the sentence matters."""

Rule = Callable[[RecordBatch, str], Problem | None]
"""Takes the rows and their schema."""


def _eids(batch: RecordBatch, _schema: str) -> Problem | None:
    eids = batch.values["eid"]
    batches, tasks, runs, steps, suffixes = batch.addresses
    if not batches:
        return "eid", f"eid is a {type(eids[0]).__name__}, it must be an EID"
    if "" in batches and NO_ADDRESS in eids:
        return "eid", "eid was never given: say batch, task, run and step"
    for field, numbers in (("eid.run", runs), ("eid.step", steps)):
        # The type too: True is 1.
        is_plain = _INT.issuperset(map(type, numbers))
        if not (is_plain and min(numbers) >= 0 and max(numbers) <= MAX_INT32):
            return field, f"{field} is {numbers[0]!r}, it must be an int, 0 or more"
    for field, keys, problem_of in (
        ("eid.batch", batches, problem_of_key),
        ("eid.task", tasks, problem_of_key),
        ("eid.suffix", suffixes, problem_of_name),
    ):
        distinct = set(keys) if _KEY.issuperset(map(type, keys)) else keys
        problem = next(filter(None, map(problem_of, distinct)), None)
        if problem is None and field != "eid.task" and any("/" in str(key) for key in distinct):
            problem = f"is {keys[0]!r}: it must not contain '/'"
        if problem is not None:
            return field, f"{field} {problem}"
    return None


def _forms(batch: RecordBatch, _schema: str) -> Problem | None:
    """Check the types of all fields but numbers, and that their values can be stored."""
    for field, forms in _FORMS.items():
        kinds = batch.kinds[field]
        if not kinds.issubset(forms) and not all(issubclass(kind, forms) for kind in kinds):
            kind = type(batch.values[field][0]).__name__
            return field, f"{field} is a {kind}, it must be a {forms[0].__name__.lower()}"
    for custom in chain.from_iterable(batch.values["custom_fields"]):
        is_sound = isinstance(custom, CustomField) and custom.data_type in DTYPE_NAMES
        if not is_sound or {type(custom.source_field), type(custom.destination_field)} != {str}:
            return "custom_fields", f"custom_fields has {custom!r:.80}, it is no CustomField"
    for inputs in filter(None, batch.values["multi_modal_inputs"]):
        for name, value in inputs.items():
            field = f"multi_modal_inputs[{name!r}]"
            if type(name) is not str or not isinstance(value, Tensor):
                return field, f"{field} must be a tensor under a text"
    try:
        batch.columns, batch.objects  # noqa: B018 - they are made when they are first asked for
    except errors.InvalidArgumentError as error:
        return next(filter(str(error).startswith, (*_TENSORS, *OBJECTS))), str(error)
    return None


def _scalars(batch: RecordBatch, _schema: str) -> Problem | None:
    for kind in set(map(str, batch.values["experience_type"])) - EXPERIENCE_TYPES:
        what = f"is {kind!r:.40}, it must be single_turn, multi_turn or dpo"
        return "experience_type", f"experience_type {what}"
    prompts = batch.values["prompt_length"]
    if batch.kinds["prompt_length"] != _INT:
        return "prompt_length", f"prompt_length is {prompts[0]!r}, it must be an int"
    if max(map(abs, prompts)) > MAX_INT32:
        return "prompt_length", "prompt_length is an int of more than 32 bits: none is so long"
    for reward in batch.values["reward"]:
        if reward is None:
            continue
        if not isinstance(reward, int | float):
            kind = type(reward).__name__
            return "reward", f"reward is a {kind}, it must be a number or None"
        # NaN compares false with everything.
        if not abs(reward) <= (MAX_INT64 if isinstance(reward, int) else MAX_FLOAT32):
            is_large = type(reward) is float and math.isfinite(reward)
            where = " in float32" if is_large else ""
            return "reward", f"reward is {reward!r:.40}, it must be finite{where}"
    return None


def _infos(batch: RecordBatch, _schema: str) -> Problem | None:
    versions, reasons, segments = batch.infos
    for version in versions:
        if version is not None and (type(version) is not int or abs(version) > MAX_INT64):
            field = "info['model_version']"
            return field, f"{field} is {version!r:.40}, it must be an int"
    sizes = zip(segments, batch.values["prompt_length"], batch.sizes["tokens"], strict=True)
    for spans, prompt, size in () if set(map(type, segments)) == _NONE else sizes:
        problem = None if spans is None else problem_of_segments(spans, prompt, size)
        if problem is not None:
            return f"info[{SEGMENTS!r}]", f"info[{SEGMENTS!r}] {problem}"
    for problem in filter(None, map(problem_of_text, filter(None, reasons))):
        return "info['finish_reason']", f"info['finish_reason'] {problem}"
    return None


def _kinds(batch: RecordBatch, schema: str) -> Problem | None:
    kinds = {"dpo"} if schema == "dpo" else {"single_turn", "multi_turn"}
    if kinds.issuperset(batch.values["experience_type"]):
        return None
    if schema == "dpo":
        missing = [field for field in SCHEMAS[schema] if batch.values[field][0] is None]
        field, what = ("action_mask", "is given") if not missing else (missing[0], "is None")
        return field, f"{field} {what}: the schema dpo needs chosen and rejected, and no mask"
    return "chosen and rejected", (
        "chosen and rejected are given without an action_mask: a pair belongs in an experiment of "
        f"the schema dpo, this one is {schema!r}"
    )


def _vectors(batch: RecordBatch, schema: str) -> Problem | None:
    """Check shapes and dtypes of token ids, masks and numbers per token."""
    required = (*SCHEMAS[schema], *(("action_mask",) if schema != "dpo" else ()))
    for field in (*required, *PER_TOKEN):
        if field in required and batch.kinds[field] >= _NONE:
            return field, f"{field} is a NoneType, it must be a tensor"
        dtypes, what = _VECTORS[field]
        for column in batch.columns.get(field, ()):
            if column.shapes.shape[1] != 1:
                shape = column.shapes[0].tolist()
                return field, f"{field} has the shape {shape}, it must be dense 1-D"
            if column.dtype not in dtypes:
                return field, f"{field} is torch.{column.dtype}, it must hold {what}"
            if dtypes is INTEGERS and 0 in batch.sizes[field]:
                return field, f"{field} has no elements, it needs at least one token"
    return None


def _responses(batch: RecordBatch, schema: str) -> Problem | None:
    """Check prompt lengths, and that there is one number per token of a response."""
    if schema == "dpo":
        return None
    prompts, sizes = batch.values["prompt_length"], batch.sizes["tokens"]
    responses = list(map(sub, sizes, prompts))
    size, prompt, response = sizes[0], prompts[0], responses[0]
    if min(prompts) < 1 or min(responses) < 0:
        what = f"is {prompt!r}, it must be an int from 1 to {size - 1}"
        return "prompt_length", f"prompt_length {what}"
    ends = zip(responses, batch.values["truncate_status"], strict=True)
    if 0 in responses and any(not length and end != "prompt_truncated" for length, end in ends):
        return "tokens", f"tokens holds {size} tokens of prompt and no response: give at least one"
    for field in filter(batch.sizes.__contains__, ("action_mask", *PER_TOKEN)):
        numbers = batch.sizes[field]
        pairs = zip(numbers, responses, strict=True)
        if numbers != responses and any(own not in (None, length) for own, length in pairs):
            why = ": one per token of it"
            if field == "action_mask":
                why = f" ({size} tokens - prompt_length {prompt})"
            return field, f"{field} has {numbers[0]} elements, the response has {response}{why}"
    return None


def _numbers(batch: RecordBatch, schema: str) -> Problem | None:
    """Check that token ids are not negative, masks 0 or 1, and numbers per token finite."""
    columns = batch.columns
    for column in chain.from_iterable(columns[field] for field in SCHEMAS[schema]):
        if DTYPES[column.dtype].kind == "i" and column.elements.min() < 0:
            return column.field, f"{column.field} holds negative numbers: these are no token ids"
    for column in columns["action_mask"] if schema != "dpo" else ():
        if column.dtype == "bool":
            continue
        numbers = _as_numpy(column)
        others = np.flatnonzero((numbers != 0) & (numbers != 1))
        if len(others):
            what = f"holds {numbers[others[0]].item()} at token {others[0]} of the response"
            return "action_mask", f"action_mask {what}, {ZERO_OR_ONE}"
    for column in chain.from_iterable(columns.get(field, ()) for field in PER_TOKEN):
        numbers = _as_numpy(column)
        with np.errstate(all="ignore"):
            # NaN and Inf survive in a sum of squares, which takes a tenth of the time of
            # isfinite(). Finite values may overflow it, so a failure is checked again exactly.
            passes = float(numbers.dot(numbers)) <= MAX_FLOAT32
            passes = passes or bool(np.isfinite(numbers.astype(np.float32)).all())
        if not passes:
            large = f"holds a number above {MAX_FLOAT32:.2g}, which is infinite in float32"
            is_large = np.isfinite(numbers).all()
            what = large if is_large else "holds NaN or Inf, it must be finite"
            return column.field, f"{column.field} {what}"
    return None


def _as_numpy(column: Column) -> npt.NDArray[Any]:
    """Return the elements as NumPy's numbers, which lack bfloat16: the upper half of a float32."""
    numbers = column.elements
    is_half = column.dtype == "bfloat16"
    return (numbers.astype(np.uint32) << 16).view(np.float32) if is_half else numbers


def _experts(batch: RecordBatch, _schema: str) -> Problem | None:
    field, sizes = "routed_experts", batch.sizes["tokens"]
    for column in batch.columns.get(field, ()):
        if column.dtype not in INTEGERS:
            return field, f"{field} must be a tensor of integers"
        for row, shape in zip(column.places, column.shapes.tolist(), strict=True):
            size = sizes[row]
            if not shape or shape[0] not in (size - 1, size):
                what = f"has the shape {shape}, its first dimension must be {size - 1} or"
                return field, f"{field} {what} {size}: one row per token"
    return None


def _size(batch: RecordBatch, _schema: str) -> Problem | None:
    columns = list(chain.from_iterable(batch.columns.values()))
    packed = [pieces for pieces, _ in batch.objects.values()]
    if sum(column.data.nbytes for column in columns) + sum(map(len, chain(*packed))) <= MAX_BYTES:
        return None
    sizes = np.zeros(len(batch.experiences), np.int64)
    for column in columns:
        rows = slice(None) if column.rows is None else column.rows
        sizes[rows] += column.sizes * column.elements.itemsize
    for pieces in packed:
        sizes += list(map(len, pieces))
    if sizes.max() > MAX_BYTES:
        return "size", f"size is {sizes.max()} bytes, the limit is {MAX_BYTES}"
    return None


ADDRESS: tuple[Rule, ...] = (_eids,)
"""Without an address nothing can be recorded."""
STORABLE: tuple[Rule, ...] = (_forms, _scalars, _infos)
"""Without these, a reader could not decode what is recorded."""
TRAINABLE: tuple[Rule, ...] = (_kinds, _vectors, _responses, _numbers, _experts, _size)
"""What a schema requires; each rule relies on those before it."""


def passes(batch: RecordBatch, schema: str) -> bool:
    """Return whether all rows are valid under ``schema``."""
    every = (*ADDRESS, *STORABLE, *TRAINABLE)
    return schema in SCHEMAS and not any(rule(batch, schema) for rule in every)


def validate(experience: Experience, schema: str = "experience") -> None:
    """Check that ``experience`` can be stored and trained under ``schema``.

    Raises:
        InvalidExperienceError: it cannot; the message names it, the field and the accepted values.
        InvalidArgumentError: unknown schema.
    """
    if schema not in SCHEMAS:
        raise errors.InvalidArgumentError(f"schema={schema!r}: accepted are {', '.join(SCHEMAS)}")
    require(experience, (*ADDRESS, *STORABLE, *TRAINABLE), schema)


def require(experience: Experience, rules: Sequence[Rule], schema: str = "") -> None:
    """Raise unless ``experience`` passes ``rules``.

    Raises:
        InvalidExperienceError: it does not.
    """
    batch = RecordBatch([experience])
    for field, sentence in filter(None, (rule(batch, schema) for rule in rules)):
        eid: Any = experience.eid
        error = errors.InvalidExperienceError(f"experience {getattr(eid, 'uid', eid)}: {sentence}")
        error.field = field
        raise error


def suspicious_values(batches: Sequence[RecordBatch]) -> str | None:
    """Return a warning about values that are valid but probably wrong, or None.

    Quarantined rows may hold NaN, which does not count as above 0.
    """
    for batch in batches:
        for column in batch.columns.get("logprobs", ()):
            if column.dtype not in FLOATS:
                continue
            numbers = _as_numpy(column)
            above = np.flatnonzero(numbers > ROUNDING)
            if not len(above):
                continue
            index = int(np.searchsorted(column.offsets, above[0], side="right")) - 1
            return (
                f"experience {batch.experiences[column.places[index]].eid.uid}: logprobs up to "
                f"{numbers[above].max():.3g}: natural logarithms of probabilities are at most 0"
            )
    return None


OnInvalid = Literal["raise", "quarantine"]
_NOWHERE = Place(0, b"")


@dataclasses.dataclass(eq=False, slots=True)
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


@dataclasses.dataclass(eq=False)
class WriteCall:
    """The experiences of one call on their way into the log.

    Attributes:
        experiences: those still to be written, at first all of the caller.
        experiment: key of their experiment.
        actor: the writing process.
        schema: name of the schema to check against.
        on_invalid: ``"raise"``, or ``"quarantine"`` to record invalid rows as rejected.
        store: where the blobs of segments are put.
        uids: one per experience of the caller, set once all are valid or replaced by what can be
            recorded of them; empty before that. Compared instead of EIDs, which keep 7 and "7"
            apart: the store does not.
        batches: what is to be written, with rows of the calls that share its event.
        digests: of the content of ``experiences``, without `metrics`, when they were last prepared.
        place: of the last event with its rows; its position is 0 as long as nothing is written.
        answered: set once the rows are durable, or ``error`` says why they are not.
    """

    experiences: list[Experience]
    experiment: int
    actor: str
    schema: str
    on_invalid: OnInvalid
    store: SegmentStore
    uids: Sequence[str] = ()
    batches: Sequence[RecordBatch] = ()
    place: Place = _NOWHERE
    answered: anyio.Event = dataclasses.field(default_factory=anyio.Event)
    error: Exception | None = None
    digests: Sequence[bytes] = ()
    _late: frozenset[str] = frozenset()  # batches that were sealed before
    # Why invalid rows are rejected, and the digests of rows that are stored already.
    _invalid: dict[EID, str] = dataclasses.field(default_factory=dict)
    _known: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def prepare(self, others: Sequence[WriteCall] = ()) -> list[PreparedWrite]:
        """Return the call and ``others`` of its writer, encoded, their blobs put into the store.

        The blobs are part of it only once the transaction that attaches them has committed. Until
        then the table `segment` has nothing of them, and a crash leaves nothing behind.

        They are one write if all rows are valid and distinct, otherwise a write each, except for
        calls that are invalid: those get their error. Computes: call it off the event loop.
        """
        calls, size = [self, *others], sizes.rows_per_event
        rows = [experience for call in calls for experience in call.experiences]
        batches = [RecordBatch(rows[at : at + size]) for at in range(0, len(rows), size)]
        # At an attempt before this one, which found rows that are stored, or a sealed batch.
        is_checked = bool(self.uids)
        if is_checked or all(passes(batch, self.schema) for batch in batches):
            uids = [uid for batch in batches for uid in batch.encode().meta.uids()]
            if is_checked or len(set(uids)) == len(rows):
                left = iter(uids)
                for call in calls:
                    call.uids = call.uids or list(islice(left, len(call.experiences)))
                return [self._as_events(batches, calls)]
        # Each once more by its columns: only a call that fails alone is searched row by row.
        if others:
            return [write for call in calls for write in call.prepare()]
        try:
            self._check()
            self.uids = [experience.eid.uid for experience in self.experiences]
            self.experiences = without_known([encode_experiences(self.experiences)], {}, _TWICE)
            return self.prepare()
        except Exception as error:  # noqa: BLE001 - raised to its own caller
            self.error = error
            return []

    def _as_events(
        self, batches: Sequence[RecordBatch], calls: Sequence[WriteCall]
    ) -> PreparedWrite:
        events, segments, names = [], list[SegmentRow](), set[str]()
        for batch in batches:
            names.update(map(str, set(batch.meta.batch)))
            refused: dict[int, str] = {}
            # Refused rows are recorded too, so that a group is not waited for in vain.
            if self._late or self._invalid:
                reasons = enumerate(map(self._refusal, batch.experiences))
                refused = {slot: reason for slot, reason in reasons if reason is not None}
            key = new_key()
            fact = ExperiencesRecorded(
                segment=key,
                families={name: sum(map(len, blob)) for name, blob in batch.families.items()},
                columns=batch.meta,
                refused=refused,
                scorable=is_scorable(batch.columns) or None,  # False is not written: it is nothing
                sampling=batch.sampling,
            )
            events.append(new_event(fact))
            # This only computes checksums: blobs that are never attached leave nothing behind.
            segments += self.store.put(key, batch.families)
        # Rows keep the order of the calls, so each call takes its digests from the front.
        digests = chain.from_iterable(batch.meta.digest for batch in batches)
        for call in calls:
            call.batches = batches
            call.digests = list(islice(digests, len(call.experiences)))
        return PreparedWrite(calls, batches, events, segments, frozenset(names) - self._late)

    def _refusal(self, experience: Experience) -> str | None:
        is_late = str(experience.eid.batch) in self._late
        return "late" if is_late else self._invalid.get(experience.eid)

    def _check(self) -> None:
        """Raise at the first invalid experience, or note and replace all that will be refused."""
        for row, experience in enumerate(self.experiences):
            try:
                validate(experience, self.schema)
            except errors.InvalidExperienceError as error:
                if self.on_invalid == "raise":
                    raise
                require(experience, ADDRESS)
                self._invalid[experience.eid] = invalid(error.field)
                with suppress(errors.InvalidExperienceError):
                    require(experience, STORABLE)
                    continue
                # The row must still be recorded under its address, though its content cannot be.
                empty = torch.zeros(0, dtype=torch.int32)
                self.experiences[row] = Experience(
                    eid=experience.eid,
                    tokens=empty,
                    action_mask=empty.bool(),
                    prompt_length=0,
                    info={"invalid": str(error)},
                )

    def learn(self, known: Mapping[str, bytes], sealed: frozenset[str], end: Place) -> None:
        """Apply why nothing was written, to a call that was prepared without others.

        Args:
            known: uid -> content digest of rows that are stored already.
            sealed: batches that were sealed before.
            end: of the log.

        Raises:
            ConflictingExperienceError: a row is stored with other content.
        """
        # Of what is left to write: a stored row of a sealed batch is a duplicate, not late.
        self._late |= sealed
        # A retry after a lost acknowledgement is normal: rows with the same digest are dropped
        # silently.
        self.experiences = without_known(self.batches, known, _STORED)
        self._known |= known
        # Nothing is written yet: if no row remains, the receipt has no position.
        self.place = end._replace(position=0)

    def receipt(self) -> WriteReceipt:
        """Return the caller's receipt."""
        written, number = self.experiences, len(self.uids)
        refuses = self._late or self._invalid
        rejected = sum(self._refusal(row) is not None for row in written) if refuses else 0
        digests = self.digests
        if len(written) < number:
            # If none was left to write, the digests are still those of the attempt before.
            uids = (experience.eid.uid for experience in written)
            known = self._known | dict(zip(uids, self.digests, strict=False))
            digests = list(map(known.__getitem__, self.uids))
        return WriteReceipt(
            self.place.position,
            len(written),
            number - len(written),
            rejected,
            tuple(self.uids),
            tuple(digests),
            self.place.head.hex(),
        )


_TWICE = (
    "comes twice in one write, with two contents; give a deliberate second attempt another suffix, "
    "such as 'a1'"
)
_STORED = (
    "is stored with other content; nothing of this call was written. Give a deliberate second "
    "attempt another suffix, such as 'a1', and each explorer an actor name of its own"
)


def without_known(
    batches: Sequence[RecordBatch], known: Mapping[str, bytes], conflict: str
) -> list[Experience]:
    """Return the experiences that are neither known nor repetitions of others.

    Args:
        batches: encoded.
        known: uid -> content digest.
        conflict: what is wrong with one that has another content.

    Raises:
        ConflictingExperienceError: one is known with other content.
    """
    digests, new = dict(known), []
    for batch in batches:
        for experience, digest in zip(batch.experiences, batch.meta.digest, strict=True):
            uid = experience.eid.uid
            if uid not in digests:
                digests[uid] = digest
                new.append(experience)
            elif digests[uid] != digest:
                error = errors.ConflictingExperienceError(f"experience {uid} {conflict}")
                error.uid = uid
                raise error
    return new
