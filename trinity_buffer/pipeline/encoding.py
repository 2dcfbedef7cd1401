"""Experiences as columns: one `RecordBatch` is what every stage of a write reads.

Encodes tensors as columns of bytes and experiences as segments and metadata, and decodes them.

Computed advantages are a segment too, in which a per-token ``scalar * mask`` is stored as one
scalar. Most have that form: GRPO's 65 thousand numbers of a write become 64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import compress, pairwise
from operator import attrgetter, itemgetter
from typing import Any, Self, TypeAlias, get_args

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from trinity_buffer.codec.arrays import DTYPES, MAX_DIMENSIONS
from trinity_buffer.codec.blob import Buffer, writable
from trinity_buffer.codec.objects import ObjectPacker, RawTensor
from trinity_buffer.codec.segments import (
    ANNOTATED,
    Bytes,
    Column,
    Segment,
    content_digests,
    decode_segment,
    encode_segment,
    segment_blob,
)
from trinity_buffer.errors import CodecError, InvalidArgumentError
from trinity_buffer.events import ExperienceColumns
from trinity_buffer.experience import FAMILIES, CustomField, Experience, ExperienceType
from trinity_buffer.identity import EID
from trinity_buffer.sampling import SEGMENTS, sampled

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
"""Name -> dtype, of the dtypes that the installed torch has."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# ``torch.cat`` is fast for these dtypes; for complex32, it warns.
_JOINED = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16}) | {
    *(torch.float16, torch.float32, torch.float64)
}

_Kind: TypeAlias = "tuple[torch.dtype, int, torch.device, torch.layout, bool]"
_kind_of: Callable[[Tensor], _Kind] = attrgetter("dtype", "ndim", "device", "layout", "is_nested")


def columns_of(field: str, tensors: Sequence[Tensor | None]) -> list[Column]:
    """Return the columns of one field; an empty list without tensors.

    Rows of one dtype and number of dimensions share a column, made with a single ``torch.cat``. It
    is a copy: the caller may use the memory of its tensors again.

    Args:
        field: name of the field.
        tensors: the tensors of its rows, by row.

    Raises:
        InvalidArgumentError: a tensor without dense memory (sparse, meta), or of a dtype that is
            not an element type; the message begins with ``field``.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    kinds = list(map(_kind_of, present))
    columns = []
    for kind, number in Counter(kinds).items():
        dtype, ndim, device, layout, is_nested = kind
        if is_nested:  # first, as it raises when it is asked for its shape
            raise InvalidArgumentError(
                f"{field} is a nested tensor: make an Experience of each row"
            )
        if dtype not in DTYPE_NAMES or layout != torch.strided or device.type == "meta":
            raise InvalidArgumentError(
                f"{field} is {dtype}, {layout} on {device}: make it a dense tensor "
                f"of one of {', '.join(TORCH_DTYPES)}"
            )
        if ndim > MAX_DIMENSIONS:
            raise InvalidArgumentError(
                f"{field} has {ndim} dimensions, the most are {MAX_DIMENSIONS}"
            )
        own, rows = present, None
        if number < len(tensors):
            places = (row for row, tensor in enumerate(tensors) if tensor is not None)
            is_own = list(map(kind.__eq__, kinds))
            own, rows = list(compress(present, is_own)), np.array([*compress(places, is_own)])
        sizes = map(Tensor.numel if ndim == 1 else Tensor.size, own)
        shapes = np.array(list(sizes), np.int64).reshape(len(own), ndim)
        flat = own if ndim == 1 else [tensor.reshape(-1) for tensor in own]
        columns.append(Column(field, DTYPE_NAMES[dtype], shapes, bytes_of(flat), rows))
    return columns


def bytes_of(tensors: Sequence[Tensor]) -> Bytes:
    """Return a copy of the bytes of 1-D ``tensors`` of one dtype, one after the other."""
    dtype = tensors[0].dtype
    if dtype not in _JOINED:
        tensors = [_raw(tensor) for tensor in tensors]
    # For one tensor, torch.cat would wake its threads.
    flat = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0].detach().clone()
    if not flat.numel():  # it may have a stride of 0, which torch cannot view
        return np.empty(0, np.uint8)
    if dtype == torch.bfloat16:  # which NumPy does not have
        flat = flat.detach().view(torch.int16)
    joined: Bytes = flat.numpy(force=True).view(np.uint8)
    # Booleans viewed from other bytes may hold any value, and torch treats all but 0 as true.
    if dtype == torch.bool and joined.max(initial=0) > 1:
        return np.minimum(joined, np.uint8(1))
    return joined


def _raw(tensor: Tensor) -> Tensor:
    # The memory of a lazily conjugated or negated view holds the original values.
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    # A tensor of up to one element is contiguous whatever its stride, which torch cannot view.
    return plain.as_strided(plain.shape, (1,)).view(torch.uint8)


def flat_tensor(column: Column) -> Tensor:
    """Return all elements of ``column`` as a 1-D tensor: a view of its data, which is writable.

    Raises:
        CodecError: the installed torch has no such dtype.
    """
    dtype = TORCH_DTYPES.get(column.dtype)
    if dtype is None:
        raise CodecError(
            f"column {column.field} holds {column.dtype}, which torch {torch.__version__} does not "
            "have: upgrade torch"
        )
    # Some empty NumPy arrays have strides of 0, which torch cannot view.
    bare = torch.from_numpy(column.data) if len(column.data) else torch.empty(0, dtype=torch.uint8)
    return bare.view(dtype)


def tensors_of(column: Column, wanted: Sequence[int] | None = None) -> list[Tensor]:
    """Return the tensors of a column, views of its data; ``wanted`` are indices into its rows."""
    flat = flat_tensor(column)
    if wanted is None:
        pieces = list(flat.split_with_sizes(column.sizes.tolist())) if len(column.shapes) else []
    else:
        ends = column.offsets.tolist()
        pieces = [flat[ends[index] : ends[index + 1]] for index in wanted]
    if column.shapes.shape[1] == 1:
        return pieces
    shapes = column.shapes.tolist()
    order = range(len(shapes)) if wanted is None else wanted
    return [piece.view(shapes[index]) for piece, index in zip(pieces, order, strict=True)]


def raw_tensor(value: object) -> RawTensor | None:
    """Return a tensor as bytes for the codec; None for anything else."""
    if not isinstance(value, Tensor):
        return None
    if value.is_nested:
        raise InvalidArgumentError("a tensor is a nested one: make a dense tensor of it")
    (column,) = columns_of("a tensor", [value])
    return RawTensor(column.dtype, tuple(value.shape), column.data.tobytes())


def tensor_of(raw: RawTensor) -> Tensor:
    """Return the tensor of its bytes, with memory of its own."""
    shapes = np.array([raw.shape], np.int64).reshape(1, len(raw.shape))
    data = np.frombuffer(bytearray(raw.data), np.uint8)
    return tensors_of(Column("a tensor", raw.dtype, shapes, data))[0]


_NAMES = (
    *("eid", "experience_type", "prompt_length", "reward"),
    *(field for fields in FAMILIES.values() for field in fields),
)
_every, _every_item = attrgetter(*_NAMES), itemgetter(*_NAMES)
_address = attrgetter("batch", "task", "run", "step", "suffix")

_NONE = frozenset({type(None)})

OBJECTS: dict[str, type] = {
    "info": dict,
    "metrics": dict,
    "truncate_status": str,
    "custom_fields": list,
    **dict.fromkeys(("response_text", "prompt_text"), str),
    **dict.fromkeys(("messages", "tools", "chosen_messages", "rejected_messages"), list),
    "multi_modal_inputs": list,
}
"""Fields other than tensors -> their type on disk; ``multi_modal_inputs``: the names."""

TENSORS = [name for names in FAMILIES.values() for name in names if name not in OBJECTS]
MODAL = "multi_modal_inputs."
"""Prefix of the names of their columns."""


class RecordBatch:
    """Experiences that share an event: what every stage of a write reads, as columns.

    Columns are made when a stage first asks for them, and only once. What `encode` adds is ready to
    be committed.

    Attributes:
        experiences: in the order of their slots.
        values: field -> its value in each row.
        kinds: field -> the types of these values.
        addresses: batches, tasks, runs, steps and suffixes; nothing where an eid is no EID.
        families: family -> blob of its segment, in pieces; absent where it would be empty.
        meta: the event's columns. ``length`` counts the tokens, ``response_length`` the action
            mask, ``trained_tokens`` what it selects. Of a ``dpo`` experience ``length`` is the
            prompt, ``response_length`` the longer of the two responses and ``trained_tokens``
            their sum.
        sampling: that of `ExperiencesRecorded`.

    Raises:
        AttributeError: a field of an experience was not loaded.
    """

    def __init__(self, experiences: Sequence[Experience]) -> None:
        self.experiences = experiences
        # One call per experience reads all attributes: it is the hot loop of a write.
        try:
            rows = list(map(_every_item, map(vars, experiences)))
        except KeyError:  # a field that was not loaded, of which the attribute says why
            rows = list(map(_every, experiences))
        columns = zip(*rows, strict=True) if rows else [()] * len(_NAMES)
        self.values: dict[str, tuple[Any, ...]] = dict(zip(_NAMES, columns, strict=True))
        # Most rows have the same types, so few of these tuples are distinct.
        forms = {tuple(map(type, row)) for row in rows}
        kinds: Iterable[Iterable[type]] = zip(*forms, strict=True) if rows else [()] * len(_NAMES)
        self.kinds = dict(zip(_NAMES, map(frozenset, kinds), strict=True))
        if any(issubclass(kind, np.generic) for kind in self.kinds["reward"]):
            # Assigned after the experience was made; an event's body does not hold NumPy's numbers.
            rewards = (r.item() if isinstance(r, np.generic) else r for r in self.values["reward"])
            self.values["reward"] = tuple(rewards)
        self.addresses: tuple[tuple[Any, ...], ...] = ((),) * 5
        if experiences and all(issubclass(kind, EID) for kind in self.kinds["eid"]):
            self.addresses = tuple(zip(*map(_address, self.values["eid"]), strict=True))
        self.families: dict[str, list[Buffer]] = {}
        self.meta: ExperienceColumns
        self.sampling: dict[int, list[Any]] | None = None

    @cached_property
    def sizes(self) -> dict[str, list[Any]]:
        """Field -> the number of elements of each row's tensor, None for a row without one."""
        sizes: dict[str, list[Any]] = {}
        for field, columns in self.columns.items():
            sizes[field] = [None] * len(self.experiences)
            for column in columns:
                if column.rows is None:
                    sizes[field] = column.sizes.tolist()
                    continue
                for row, size in zip(column.places, column.sizes.tolist(), strict=True):
                    sizes[field][row] = size
        return sizes

    @cached_property
    def infos(self) -> tuple[list[Any], list[Any], list[Any]]:
        """What ``info`` says of each row, unchecked: policy version, finish reason, segments.

        The reason is ``truncate_status`` where ``info`` has none; segments are those of
        `trinity_buffer.sampling`.
        """
        infos, ends = self.values["info"], self.values["truncate_status"]
        return (
            [info.get("model_version") for info in infos],
            [info.get("finish_reason") or end for info, end in zip(infos, ends, strict=True)],
            [info.get(SEGMENTS) for info in infos],
        )

    @cached_property
    def columns(self) -> dict[str, list[Column]]:
        """Field -> its columns in the segments; ``multi_modal_inputs``: one or more of each name.

        Raises:
            InvalidArgumentError: a tensor that cannot be stored; the message begins with the field.
        """
        columns = {
            name: columns_of(name, self.values[name])
            for name in TENSORS
            if not self.kinds[name] <= _NONE
        }
        if not self.kinds["multi_modal_inputs"] <= _NONE:
            columns["multi_modal_inputs"] = _modal_columns(self.values["multi_modal_inputs"])
        return columns

    @cached_property
    def objects(self) -> dict[str, tuple[list[bytes], list[bytes]]]:
        """Field of `OBJECTS` -> each row in bytes: as it is, and with sorted keys; if any has one.

        Stored is what was given, but digests are of sorted keys: equal content must have equal
        digests.

        Raises:
            InvalidArgumentError: a value that cannot be stored; the message begins with the field.
        """
        packer = ObjectPacker(raw_tensor)
        objects = {}
        for field in OBJECTS:
            if self.kinds[field] <= _NONE:
                continue
            stored: Sequence[Any] = self.values[field]
            # Empty containers are stored as None: readers fill them in without an object per row.
            if field in ("info", "metrics"):
                stored = [value or None for value in stored]
            elif field == "custom_fields":
                stored = [list(map(_as_texts, value)) or None for value in stored]
            elif field == "multi_modal_inputs":
                stored = [None if value is None else list(value) for value in stored]
            if not _NONE.issuperset(map(type, stored)):
                objects[field] = packer.pack_twice(stored, field)
        return objects

    def encode(self) -> Self:
        """Make the segments, one per family, and the metadata for the event's body.

        Pure computation: call it outside transactions, and off the event loop.

        Raises:
            InvalidArgumentError: a value that cannot be stored; the message names the field.
        """
        values = self.values
        content: list[Column | tuple[str, list[bytes]]] = []
        for family, names in FAMILIES.items():
            packed: dict[str, list[bytes]] = {}
            for field in filter(self.objects.__contains__, names):
                packed[field], in_order = self.objects[field]
                content.append((field, in_order))
            columns = [column for field in names for column in self.columns.get(field, ())]
            content += columns
            if columns or packed:
                self.families[family] = segment_blob(columns, len(self.experiences), packed)
        versions, reasons, segments = self.infos
        kinds, prompts, rewards = (values[name] for name in _NAMES[1:4])
        lengths, responses = self.sizes.get("tokens", []), self.sizes.get("action_mask", [None])
        if None in responses or "dpo" in kinds:
            responses = [experience.response_length for experience in self.experiences]
        columns_of_event: Iterable[Iterable[Any]] = (
            *(*self.addresses, rewards),
            [None if version is None else int(version) for version in versions],
            *(prompts, lengths, responses, self._trained_tokens(), kinds),
            [None if reason is None else str.__str__(reason) for reason in reasons],
            content_digests(kinds, prompts, rewards, content),
        )
        names = ExperienceColumns.__struct_fields__
        self.meta = ExperienceColumns(**dict(zip(names, map(list, columns_of_event), strict=True)))
        # Most rows have no sampling segments, and their events no such column.
        if any(segments):
            spans = enumerate(map(sampled, values["info"], prompts, lengths))
            self.sampling = {slot: [*map(list, of)] for slot, of in spans if of} or None
        return self

    def _trained_tokens(self) -> list[int]:
        sizes = self.sizes.get("action_mask", [None] * len(self.experiences))
        counts = [size or 0 for size in sizes]
        for column in self.columns.get("action_mask", ()):
            elements = column.elements
            if np.count_nonzero(elements) == len(elements):  # single turns: everything is selected
                continue
            ends = pairwise(column.offsets.tolist())
            for row, (start, stop) in zip(column.places, ends, strict=True):
                counts[row] = int(np.count_nonzero(elements[start:stop]))
        for row, kind in enumerate(self.values["experience_type"]):
            if kind == "dpo":
                pair = (self.values["chosen"][row], self.values["rejected"][row])
                counts[row] = sum(response.numel() for response in pair if response is not None)
        return counts


def encode_experiences(experiences: Sequence[Experience]) -> RecordBatch:
    """Return ``experiences`` as one encoded batch, in the order of their slots.

    Raises:
        InvalidArgumentError: a value that cannot be stored; the message names the field.
    """
    return RecordBatch(experiences).encode()


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
            MODAL + name, [None if value is None else value.get(name) for value in values]
        )
    ]


_SCALED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def edits_of(value: Any) -> int:
    """Return how often ``value`` was changed in place, if it is a tensor."""
    if not isinstance(value, Tensor) or value.is_inference():  # torch counts none of those
        return 0
    return value._version  # noqa: SLF001 - the only count that torch keeps


def encode_annotations(experiences: Sequence[Experience]) -> bytes:
    """Encode the advantages, returns and token-level rewards of ``experiences`` as one segment.

    A tensor that is bit for bit ``scalar * action_mask`` is stored as the scalar, and ``returns``
    that are bit for bit the advantages are not stored again; None stays None.
    """
    known = [experience.__dict__ for experience in experiences]
    masks = [fields.get("action_mask") for fields in known]
    tensors = {field: [fields.get(field) for fields in known] for field in ANNOTATED}
    aliases = {}
    # As bytes: 0.0 == -0.0, and NaN != NaN.
    advantages, returns = (
        [(c.dtype, c.shapes.tolist(), [*c.places], c.data.tobytes()) for c in columns]
        for columns in (columns_of(field, tensors[field]) for field in ("advantages", "returns"))
    )
    if advantages and advantages == returns:
        del tensors["returns"]
        aliases["returns"] = "advantages"
    columns = [
        column
        for field, rows in tensors.items()
        for column in _annotation_columns(field, rows, masks)
    ]
    return encode_segment(columns, {}, len(experiences), aliases=aliases)


def _annotation_columns(
    field: str, tensors: Sequence[Tensor | None], masks: Sequence[Tensor | None]
) -> list[Column]:
    scalable: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for row, (tensor, mask) in enumerate(zip(tensors, masks, strict=True)):
        if tensor is None or mask is None or tensor.dtype not in _SCALED_DTYPES:
            continue
        if tensor.ndim == 1 and tensor.shape == mask.shape:
            scalable.setdefault((tensor.dtype, mask.dtype), []).append(row)
    rest, columns = list(tensors), []
    for rows in scalable.values():
        scaled, scalars = _scalars(rows, tensors, masks)
        for row in scaled:
            rest[row] = None
        if scaled:
            column = Column(
                field,
                DTYPE_NAMES[scalars.dtype],
                np.zeros((len(scaled), 0), np.int64),
                bytes_of([scalars]),
                None if len(scaled) == len(tensors) else np.array(scaled, np.int64),
                "scaled_mask",
            )
            columns.append(column)
    return columns + columns_of(field, rest)


def _scalars(
    rows: Sequence[int], tensors: Sequence[Tensor | None], masks: Sequence[Tensor | None]
) -> tuple[list[int], Tensor]:
    """Return those of ``rows``, all of one dtype, that are a scalar times their mask, and these."""
    present = [tensor for row in rows if (tensor := tensors[row]) is not None]
    sizes = [tensor.numel() for tensor in present]
    values = torch.cat(present).detach()
    weights = torch.cat([mask for row in rows if (mask := masks[row]) is not None]).to(values.dtype)
    # Only its first selected token can give the scalar of a row; without tokens, it is 0.
    trained, starts = (weights != 0).numpy(), np.cumsum([0, *sizes])[:-1].tolist()
    filled = [row for row, size in enumerate(sizes) if size]
    firsts = [starts[row] + int(trained[starts[row] :][: sizes[row]].argmax()) for row in filled]
    divisor, scalars = weights[firsts], values.new_zeros(len(sizes))
    scalars[filled] = values[firsts] / divisor.masked_fill(divisor == 0, 1)
    product = scalars.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)) * weights
    bits = _BITS[values.element_size()]
    # Compare bits, not values: 0.0 == -0.0, and NaN != NaN.
    same = product.view(bits) == values.view(bits)
    if bool(same.all()):
        return list(rows), scalars
    scaled = [
        index for index, piece in enumerate(same.split_with_sizes(sizes)) if bool(piece.all())
    ]
    return [rows[index] for index in scaled], scalars[scaled]


EXPERIENCE_TYPES = frozenset(get_args(ExperienceType))


def decode_experiences(
    families: Mapping[str, Buffer],
    meta: ExperienceColumns,
    slots: Sequence[int] | None = None,
    *,
    loaded: Sequence[str] = (),
) -> list[Experience]:
    """Return the experiences of one write, with the fields of the given families.

    Tensors are views of writable buffers; read-only bytes are copied first. Writing to a tensor
    never touches the store.

    Args:
        families: family -> blob; any of them may be left out.
        meta: of the event.
        slots: the rows to decode, in their order; all by default.
        loaded: the families that were asked for, beside ``families``. Some may be empty and hence
            not stored: their fields are None.

    Raises:
        CodecError: a damaged blob, or one that does not belong to ``meta``.
    """
    rows = len(meta)
    wanted = range(rows) if slots is None else slots
    if any(not 0 <= slot < rows for slot in wanted):
        raise CodecError(f"slots {list(wanted)} of a write with {rows} experiences")
    if not EXPERIENCE_TYPES.issuperset(meta.kind):
        raise CodecError("metadata column 'kind' holds an unknown kind of experience")
    asked = dict.fromkeys((*families, *loaded))
    if unknown := [family for family in asked if family not in FAMILIES]:
        raise CodecError(f"families {unknown} do not exist; there are {', '.join(FAMILIES)}")
    empty = {field: None for family in asked for field in FAMILIES[family]}
    # Row tuples once for the write: indexing fourteen columns per row is slower.
    every = list(zip(*structs.astuple(meta), strict=True))
    states = []
    for slot in wanted:
        *eid, reward, version, prompt, length, response, _, kind, reason, _ = every[slot]
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
        # Empty values of these are not stored; see `RecordBatch.objects`.
        if "info" in empty:
            state["info"], state["metrics"], state["custom_fields"] = {}, {}, []
        states.append(state)
    for family, blob in families.items():
        # Tensors must be writable, or torch warns; read-only bytes are copied here.
        segment = decode_segment(writable(blob))
        if segment.rows != rows:
            raise CodecError(f"segment {family} has {segment.rows} rows, its event has {rows}")
        _fill_fields(states, family, segment, slots)
    return [Experience.from_state(state) for state in states]


def _fill_fields(
    states: list[dict[str, Any]], family: str, segment: Segment, slots: Sequence[int] | None
) -> None:
    fields = FAMILIES[family]
    modal: list[dict[str, Tensor]] = [{} for _ in states]
    for name, columns in segment.columns.items():
        field, targets = name, states
        if family == "heavy" and name.startswith(MODAL):
            field, targets = name.removeprefix(MODAL), modal
        elif name not in fields or name in OBJECTS:
            raise CodecError(
                f"segment {family} has the column {name!r}, which does not belong to it"
            )
        for column in columns:
            places, indices = _wanted(column, slots)
            for place, tensor in zip(places, tensors_of(column, indices), strict=True):
                targets[place][field] = tensor
    wanted = range(segment.rows) if slots is None else slots
    for name, objects in segment.objects.items():
        if name not in fields or name not in OBJECTS:
            raise CodecError(
                f"segment {family} has the objects {name!r}, which do not belong to it"
            )
        values = objects.values(wanted, tensor_of)
        for state, value, tensors in zip(states, values, modal, strict=True):
            if value is not None:
                state[name] = _object_of(state, name, value, tensors)


def _wanted(
    column: Column, slots: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int] | None]:
    """Return at which of ``slots`` a column has a row, and which of its rows; None: all."""
    if slots is None:
        return column.places, None
    # A sparse column lists the rows that it has: slots are mapped to its entries.
    index_of = {row: index for index, row in enumerate(column.places)}
    places = [place for place, slot in enumerate(slots) if slot in index_of]
    return places, [index_of[slots[place]] for place in places]


def _object_of(
    state: Mapping[str, Any], field: str, value: Any, tensors: Mapping[str, Tensor]
) -> Any:
    """Return the value of a field from what is stored of it, and the tensors that it names."""
    form: type[Any] = OBJECTS[field]
    if not isinstance(value, form):
        raise CodecError(
            f"{field} of {state['eid']} is a {type(value).__name__}, not a {form.__name__}"
        )
    if field == "multi_modal_inputs":
        if not all(isinstance(name, str) and name in tensors for name in value):
            raise CodecError(f"{field} names missing tensors; stored are {list(tensors)}")
        return {name: tensors[name] for name in value}
    if field != "custom_fields":
        return value
    for item in value:
        is_texts = isinstance(item, list) and all(isinstance(text, str) for text in item)
        if not is_texts or len(item) != 3 or item[2] not in TORCH_DTYPES:
            raise CodecError(f"{field} holds an invalid entry: its bytes are damaged")
    return [CustomField(source, target, TORCH_DTYPES[dtype]) for source, target, dtype in value]
