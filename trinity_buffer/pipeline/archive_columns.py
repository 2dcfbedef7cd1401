"""Segments of experiences as typed columns of Arrow, a row for each experience, and back.

The columns hold the same elements in the same order as the segments, so a segment is encoded from
them again byte for byte. Whoever writes compares; what would come out otherwise (it was written by
another version, say) is kept as it is beside its columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from trinity_buffer.blob import Buffer
from trinity_buffer.codec import Column, ObjectPacker, Segment, decode_segment, encode_segment
from trinity_buffer.codec.objects import unpack_object
from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.identity import FAMILIES

Array = npt.NDArray[Any]

_ROW = "slot"
_NUMBERS = (
    *("run", "step", "policy_version"),
    *("prompt_length", "length", "response_length", "trained_tokens"),
)
_TEXTS = frozenset({"response_text", "prompt_text", "truncate_status"})
_PACKED = ":msgpack"
_SHAPE = ":shape"
_KINDS = "trinity_buffer.columns"
KEPT, CHECKSUM = "kept:", "checksum:"
"""Before the name of a family: of the first row of a segment, the segment itself where its columns
do not make it, and the checksum of it."""


class Kind(NamedTuple):
    """Which values a column of a file holds."""

    family: str
    field: str
    dtype: str
    ndim: int
    encoding: str


@dataclass(frozen=True)
class Written:
    """One segment of experiences on its way out.

    Attributes:
        position: of the event that recorded it.
        fact: what that event says.
        families: family -> blob.
    """

    position: int
    fact: ExperiencesRecorded
    families: Mapping[str, Buffer]

    @cached_property
    def segments(self) -> dict[str, Segment]:
        """The decoded blobs, by family.

        Raises:
            CodecError: one is damaged.
        """
        return {family: decode_segment(blob) for family, blob in self.families.items()}


def kinds_in(segments: Sequence[Written]) -> dict[Kind, str]:
    """Return the kinds of columns of some segments, and a name for each.

    The first kind of a field is called as the field is, others after their dtype and dimensions.
    """
    found: dict[Kind, str] = {}
    taken: set[str] = set()
    for kind in chain.from_iterable(map(_kinds_of_one, segments)):
        # Of complex numbers Arrow knows nothing: their segments are kept as they are.
        if kind in found or kind.dtype.startswith("complex"):
            continue
        words = (kind.field,) if kind.field not in taken else kind[1:]
        found[kind] = ":".join(map(str, words)).replace(".", ":")
        taken.add(kind.field)
    return found


def _kinds_of_one(one: Written) -> Iterator[Kind]:
    for family, segment in one.segments.items():
        for column in chain.from_iterable(segment.columns.values()):
            yield _kind_of(family, column)


def _kind_of(family: str, column: Column) -> Kind:
    return Kind(family, column.field, column.dtype, column.shapes.shape[1], column.encoding)


def table_of(arrow: Any, experiment: str, segments: Sequence[Written]) -> Any:
    """Return a table with a row for each experience of ``segments``.

    Args:
        arrow: the module pyarrow.
        experiment: its name.
        segments: what the table holds.
    """
    kinds = kinds_in(segments)
    parts = [_part(arrow, one, kinds) for one in segments]
    joined = arrow.concat_tables(parts, promote_options="default")
    for name, values in _said(arrow, experiment, segments).items():
        joined = joined.append_column(name, values)
    listed = json.dumps([[*kind, name] for kind, name in kinds.items()])
    return joined.replace_schema_metadata({_KINDS: listed})


def _part(arrow: Any, one: Written, kinds: Mapping[Kind, str]) -> Any:
    """Return the columns of one segment, and what they do not bring back as it is."""
    rows = {_ROW: arrow.array(range(one.fact.rows), arrow.int32())}
    found = arrow.table(rows | _measured(arrow, one, kinds))
    again = dict(segments_in(found, kinds, one.families))
    none = [None] * (one.fact.rows - 1)
    for family, blob in one.families.items():
        digest = arrow.array([checksum(blob), *none], arrow.int64())
        found = found.append_column(CHECKSUM + family, digest)
        if again.get(family) != blob:
            found = found.append_column(
                KEPT + family, arrow.array([blob, *none], arrow.large_binary())
            )
    return found


def checksum(blob: Buffer) -> int:
    """Return XXH3-64 of ``blob``, as a signed number."""
    return int.from_bytes(xxhash.xxh3_64_digest(blob), "big", signed=True)


def columns_for(schema: Any, families: Sequence[str]) -> list[str]:
    """Return the columns of a file from which `segments_in` makes ``families``."""
    wanted = {"segment", _ROW}
    for kind, name in kinds_of(schema).items():
        if kind.family in families:
            wanted |= {name, name + _SHAPE}
    for family in families:
        fields = FAMILIES[family]
        wanted |= {*fields, *(field + _PACKED for field in fields)}
        wanted |= {KEPT + family, CHECKSUM + family}
    return [name for name in schema.names if name in wanted]


def kinds_of(schema: Any) -> dict[Kind, str]:
    """Return the kinds of columns that a table has, and their names."""
    listed = json.loads(schema.metadata[_KINDS.encode()])
    return {Kind(*kind): name for *kind, name in listed}


def _said(arrow: Any, experiment: str, segments: Sequence[Written]) -> dict[str, Any]:
    """Return the columns of what the events say."""
    facts = [one.fact for one in segments]
    rows = [fact.rows for fact in facts]

    def of_events(values: Iterable[Any], kind: Any) -> Any:
        return arrow.array(chain.from_iterable(map(repeat, values, rows)), kind)

    def column(name: str, kind: Any, read: Callable[[Any], Any] | None = None) -> Any:
        values = chain.from_iterable(getattr(fact.columns, name) for fact in facts)
        return arrow.array(values if read is None else map(read, values), kind)

    refused = (fact.refused.get(slot) for fact in facts for slot in range(fact.rows))
    number, text = arrow.int64(), arrow.string()
    return {
        "experiment": of_events(repeat(experiment, len(rows)), text),
        "position": of_events((one.position for one in segments), number),
        "segment": of_events((fact.segment for fact in facts), arrow.binary()),
        "uid": arrow.array(chain.from_iterable(fact.columns.uids() for fact in facts), text),
        "batch": column("batch", text, str),
        "task": column("task", text, str),
        "suffix": column("suffix", text),
        "reward": column("reward", arrow.float64(), _as_float),
        **{name: column(name, number) for name in _NUMBERS},
        "kind": column("kind", text),
        "finish_reason": column("finish_reason", text),
        "refused": arrow.array(refused, text),
        "digest": column("digest", arrow.binary()),
    }


def _as_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _measured(arrow: Any, one: Written, kinds: Mapping[Kind, str]) -> dict[str, Any]:
    """Return the columns of what its segments hold."""
    found: dict[str, Any] = {}
    for family, segment in one.segments.items():
        for column in chain.from_iterable(segment.columns.values()):
            name = kinds.get(_kind_of(family, column))
            if name is None:
                continue
            found[name] = _values(arrow, column, segment.rows)
            if column.shapes.shape[1] > 1:
                found[name + _SHAPE] = _shapes(arrow, column, segment.rows)
        for name, objects in segment.objects.items():
            texts = _texts(name, objects.pieces)
            if texts is None:
                packed = [piece or None for piece in objects.pieces]
                found[name + _PACKED] = arrow.array(packed, arrow.large_binary())
            else:
                found[name] = arrow.array(texts, arrow.large_string())
    return found


def _values(arrow: Any, column: Column, rows: int) -> Any:
    """Return the elements of a column: a list for each row, or one number where it has no shape."""
    flat = arrow.array(_plain(column))
    absent = _absent(column, rows)
    if column.shapes.shape[1] == 0:
        if absent is None:
            return flat
        places = np.zeros(rows, np.int64)
        places[~absent] = np.arange(len(flat))
        return flat.take(arrow.array(places, mask=absent))
    return _lists(arrow, flat, column.sizes, absent)


def _shapes(arrow: Any, column: Column, rows: int) -> Any:
    sizes = np.full(len(column.shapes), column.shapes.shape[1])
    flat = arrow.array(column.shapes.astype(np.uint32).ravel())
    return _lists(arrow, flat, sizes, _absent(column, rows))


def _lists(arrow: Any, flat: Any, sizes: Array, absent: Array | None) -> Any:
    every = sizes
    if absent is not None:
        every = np.zeros(len(absent), np.int64)
        every[~absent] = sizes
    ends = np.zeros(len(every) + 1, np.int64)
    np.cumsum(every, out=ends[1:])
    mask = None if absent is None else arrow.array(absent)
    return arrow.LargeListArray.from_arrays(arrow.array(ends), flat, mask=mask)


def _absent(column: Column, rows: int) -> Array | None:
    if column.rows is None:
        return None
    absent = np.ones(rows, np.bool_)
    absent[column.rows] = False
    return absent


def _plain(column: Column) -> Array:
    """Return the elements as numbers that Arrow knows; bits where no type of its own is near."""
    if column.dtype == "bool":
        return column.data.view(np.bool_)
    if column.dtype == "bfloat16":  # the upper half of a float32
        return (column.elements.astype(np.uint32) << 16).view(np.float32)
    return column.elements


def _raw(values: Array, dtype: str) -> Array:
    """Return the bytes of what `_plain` returned."""
    if dtype == "bfloat16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(values).view(np.uint8)


def _texts(name: str, pieces: Sequence[bytes]) -> list[str | None] | None:
    """Return objects as texts, others than texts as JSON; None: that would not bring them back."""
    distinct = [piece for piece in dict.fromkeys(pieces) if piece]
    try:
        texts = [_text(name, unpack_object(piece)) for piece in distinct]
        if _pieces(name, texts) != distinct:
            return None
    except (TypeError, ValueError, RecursionError):
        return None
    text_of: dict[bytes, str | None] = dict(zip(distinct, texts, strict=True))
    return [text_of.get(piece) for piece in pieces]


_as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _text(name: str, value: Any) -> str:
    return str(value) if name in _TEXTS else _as_json(value)


def _pieces(name: str, texts: Sequence[str | None]) -> list[bytes]:
    """Return what `_texts` was given."""
    distinct = [text for text in dict.fromkeys(texts) if text is not None]
    values = distinct if name in _TEXTS else json.loads(f"[{','.join(distinct)}]")
    piece_of = dict(zip(distinct, ObjectPacker().pack_all(values, name), strict=True))
    return [b"" if text is None else piece_of[text] for text in texts]


# -- back


def segments_in(
    rows: Any, kinds: Mapping[Kind, str], families: Sequence[str] | Mapping[str, Buffer]
) -> Iterator[tuple[str, bytes]]:
    """Yield (family, blob) of the segment whose rows a table holds; not of families without any."""
    there = set(rows.column_names)
    for family in families:
        if KEPT + family in there and (kept := rows[KEPT + family][0].as_py()) is not None:
            yield family, kept
            continue
        mine = [(kind, name) for kind, name in kinds.items() if kind.family == family]
        columns = [
            _column(rows, kind, name)
            for kind, name in mine
            if name in there and rows[name].null_count < len(rows)
        ]
        packed = dict(_objects(rows, family, there))
        if columns or packed:
            columns.sort(key=_place_in(family))
            yield family, encode_segment(columns, {}, len(rows), packed=packed)


def _place_in(family: str) -> Any:
    """Return a key that puts columns in the order in which they are encoded."""
    fields = FAMILIES[family]

    def place(column: Column) -> tuple[int, str, int]:
        field = column.field.partition(".")[0]
        first = 0 if column.rows is None else int(column.rows[0])
        return fields.index(field), column.field, first

    return place


def _column(rows: Any, kind: Kind, name: str) -> Column:
    values = rows[name].combine_chunks()
    present = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    whole = len(present) == len(rows)
    if kind.ndim:
        sizes = values.value_lengths().drop_null().to_numpy()
        shapes = sizes.reshape(-1, 1)
        flat = values.flatten()
    else:
        shapes = np.zeros((len(present), 0), np.int64)
        flat = values.drop_null()
    if kind.ndim > 1:
        of_rows = rows[name + _SHAPE].combine_chunks().flatten()
        shapes = of_rows.to_numpy().astype(np.int64).reshape(-1, kind.ndim)
    raw = _raw(flat.to_numpy(zero_copy_only=False), kind.dtype)
    return Column(
        kind.field,
        kind.dtype,
        shapes.astype(np.int64),
        raw,
        None if whole else present.astype(np.int64),
        kind.encoding,
    )


def _objects(rows: Any, family: str, there: set[str]) -> Iterator[tuple[str, list[bytes]]]:
    for field in FAMILIES[family]:
        if field + _PACKED in there and rows[field + _PACKED].null_count < len(rows):
            yield field, [piece or b"" for piece in rows[field + _PACKED].to_pylist()]
        elif field in there and _is_text(rows[field]) and rows[field].null_count < len(rows):
            yield field, _pieces(field, rows[field].to_pylist())


def _is_text(column: Any) -> bool:
    return str(column.type) in ("large_string", "string")
