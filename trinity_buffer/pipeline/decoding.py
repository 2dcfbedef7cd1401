"""Experiences of segments and metadata; what `encoding` made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from torch import Tensor

from trinity_buffer.blob import Buffer, writable
from trinity_buffer.codec import Column, Segment, decode_segment
from trinity_buffer.errors import CodecError
from trinity_buffer.experience import FAMILIES, CustomField, Experience, ExperienceType
from trinity_buffer.identity import EID
from trinity_buffer.pipeline.encoding import META, MODAL, OBJECTS
from trinity_buffer.pipeline.tensor_columns import TORCH_DTYPES, tensor_of, tensors_of

_KINDS = frozenset(get_args(ExperienceType))


def decode_experiences(
    families: Mapping[str, Buffer],
    meta: Mapping[str, Sequence[Any]],
    slots: Sequence[int] | None = None,
    *,
    loaded: Sequence[str] | None = None,
) -> list[Experience]:
    """Return the experiences of one write, with the fields of the families that are given.

    Tensors are views: what may be written is not copied, and is written through them without
    touching the store; bytes are copied first.

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
        segment = decode_segment(writable(blob))
        if segment.rows != rows:
            raise CodecError(f"segment {family} has {segment.rows} rows, its event has {rows}")
        _fill_fields(states, family, segment, None if slots is None else slots)
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


def _fill_fields(
    states: list[dict[str, Any]], family: str, segment: Segment, slots: Sequence[int] | None
) -> None:
    fields = FAMILIES[family]
    modal: list[dict[str, Tensor]] = [{} for _ in states] if family == "heavy" else []
    for name, columns in segment.columns.items():
        field, targets = name, states
        if family == "heavy" and name.startswith(MODAL):
            field, targets = name.removeprefix(MODAL), modal
        elif name not in fields or name in OBJECTS:
            raise CodecError(f"segment {family} has the column {name!r}, which is none of its own")
        for column in columns:
            _fill_column(targets, field, column, slots)
    wanted = range(segment.rows) if slots is None else slots
    for name, values in segment.objects.items():
        if name not in fields or name not in OBJECTS:
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
    form: type[Any] = OBJECTS[field]
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
