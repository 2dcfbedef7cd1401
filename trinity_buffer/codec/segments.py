"""Segments: the columns of many experiences in one blob, laid out to be read without copying.

A blob is one msgpack document, ``[header length, header, filler, body]``:

    0x94 | 0xce u32 | header: a map | 0xc6 u32 filler | 0xc6 u32 body

``header length`` makes it possible to parse the header alone. ``filler`` is as long as it takes for
the body to start at a multiple of 64 bytes from the start of the blob; in it every column starts at
a multiple of 64 too. The header lists columns as ``[field, dtype, encoding, rows, ndim, shapes,
offset, size]`` (rows and shapes are arrays of u32, offset and size are bytes of the body) and
objects as ``[field, offset, size]`` (an array of ``rows + 1`` u32, then that many pieces of
msgpack, of which an empty one is None). All numbers in arrays are little-endian.

A content digest covers all of an experience but its address and its metrics: it tells "the same
again" from "the same address, other content".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate, chain, pairwise
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from trinity_buffer.codec.arrays import DTYPES, MAX_DIMENSIONS
from trinity_buffer.codec.blob import Buffer
from trinity_buffer.codec.objects import ENCODER, AsTensor, ObjectPacker, pack_plain, unpack_object
from trinity_buffer.errors import CodecError, CodecVersionError, InvalidArgumentError
from trinity_buffer.events import ExperienceColumns

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]

JOINED_BYTES = 1 << 16
"""Shorter pieces are joined with their neighbours: each piece costs its writer a call."""

ANNOTATED = ("advantages", "returns", "token_level_reward")
"""Fields of an annotation, one number per token of the response each."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One field of many rows whose tensors share dtype and number of dimensions, concatenated.

    Attributes:
        field: name of the field.
        dtype: torch's name, without the prefix; a key of `DTYPES`.
        shapes: ``[n, ndim]``, the shape of each row's tensor.
        data: ``[bytes]``, the elements of all rows, each row in C order.
        rows: ``[n]`` ascending, the rows that are present; None: all.
        encoding: ``raw``, or ``scaled_mask``: one scalar per row (``ndim`` 0) that stands for the
            tensor ``scalar * action_mask`` in ``dtype``.
    """

    field: str
    dtype: str
    shapes: Integers
    data: Bytes
    rows: Integers | None = None
    encoding: str = "raw"

    @property
    def sizes(self) -> Integers:
        """Number of elements of each row, ``[n]``."""
        if self.shapes.shape[1] == 1:
            return self.shapes[:, 0]
        sizes: Integers = self.shapes.prod(axis=1, dtype=np.int64)
        return sizes

    @property
    def places(self) -> Sequence[int]:
        """Which row of the segment each of its rows is."""
        return range(len(self.shapes)) if self.rows is None else self.rows.tolist()

    @property
    def offsets(self) -> Integers:
        """Where each row begins, in elements, and where the last one ends: ``[n + 1]``."""
        offsets = np.zeros(len(self.shapes) + 1, np.int64)
        self.sizes.cumsum(out=offsets[1:])
        return offsets

    @property
    def elements(self) -> npt.NDArray[Any]:
        """The elements as a view of `data`; bits in unsigned integers where NumPy has no type."""
        return self.data.view(DTYPES[self.dtype])


@dataclass(frozen=True, slots=True, eq=False)
class ObjectColumn:
    """One field of objects, decoded when asked for.

    Attributes:
        offsets: where each one begins in `data`, and where the last one ends: ``[n + 1]``.
        data: the objects as they are packed; an empty one is None.
    """

    offsets: npt.NDArray[np.uint32]
    data: memoryview

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self.values([row])[0]

    @property
    def pieces(self) -> list[bytes]:
        """The objects as they are packed; an empty one is None."""
        ends, data = self.offsets.tolist(), self.data
        return [bytes(data[start:stop]) for start, stop in pairwise(ends)]

    def values(self, rows: Sequence[int], as_tensor: AsTensor | None = None) -> list[Any]:
        """Return the objects of ``rows``.

        Raises:
            CodecError: a damaged one.
        """
        ends, data = self.offsets.tolist(), self.data
        return [
            unpack_object(data[ends[row] : ends[row + 1]], as_tensor)
            if ends[row] < ends[row + 1]
            else None
            for row in rows
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """What a blob holds; arrays are views of the blob.

    Attributes:
        rows: how many rows it has.
        columns: field -> its columns, more than one where rows differ in dtype or dimensions.
        objects: field -> its objects, one per row.
        aliases: fields that are bit for bit another one; `columns` has them under both names.
    """

    rows: int
    columns: dict[str, list[Column]] = field(default_factory=dict)
    objects: dict[str, ObjectColumn] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def is_scorable(columns: Mapping[str, Sequence[Column]]) -> bool:
    """Return whether one number per row can stand for what a strategy makes of it.

    That is so where each row has a boolean action mask, and no row has values per token that an
    annotation would hand on.

    Args:
        columns: field -> columns of one write, at least those of the light family.
    """
    masks = columns.get("action_mask", ())
    plain = [mask.rows is None and mask.dtype == "bool" for mask in masks] == [True]
    return plain and not any(columns.get(field) for field in ANNOTATED)


SEGMENT_VERSION = 1
ALIGNMENT = 64

_HEAD = 6  # 0x94, 0xce and the header's length
_BIN_HEAD = 5  # 0xc6 and a length
_U32 = np.dtype("<u4")
_MAX_BYTES = (1 << 32) - 1


def encode_segment(
    columns: Sequence[Column],
    objects: Mapping[str, Sequence[Any]],
    rows: int,
    *,
    packed: Mapping[str, Sequence[bytes]] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> bytes:
    """Return the bytes of a segment.

    Args:
        columns: with data that fits their shapes.
        objects: field -> one value per row; None is free.
        rows: how many.
        packed: like ``objects``, packed already by an `ObjectPacker`; ``b""`` is None.
        aliases: field -> the field that it is bit for bit the same as.

    Raises:
        InvalidArgumentError: columns or objects that do not fit ``rows``, or a blob over 4 GiB.
    """
    packer = ObjectPacker()
    texts = {name: packer.pack_all(values, name) for name, values in objects.items()}
    return b"".join(segment_blob(columns, rows, {**texts, **(packed or {})}, aliases))


def segment_blob(
    columns: Sequence[Column],
    rows: int,
    packed: Mapping[str, Sequence[bytes]],
    aliases: Mapping[str, str] | None = None,
) -> list[Buffer]:
    """Return the same as `encode_segment`, in pieces; data of large columns is not copied."""
    entries: list[tuple[str, list[Any], Sequence[Buffer]]] = []
    for column in columns:
        count = rows if column.rows is None else len(column.rows)
        width = DTYPES[column.dtype].itemsize if column.dtype in DTYPES else 0
        if len(column.shapes) != count or sum(column.sizes.tolist()) * width != len(column.data):
            raise InvalidArgumentError(
                f"column {column.field}: {len(column.data)} bytes of {column.dtype} do not fit "
                f"{len(column.shapes)} shapes in {count} rows"
            )
        ndim = column.shapes.shape[1]
        # Of a single dimension the number of bytes was compared.
        if ndim > MAX_DIMENSIONS or (ndim > 1 and column.shapes.max(initial=0) > _MAX_BYTES):
            raise InvalidArgumentError(
                f"column {column.field}: a tensor of {ndim} dimensions or 2^32"
            )
        present = None if column.rows is None else column.rows.astype(_U32).tobytes()
        shapes = column.shapes.astype(_U32).tobytes()
        entry = [column.field, column.dtype, column.encoding, present, ndim, shapes]
        entries.append(("columns", entry, [column.data.data]))
    for name, pieces in packed.items():
        if len(pieces) != rows:
            raise InvalidArgumentError(f"objects {name}: {len(pieces)} values for {rows} rows")
        ends = list(accumulate(map(len, pieces), initial=0))
        if ends[-1] > _MAX_BYTES:
            raise InvalidArgumentError(f"objects {name}: {ends[-1]} bytes, the limit is 4 GiB")
        # Short ones are joined: each piece costs its writer a call.
        are_short = max(map(len, pieces), default=0) < JOINED_BYTES
        joined = [b"".join(pieces)] if are_short else pieces
        entries.append(("objects", [name], [np.array(ends, _U32).tobytes(), *joined]))
    lists: dict[str, list[list[Any]]] = {"columns": [], "objects": []}
    parts, size = list[Buffer](), 0
    for kind, entry, buffers in entries:
        padding, length = -size % ALIGNMENT, sum(map(len, buffers))
        lists[kind].append([*entry, size + padding, length])
        parts += [bytes(padding), *buffers]
        size += padding + length
    fields = {"v": SEGMENT_VERSION, "rows": rows, **lists, "aliases": dict(aliases or {})}
    header = pack_plain(fields)
    # The body begins at a multiple, so that views of its columns are aligned for every dtype.
    filler = -(_HEAD + len(header) + 2 * _BIN_HEAD) % ALIGNMENT
    if max(len(header), size) > _MAX_BYTES:
        raise InvalidArgumentError(
            f"a segment of {size} bytes: the limit is 4 GiB, write fewer experiences at once"
        )
    # All lengths have a fixed width, so that the place of the body is known before it is packed.
    lengths = [length.to_bytes(4, "big") for length in (len(header), filler, size)]
    head = b"\x94\xce%b%b\xc6%b%b\xc6%b" % (
        *(lengths[0], header, lengths[1], bytes(filler), lengths[2]),
    )
    return list(few_pieces([head, *parts]))


def few_pieces(pieces: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yield the same bytes, short neighbours joined."""
    short, size = list[Buffer](), 0
    for piece in pieces:
        if size and size + len(piece) > JOINED_BYTES:
            yield b"".join(short)
            short, size = [], 0
        if len(piece) >= JOINED_BYTES:
            yield piece
            continue
        short.append(piece)
        size += len(piece)
    if size:
        yield b"".join(short)


def decode_segment(blob: Buffer) -> Segment:
    """Return the segment in ``blob``, as views; those of a bytearray can be written to.

    Raises:
        CodecError: bytes that `encode_segment` did not write.
        CodecVersionError: a newer version of this package wrote them.
    """
    view = memoryview(blob).cast("B")
    document, body = _split(view)
    try:
        header = msgspec.convert(document, _Header, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise _damaged(f"its header has another form: {error}") from error
    segment, used = Segment(header.rows), 0
    for column in header.columns:
        used = _read_column(segment, column, body, used)
    for objects in header.objects:
        used = _read_objects(segment, objects, body, used)
    for name, target in header.aliases.items():
        if name in segment.columns or name in segment.objects or target not in segment.columns:
            raise _damaged(f"field {name!r} is said to be the same as {target!r}")
        segment.aliases[name] = target
    segment.columns.update({name: segment.columns[of] for name, of in header.aliases.items()})
    return segment


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Dimensions = Annotated[int, msgspec.Meta(ge=0, le=MAX_DIMENSIONS)]
_Encoding = Literal["raw", "scaled_mask"]
_ColumnEntry: TypeAlias = tuple[
    str, str, _Encoding, bytes | None, _Dimensions, bytes, _Count, _Count
]
_ObjectsEntry: TypeAlias = tuple[str, _Count, _Count]


class _Header(msgspec.Struct):
    rows: _Count
    columns: list[_ColumnEntry]
    objects: list[_ObjectsEntry]
    aliases: dict[str, str]


# msgspec looks at the class now, while no other thread can: see `objects._decoder`.
msgspec.msgpack.Decoder(_Header)


def _damaged(what: str) -> CodecError:
    return CodecError(f"a segment cannot be read: {what}; it is damaged, or was not written by us")


def _split(view: memoryview) -> tuple[dict[Any, Any], memoryview]:
    """Return the parsed header, of a version that is known, and the body."""
    if len(view) < _HEAD or view[0] != 0x94 or view[1] != 0xCE:
        raise _damaged("bad magic bytes")
    end = _HEAD + int.from_bytes(view[2:_HEAD], "big")
    _, at = _binary(view, end)
    body, end_of_body = _binary(view, at)
    if end_of_body != len(view) or (len(view) - len(body)) % ALIGNMENT:
        raise _damaged("its length differs from its header")
    header = unpack_object(view[_HEAD:end])
    version = header.get("v") if isinstance(header, dict) else None
    if type(version) is not int or version < 1:
        raise _damaged("it has no version")
    if version > SEGMENT_VERSION:
        raise CodecVersionError(
            f"a segment has version {version}, this package reads up to {SEGMENT_VERSION}: "
            "upgrade trinity-buffer"
        )
    return header, body


def _binary(view: memoryview, at: int) -> tuple[memoryview, int]:
    """Return the 32-bit binary that begins at ``at``, and where it ends."""
    begin = at + _BIN_HEAD
    if begin > len(view) or view[at] != 0xC6:
        raise _damaged(f"no part begins at byte {at}")
    end = begin + int.from_bytes(view[at + 1 : begin], "big")
    if end > len(view):
        raise _damaged(f"its part at byte {at} claims {end - begin} bytes, {len(view)} are there")
    return view[begin:end], end


def _region(
    name: str, offset: int, size: int, body: memoryview, used: int
) -> tuple[memoryview, int]:
    """Return the bytes of a column or of objects, and where they end."""
    if offset < used or offset + size > len(body) or offset % ALIGNMENT:
        raise _damaged(f"column {name!r} claims bytes that are not its own")
    return body[offset : offset + size], offset + size


def _read_column(segment: Segment, entry: _ColumnEntry, body: memoryview, used: int) -> int:
    name, dtype, encoding, rows, ndim, shapes, offset, size = entry
    if dtype not in DTYPES or (encoding != "raw" and ndim):
        raise _damaged(f"column {name!r} has an unknown dtype or encoding")
    raw, end = _region(name, offset, size, body, used)
    try:
        present = None if rows is None else np.frombuffer(rows, _U32).astype(np.int64)
        sizes = np.frombuffer(shapes, _U32).astype(np.int64)
    except ValueError as error:
        raise _damaged(f"column {name!r} has no rows or shapes") from error
    count = segment.rows if present is None else len(present)
    is_ascending = present is None or (present[1:] > present[:-1]).all()
    if not is_ascending or (present is not None and count and present[-1] >= segment.rows):
        raise _damaged(f"column {name!r} names rows that do not exist")
    if len(sizes) != count * ndim:
        raise _damaged(f"column {name!r} has {len(sizes)} sizes for {count} x {ndim}")
    data = np.frombuffer(raw, np.uint8)
    column = Column(name, dtype, sizes.reshape(count, ndim), data, present, encoding)
    _check_size(column, count)
    same = segment.columns.setdefault(name, [])
    same.append(column)
    taken = list(chain.from_iterable(other.places for other in same)) if len(same) > 1 else []
    if len(set(taken)) < len(taken):
        raise _damaged(f"column {name!r} has a row twice")
    return end


def _check_size(column: Column, count: int) -> None:
    """Check that the data is as long as the shapes say, before anything is made of it."""
    width = DTYPES[column.dtype].itemsize
    if column.shapes.shape[1] > 1:
        # In floats first: a product of sizes may be far beyond 64 bits.
        fits = float(column.shapes.prod(axis=1, dtype=np.float64).sum()) * width == len(column.data)
    else:
        # Without dimensions, sizes would be as many ones as the header claims rows.
        total = sum(column.sizes.tolist()) if column.shapes.shape[1] else count
        fits = total * width == len(column.data)
    if not fits:
        raise _damaged(f"column {column.field!r} has {len(column.data)} bytes, its shapes differ")
    if column.dtype == "bool" and column.data.max(initial=0) > 1:
        raise _damaged(f"column {column.field!r} holds booleans other than 0 and 1")


def _read_objects(segment: Segment, entry: _ObjectsEntry, body: memoryview, used: int) -> int:
    name, offset, size = entry
    raw, end = _region(name, offset, size, body, used)
    head = (segment.rows + 1) * _U32.itemsize
    if head > len(raw) or name in segment.columns or name in segment.objects:
        raise _damaged(f"objects {name!r} do not match its rows, or appear twice")
    offsets = np.frombuffer(raw[:head], _U32)
    whole = offsets[0] == 0 and int(offsets[-1]) == len(raw) - head
    if not whole or (offsets[1:] < offsets[:-1]).any():
        raise _damaged(f"objects {name!r} overlap")
    segment.objects[name] = ObjectColumn(offsets, raw[head:])
    return end


DIGEST_SIZE = 16


def content_digest(pieces: Iterable[Buffer]) -> bytes:
    """Return the first 16 bytes of SHA-256 of a canonical head and the buffers that it describes.

    Processors have instructions for it: it takes two thirds of the time of BLAKE2b, and is the
    longest part of a write all the same.
    """
    # Joined first: one call instead of one for each piece, at the price of a copy in the cache.
    return sha256(b"".join(pieces)).digest()[:DIGEST_SIZE]


_DIGEST_VERSION = 1
_NOT_CONTENT = "metrics"


def content_digests(
    kinds: Sequence[str],
    prompts: Sequence[int],
    rewards: Sequence[float | None],
    content: Iterable[Column | tuple[str, Sequence[bytes]]],
) -> list[bytes]:
    """Return the content digest of each experience of one write.

    Args:
        kinds, prompts, rewards: of each experience its type, prompt length and reward.
        content: in the order of the segments, columns, and fields of objects with a piece for each
            row, its keys in order; an empty piece is no object.
    """
    rows = len(kinds)
    firsts = list(zip([_DIGEST_VERSION] * rows, kinds, prompts, rewards, strict=True))
    # One list per field, with a piece for each row: the rows are joined at the end, in C.
    try:
        heads: list[Sequence[bytes]] = [list(map(ENCODER.encode, firsts))]
    except TypeError:  # rewards of subclasses of float
        packer = ObjectPacker(canonical=True)
        heads = [packer.pack_all(list(map(list, firsts)), "reward")]
    buffers: list[Sequence[Buffer]] = []
    for part in content:
        if not isinstance(part, Column):
            name, pieces = part
            if name != _NOT_CONTENT:
                packed = pack_plain(name)
                heads += [[packed if piece else b"" for piece in pieces], pieces]
            continue
        view, width = part.data.data, DTYPES[part.dtype].itemsize
        ends = accumulate((part.sizes * width).tolist(), initial=0)
        data: list[Buffer] = [view[start:stop] for start, stop in pairwise(ends)]
        shapes = list(map(tuple, part.shapes.tolist()))
        known = {shape: pack_plain((part.field, part.dtype, shape)) for shape in set(shapes)}
        forms = list(map(known.__getitem__, shapes))
        if part.rows is not None:
            present = part.rows.tolist()
            forms, data = _spread(forms, present, rows), _spread(data, present, rows)
        heads.append(forms)
        buffers.append(data)
    # Written out, as a call for each row shows in the time of a write.
    return [
        sha256(b"".join(row)).digest()[:DIGEST_SIZE] for row in zip(*heads, *buffers, strict=True)
    ]


def _spread(pieces: Sequence[Buffer], rows: Sequence[int], number: int) -> list[Any]:
    """Return one piece for each of ``number`` rows: empty for those that are not in ``rows``."""
    spread: list[Buffer] = [b""] * number
    for row, piece in zip(rows, pieces, strict=True):
        spread[row] = piece
    return spread


def digests_of_segments(meta: ExperienceColumns, segments: Sequence[Segment]) -> list[bytes]:
    """Return the content digests of one write from its decoded segments, without torch.

    Args:
        meta: of its event.
        segments: all that it has, in the order in which the body names them.

    Raises:
        CodecError: an object is damaged.
    """
    packer = ObjectPacker(canonical=True)
    content: list[Column | tuple[str, Sequence[bytes]]] = []
    for segment in segments:
        for name, objects in segment.objects.items():
            if name == _NOT_CONTENT:
                continue
            pieces = objects.pieces
            # Rows of one write say the same again and again, so each distinct piece is read once.
            # Nothing, and a text, are canonical as they are.
            known = {
                piece: piece
                if not piece or 0xA0 <= piece[0] < 0xC0 or 0xD9 <= piece[0] <= 0xDB
                else packer.pack(unpack_object(piece), name)
                for piece in set(pieces)
            }
            content.append((name, list(map(known.__getitem__, pieces))))
        content += [column for columns in segment.columns.values() for column in columns]
    return content_digests(meta.kind, meta.prompt_length, meta.reward, content)
