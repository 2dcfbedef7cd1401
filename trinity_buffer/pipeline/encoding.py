"""Experiences as segments and metadata, and back; annotations in `annotation_encoding`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, get_args

import numpy as np
from torch import Tensor

from trinity_buffer.codec import (
    Column,
    Contents,
    ObjectPacker,
    Segment,
    decode_segment,
    encode_segment,
)
from trinity_buffer.errors import CodecError, InvalidArgumentError
from trinity_buffer.experience import FAMILIES, CustomField, Experience, ExperienceType
from trinity_buffer.identity import EID
from trinity_buffer.pipeline.annotation_encoding import (
    annotation_scalars,
    decode_annotations,
    encode_annotations,
)
from trinity_buffer.pipeline.tensor_columns import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    columns_of,
    raw_tensor,
    tensor_of,
    tensors_of,
)

__all__ = [
    "META",
    "EncodedWrite",
    "annotation_scalars",
    "content_digest_of",
    "decode_annotations",
    "decode_experiences",
    "encode_annotations",
    "encode_experiences",
]

_KEY, _COUNT, _TEXT = frozenset({int, str}), frozenset({int}), frozenset({str})
_NONE = frozenset({type(None)})

META: dict[str, frozenset[type]] = {
    "batch": _KEY,
    "task": _KEY,
    "run": _COUNT,
    "step": _COUNT,
    "suffix": _TEXT,
    "reward": frozenset({int, float, bool}) | _NONE,
    "policy_version": _COUNT | _NONE,
    "prompt_length": _COUNT,
    "length": _COUNT,
    "response_length": _COUNT,
    "trained_tokens": _COUNT,
    "kind": _TEXT,
    "finish_reason": _TEXT | _NONE,
    "digest": frozenset({bytes}),
}
"""What the event's own body says of every experience, so that projections open no segment."""

_OF_EID = tuple(map(attrgetter, tuple(META)[:5]))
_OF_EXPERIENCE = tuple(map(attrgetter, tuple(META)[5:8]))
_GETTERS = {
    family: {field: attrgetter(field) for field in fields} for family, fields in FAMILIES.items()
}
_OBJECTS: dict[str, type] = {
    "info": dict,
    "metrics": dict,
    "truncate_status": str,
    "custom_fields": list,
    **dict.fromkeys(("response_text", "prompt_text"), str),
    **dict.fromkeys(("messages", "tools", "chosen_messages", "rejected_messages"), list),
    "multi_modal_inputs": list,
}
"""Fields that are no tensors -> what they hold on disk; ``multi_modal_inputs``: the names."""

_MODAL = "multi_modal_inputs."
_KINDS = frozenset(get_args(ExperienceType))


@dataclass(frozen=True, slots=True)
class EncodedWrite:
    """What one write records.

    Attributes:
        families: family -> blob of its segment; absent where it would be empty.
        meta: the columns of `META`, one item per experience. ``length`` counts the tokens,
            ``response_length`` the action mask, ``trained_tokens`` what it selects. Of a ``dpo``
            experience ``length`` is the prompt, ``response_length`` the longer of the two
            responses and ``trained_tokens`` their sum.
        columns: field -> the columns that went into the segments, for whoever checks the numbers.
    """

    families: dict[str, bytes]
    meta: dict[str, list[Any]]
    columns: dict[str, list[Column]]


def encode_experiences(experiences: Sequence[Experience]) -> EncodedWrite:
    """Return ``experiences`` as segments, one per family, and the metadata for the event's body.

    Pure computation: call it outside transactions, and off the event loop.

    Raises:
        InvalidArgumentError: a value that cannot be stored; the message names the field.
    """
    packer = ObjectPacker(raw_tensor)
    heads = [(e.experience_type, e.prompt_length, e.reward) for e in experiences]
    contents, families, every = Contents(heads, raw_tensor), {}, dict[str, list[Column]]()
    for family, getters in _GETTERS.items():
        columns: list[Column] = []
        packed: dict[str, list[bytes]] = {}
        for field, getter in getters.items():
            values = list(map(getter, experiences))
            if _NONE.issuperset(map(type, values)):
                continue
            if field == "multi_modal_inputs":
                columns += _modal_columns(values)
            if field in _OBJECTS:
                packed |= _packed(contents, packer, field, values)
            else:
                every[field] = columns_of(field, values)
                columns += every[field]
        for column in columns:
            contents.add_column(column)
        if columns or packed:
            families[family] = encode_segment(columns, {}, len(experiences), packed=packed)
    return EncodedWrite(families, _meta(experiences, every, contents.digests()), every)


def content_digest_of(experience: Experience) -> bytes:
    """Return the 16 bytes that are equal for equal content: all but address and metrics."""
    digest: bytes = encode_experiences([experience]).meta["digest"][0]
    return digest


def _packed(
    contents: Contents, packer: ObjectPacker, field: str, values: Sequence[Any]
) -> dict[str, list[bytes]]:
    """Return the objects of one field as bytes, under its name; nothing where there are none."""
    stored = _stored(field, values)
    if _NONE.issuperset(map(type, stored)):
        return {}
    pieces = packer.pack_all(stored, field)
    contents.add_objects(field, stored, pieces)
    return {field: pieces}


def _stored(field: str, values: Sequence[Any]) -> Sequence[Any]:
    """Return what stands on disk for ``values``; None for what a reader fills in by itself."""
    if field in ("info", "metrics"):
        return [value or None for value in values]
    if field == "custom_fields":
        return [list(map(_as_texts, value)) or None for value in values]
    if field == "multi_modal_inputs":
        return [None if value is None else list(value) for value in values]
    return values


def _as_texts(custom: CustomField) -> list[str]:
    return [custom.source_field, custom.destination_field, DTYPE_NAMES[custom.data_type]]


def _modal_columns(values: Sequence[dict[str, Tensor] | None]) -> list[Column]:
    names = sorted({name for value in values if value for name in value}, key=str)
    if not all(type(name) is str for name in names):
        raise InvalidArgumentError(f"multi_modal_inputs has the keys {names}: they must be texts")
    return [
        column
        for name in names
        for column in columns_of(
            _MODAL + name, [None if value is None else value.get(name) for value in values]
        )
    ]


def _meta(
    experiences: Sequence[Experience], columns: Mapping[str, Sequence[Column]], digests: list[bytes]
) -> dict[str, list[Any]]:
    eids = [experience.eid for experience in experiences]
    found: Iterable[list[Any]] = (
        *(list(map(getter, eids)) for getter in _OF_EID),
        *(list(map(getter, experiences)) for getter in _OF_EXPERIENCE),
        _sizes(experiences, columns, "tokens", "length"),
        _sizes(experiences, columns, "action_mask", "response_length"),
        _trained_tokens(experiences, columns.get("action_mask", ())),
        [experience.experience_type for experience in experiences],
        [experience.finish_reason for experience in experiences],
        digests,
    )
    return dict(zip(META, found, strict=True))


def _sizes(
    experiences: Sequence[Experience],
    columns: Mapping[str, Sequence[Column]],
    field: str,
    attribute: str,
) -> list[int]:
    """Return the ``attribute`` of each experience, from the sizes of ``field`` if all have it."""
    found = columns.get(field, ())
    pairs = any(experience.experience_type == "dpo" for experience in experiences)
    if len(found) == 1 and found[0].rows is None and not pairs:
        sizes: list[int] = found[0].sizes.tolist()
        return sizes
    return list(map(attrgetter(attribute), experiences))


def _trained_tokens(experiences: Sequence[Experience], masks: Sequence[Column]) -> list[int]:
    counts = [0] * len(experiences)
    for column in masks:
        elements, ends = column.elements, column.offsets.tolist()
        rows = range(len(counts)) if column.rows is None else column.rows.tolist()
        if np.count_nonzero(elements) == len(elements):  # single turns
            found = [stop - start for start, stop in pairwise(ends)]
        else:
            found = [int(np.count_nonzero(elements[a:b])) for a, b in pairwise(ends)]
        for row, count in zip(rows, found, strict=True):
            counts[row] = count
    for row, experience in enumerate(experiences):
        if experience.experience_type == "dpo":
            pair = (experience.chosen, experience.rejected)
            counts[row] = sum(response.numel() for response in pair if response is not None)
    return counts


def decode_experiences(
    families: Mapping[str, bytes | bytearray],
    meta: Mapping[str, Sequence[Any]],
    slots: Sequence[int] | None = None,
    *,
    loaded: Sequence[str] | None = None,
) -> list[Experience]:
    """Return the experiences of one write, with the fields of the families that are given.

    Tensors are views: what is given as a bytearray is not copied, and may be written through them
    without touching the store; bytes are copied first.

    Args:
        families: family -> blob; any of them may be left out.
        meta: from the event's body.
        slots: which rows, in which order; all by default.
        loaded: the families that were asked for, of which some may have been empty and hence not
            stored: their fields are None. By default those of ``families``.

    Raises:
        CodecError: a blob that is damaged, or that does not belong to ``meta``.
    """
    rows = _check_meta(meta)
    wanted = range(rows) if slots is None else slots
    if any(not 0 <= slot < rows for slot in wanted):
        raise CodecError(f"slots {list(wanted)} of a write with {rows} experiences")
    states = _states(meta, wanted, families if loaded is None else (*families, *loaded))
    for family, blob in families.items():
        segment = decode_segment(blob if isinstance(blob, bytearray) else bytearray(blob))
        if segment.rows != rows:
            raise CodecError(f"segment {family} has {segment.rows} rows, its event has {rows}")
        _fill(states, family, segment, None if slots is None else slots)
    return [Experience.from_state(state) for state in states]


def _check_meta(meta: Any) -> int:
    """Check that every column of `META` is there and holds what it should; return its length."""
    if not isinstance(meta, Mapping) or not isinstance(meta.get("batch"), list):
        raise CodecError("an event has no metadata of experiences: its body is damaged")
    rows = len(meta["batch"])
    for name, types in META.items():
        column = meta.get(name)
        if not isinstance(column, list) or len(column) != rows:
            raise CodecError(f"the metadata of {rows} experiences has not as many of {name}")
        if not types.issuperset(map(type, column)):
            raise CodecError(f"the metadata of experiences has a {name} that is none")
    if not _KINDS.issuperset(meta["kind"]):
        raise CodecError("the metadata of experiences names a kind of experience that is unknown")
    return rows


def _states(
    meta: Mapping[str, Sequence[Any]], wanted: Sequence[int], loaded: Iterable[str]
) -> list[dict[str, Any]]:
    """Return the attributes that are known without any segment, and None for all loaded fields."""
    unknown = [family for family in loaded if family not in FAMILIES]
    if unknown:
        raise CodecError(f"families {unknown} do not exist; there are {', '.join(FAMILIES)}")
    empty = {field: None for family in dict.fromkeys(loaded) for field in FAMILIES[family]}
    has_light = "info" in empty
    every = list(zip(*(meta[name] for name in META), strict=True))
    states = []
    for slot in wanted:
        *eid, reward, version, prompt, length, response, _trained, kind, reason, _digest = every[
            slot
        ]
        state: dict[str, Any] = {
            "eid": EID(*eid),
            "prompt_length": prompt,
            "reward": reward,
            "experience_type": kind,
            "address": None,
            "_length": length,
            "_response_length": response,
            "_policy_version": version,
            "_finish_reason": reason,
            **empty,
        }
        if has_light:
            state["info"], state["metrics"], state["custom_fields"] = {}, {}, []
        states.append(state)
    return states


def _fill(
    states: list[dict[str, Any]], family: str, segment: Segment, slots: Sequence[int] | None
) -> None:
    fields = FAMILIES[family]
    modal: list[dict[str, Tensor]] = [{} for _ in states] if family == "heavy" else []
    for name, columns in segment.columns.items():
        field, targets = name, states
        if family == "heavy" and name.startswith(_MODAL):
            field, targets = name.removeprefix(_MODAL), modal
        elif name not in fields or name in _OBJECTS:
            raise CodecError(f"segment {family} has the column {name!r}, which is none of its own")
        for column in columns:
            _fill_column(targets, field, column, slots)
    wanted = range(segment.rows) if slots is None else slots
    for name, values in segment.objects.items():
        if name not in fields or name not in _OBJECTS:
            raise CodecError(
                f"segment {family} has the objects {name!r}, which are none of its own"
            )
        found = values.values(wanted, tensor_of)
        _fill_objects(states, name, found, modal)


def _fill_column(
    states: Sequence[dict[str, Any]], field: str, column: Column, slots: Sequence[int] | None
) -> None:
    if slots is None:
        rows = range(len(states)) if column.rows is None else column.rows.tolist()
        for row, tensor in zip(rows, tensors_of(column), strict=True):
            states[row][field] = tensor
        return
    indices: Sequence[int] = slots
    places: Sequence[int] = range(len(slots))
    if column.rows is not None:
        index_of = {row: index for index, row in enumerate(column.rows.tolist())}
        places = [place for place, slot in enumerate(slots) if slot in index_of]
        indices = [index_of[slots[place]] for place in places]
    for place, tensor in zip(places, tensors_of(column, indices), strict=True):
        states[place][field] = tensor


def _fill_objects(
    states: Sequence[dict[str, Any]],
    field: str,
    values: Sequence[Any],
    modal: Sequence[Mapping[str, Tensor]],
) -> None:
    form: type[Any] = _OBJECTS[field]
    for row, (state, value) in enumerate(zip(states, values, strict=True)):
        if value is None:
            continue
        if not isinstance(value, form):
            raise CodecError(
                f"{field} of {state['eid']} is a {type(value).__name__}, not a {form.__name__}"
            )
        if field == "custom_fields":
            state[field] = [_custom_field(item) for item in value]
        elif field == "multi_modal_inputs":
            state[field] = _modal_inputs(value, modal[row])
        else:
            state[field] = value


def _custom_field(item: Any) -> CustomField:
    texts = isinstance(item, list) and all(isinstance(text, str) for text in item)
    if not texts or len(item) != 3 or item[2] not in TORCH_DTYPES:
        raise CodecError("custom_fields holds what is no custom field: its bytes are damaged")
    return CustomField(item[0], item[1], TORCH_DTYPES[item[2]])


def _modal_inputs(names: list[Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not all(isinstance(name, str) and name in tensors for name in names):
        raise CodecError(f"multi_modal_inputs names what is not stored; stored are {list(tensors)}")
    return {name: tensors[name] for name in names}
