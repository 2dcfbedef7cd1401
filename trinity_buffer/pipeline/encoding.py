"""Experiences as segments and metadata; `decoding` is the way back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from torch import Tensor

from trinity_buffer.blob import Blob
from trinity_buffer.codec import (
    Column,
    Contents,
    ObjectPacker,
    segment_blob,
)
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import FAMILIES, CustomField, Experience
from trinity_buffer.pipeline.fields import Fields
from trinity_buffer.pipeline.reused_memory import ReusedMemory
from trinity_buffer.pipeline.tensor_columns import (
    DTYPE_NAMES,
    Take,
    columns_of,
    columns_of_given,
    raw_tensor,
)
from trinity_buffer.sampling import sampled

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

OBJECTS: dict[str, type] = {
    "info": dict,
    "metrics": dict,
    "truncate_status": str,
    "custom_fields": list,
    **dict.fromkeys(("response_text", "prompt_text"), str),
    **dict.fromkeys(("messages", "tools", "chosen_messages", "rejected_messages"), list),
    "multi_modal_inputs": list,
}
"""Fields that are no tensors -> what they hold on disk; ``multi_modal_inputs``: the names."""

TENSORS = [name for names in FAMILIES.values() for name in names if name not in OBJECTS]
MODAL = "multi_modal_inputs."
"""What the names of their columns begin with."""

_memory = ReusedMemory()
os.register_at_fork(after_in_child=_memory.forget)


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
        sampling: of `ExperiencesRecorded`.
    """

    families: dict[str, Blob]
    meta: dict[str, list[Any]]
    columns: dict[str, list[Column]]
    sampling: dict[int, list[Any]] | None = None


def encode_experiences(
    experiences: Sequence[Experience], fields: Fields | None = None
) -> EncodedWrite:
    """Return ``experiences`` as segments, one per family, and the metadata for the event's body.

    Pure computation: call it outside transactions, and off the event loop.

    Args:
        experiences: in the order of their slots.
        fields: theirs, where they were looked up already.

    Raises:
        InvalidArgumentError: a value that cannot be stored; the message names the field.
    """
    fields = Fields(experiences) if fields is None else fields
    packer = ObjectPacker(raw_tensor)
    contents = Contents(
        fields["experience_type"], fields["prompt_length"], fields["reward"], raw_tensor
    )
    block = _memory.block(_bytes_to_join(fields))
    families, every = dict[str, Blob](), dict[str, list[Column]]()
    for family, names in FAMILIES.items():
        columns: list[Column] = []
        packed: dict[str, list[bytes]] = {}
        for field in names:
            if fields.kinds(field) <= _NONE:
                continue
            if field == "multi_modal_inputs":
                columns += _modal_columns(fields[field], block.take)
            if field in OBJECTS:
                packed |= _packed(contents, packer, field, fields[field])
            else:
                every[field] = columns_of_given(field, fields.tensors(field), block.take)
                columns += every[field]
        for column in columns:
            contents.add_column(column)
        if columns or packed:
            families[family] = segment_blob(columns, len(experiences), packed)
    meta = _meta(fields, every, contents.digests())
    return EncodedWrite(families, meta, every, _sampling(fields, meta))


def _bytes_to_join(fields: Fields) -> int:
    """Return at most how many bytes the columns of tensors need."""
    given = (name for name in TENSORS if not fields.kinds(name) <= _NONE)
    return sum(fields.tensors(name).bytes_to_join for name in given)


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
    pieces, in_order = packer.pack_twice(contents.packer, stored, field)
    contents.add_objects(field, in_order)
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


def _modal_columns(values: Sequence[dict[str, Tensor] | None], take: Take) -> list[Column]:
    names = sorted({name for value in values if value for name in value}, key=str)
    if not all(type(name) is str for name in names):
        raise InvalidArgumentError(f"multi_modal_inputs has the keys {names}: they must be texts")
    return [
        column
        for name in names
        for column in columns_of(
            MODAL + name, [None if value is None else value.get(name) for value in values], take
        )
    ]


def _meta(
    fields: Fields, columns: Mapping[str, Sequence[Column]], digests: list[bytes]
) -> dict[str, list[Any]]:
    experiences = fields.experiences
    found: Iterable[Iterable[Any]] = (
        *fields.addresses,
        fields["reward"],
        _plain_or(fields.versions, _COUNT | _NONE, "policy_version", experiences),
        fields["prompt_length"],
        _sizes(fields, columns, "tokens", "length"),
        _sizes(fields, columns, "action_mask", "response_length"),
        _trained_tokens(fields, columns.get("action_mask", ())),
        fields["experience_type"],
        _plain_or(fields.reasons, _TEXT | _NONE, "finish_reason", experiences),
        digests,
    )
    return dict(zip(META, map(list, found), strict=True))


def _sampling(fields: Fields, meta: Mapping[str, list[Any]]) -> dict[int, list[Any]] | None:
    """Return how those rows were sampled of which a trainer has to know it; None: of none."""
    if not any(fields.segments):
        return None
    sizes = zip(fields["info"], meta["prompt_length"], meta["length"], strict=True)
    every = ((slot, sampled(*row)) for slot, row in enumerate(sizes))
    return {slot: [*map(list, said)] for slot, said in every if said} or None


def _plain_or(
    found: Sequence[Any], kinds: frozenset[type], attribute: str, experiences: Sequence[Experience]
) -> Iterable[Any]:
    """Return what was ``found`` if all of it is of these kinds, else the attribute of each."""
    return found if kinds.issuperset(map(type, found)) else map(attrgetter(attribute), experiences)


def _sizes(
    fields: Fields, columns: Mapping[str, Sequence[Column]], field: str, attribute: str
) -> Iterable[int]:
    """Return the ``attribute`` of each experience, from the sizes of ``field`` if all have it."""
    found = columns.get(field, ())
    if len(found) == 1 and found[0].rows is None and "dpo" not in fields["experience_type"]:
        return fields.tensors(field).sizes
    return map(attrgetter(attribute), fields.experiences)


def _trained_tokens(fields: Fields, masks: Sequence[Column]) -> list[int]:
    counts = [0] * len(fields)
    for column in masks:
        elements, ends = column.elements, column.offsets.tolist()
        rows = range(len(counts)) if column.rows is None else column.rows.tolist()
        if np.count_nonzero(elements) == len(elements):  # single turns
            found = [stop - start for start, stop in pairwise(ends)]
        else:
            found = [int(np.count_nonzero(elements[a:b])) for a, b in pairwise(ends)]
        for row, count in zip(rows, found, strict=True):
            counts[row] = count
    if "dpo" in fields["experience_type"]:
        for row, experience in enumerate(fields.experiences):
            if experience.experience_type == "dpo":
                pair = (experience.chosen, experience.rejected)
                counts[row] = sum(response.numel() for response in pair if response is not None)
    return counts
