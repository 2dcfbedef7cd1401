"""Parquet archives of segments that have left the database: one row per part, as it was stored.

Archives of older versions have typed columns and one row per experience. Their columns hold the
elements of a segment in its order, so the segment is encoded from them again byte for byte; a
segment for which that fails is stored whole beside its columns.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from trinity_buffer.codec.objects import ObjectPacker
from trinity_buffer.codec.segments import Column, encode_segment
from trinity_buffer.errors import InvalidArgumentError, StoreError
from trinity_buffer.identity import FAMILIES
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.handle import by_size
from trinity_buffer.store.transaction import SegmentParts


class ArchiveFile(NamedTuple):
    """A file, and its sha256."""

    path: str
    digest: str


def require_pyarrow() -> None:
    """Raise unless archives can be written here.

    Raises:
        InvalidArgumentError: pyarrow is not installed.
    """
    if find_spec("pyarrow") is None:  # importing it takes as long as all else that starts a command
        raise InvalidArgumentError(
            "archiving needs pyarrow: pip install 'trinity-buffer[parquet]', or use delete=True"
        )


def write_archive(
    folder: Path, experiment: str, positions: Mapping[bytes, int], parts: SegmentParts
) -> ArchiveFile:
    """Write one file, durably and named by the digest of its content.

    Processes that write at the same time write different files, or the same bytes to one name.

    Args:
        folder: target folder, created if missing.
        experiment: name of the experiment.
        positions: key of each segment -> position of the event that names it.
        parts: the parts of these segments.

    Raises:
        InvalidArgumentError: the folder cannot be created, or pyarrow cannot be used.
        StoreError: the file cannot be written there.
    """
    try:
        pyarrow, parquet = _parquet()
    except ImportError as error:
        raise InvalidArgumentError(f"archiving needs a pyarrow that works: {error}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"archive folder {folder}: {error.strerror}") from error
    text, number, binary = pyarrow.string(), pyarrow.int64(), pyarrow.binary()
    kinds = (text, number, binary, text, number, number, pyarrow.large_binary())
    schema = pyarrow.schema(zip(_COLUMNS, kinds, strict=True))
    # Blobs are unique, so dictionary encoding would only hold a second copy of each.
    plain = {"use_dictionary": ["experiment", "family"], "write_statistics": ["segment", "family"]}
    temporary = folder / f"{uuid.uuid4().hex}.writing"
    try:
        with parquet.ParquetWriter(temporary, schema, compression="zstd", **plain) as file:
            in_order = sorted(parts, key=itemgetter(1, 0))
            part_rows = ((*of, *part) for of in in_order for part in parts[of])
            # Each row group holds one family, so that readers skip the others by their statistics.
            groups = by_size(
                part_rows,
                lambda row: len(row[-1]),
                sizes.bytes_per_row_group,
                lambda rows, row: rows[0][1] != row[1],
            )
            for rows in groups:
                named = ((experiment, positions[row[0]], *row) for row in rows)
                columns = map(pyarrow.array, zip(*named, strict=True), schema.types)
                file.write_table(pyarrow.table([*columns], schema))
        # for people, who know it by its beginning: a file's name has 255 bytes, that of an
        # experiment may take three times as many here
        name = quote(experiment, safe="")[:200]
        return _placed(folder.absolute(), name, temporary)
    except OSError as error:
        raise StoreError(f"archive folder {folder}: a file cannot be written ({error})") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


_COLUMNS = ("experiment", "position", "segment", "family", "part", "checksum", "data")


def _placed(folder: Path, experiment: str, temporary: Path) -> ArchiveFile:
    """Rename a written file after its digest, durably."""
    with temporary.open("rb") as handle:
        os.fsync(handle.fileno())
    # Of the file and not of what it was made of: the log is to name what was written.
    digest = digest_of(temporary)
    path = folder / f"{experiment}-{digest[:16]}.parquet"
    temporary.rename(path)
    # The name must survive a power cut before an event names it and the segments go.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return ArchiveFile(str(path), digest)


def digest_of(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_archive(path: str, keys: Sequence[bytes], families: Sequence[str]) -> SegmentParts:
    """Return the parts of segments, unchecked, without families that a segment lacks.

    Raises:
        StoreError: the file cannot be read here; the message says why, and what to do.
    """
    if not Path(path).is_file():
        raise StoreError(
            "that file is not there: read on the machine that has it, put it back, or, if it was "
            "moved, bring it back with `trinity-buffer restore --from FOLDER`"
        )
    try:
        pyarrow, parquet = _parquet()
    except ImportError as error:
        raise StoreError(
            "reading that needs pyarrow: pip install 'trinity-buffer[parquet]'"
        ) from error
    try:
        read = _read_parts if "part" in parquet.read_schema(path).names else _read_columns
        held, parts = read(parquet, path, keys, families)
    except (OSError, KeyError, ValueError, pyarrow.ArrowException) as error:
        raise StoreError(
            f"that file cannot be read ({error}): put a sound copy in its place"
        ) from error
    if missing := set(keys).difference(held):
        raise StoreError(
            f"that file does not hold {min(missing).hex()}: put the one that was written there back"
        )
    return parts


def _read_parts(
    parquet: Any, path: str, keys: Sequence[bytes], families: Sequence[str]
) -> tuple[set[bytes], SegmentParts]:
    """Return which of ``keys`` a file holds, and their parts."""
    of_keys, of_families = ("segment", "in", list(keys)), ("family", "in", list(families))
    held = parquet.read_table(path, columns=["segment"], filters=[of_keys])["segment"]
    parts: SegmentParts = {}
    for row in parquet.read_table(path, filters=[of_keys, of_families]).to_pylist():
        part = (row["part"], row["checksum"], row["data"] or b"")
        parts.setdefault((row["segment"], row["family"]), []).append(part)
    return set(held.to_pylist()), parts


def _parquet() -> tuple[Any, Any]:
    """Return pyarrow and its Parquet module; ImportError where the extra is not installed."""
    import pyarrow  # noqa: PLC0415 - an optional extra
    from pyarrow import parquet  # noqa: PLC0415 - an optional extra

    return pyarrow, parquet


# -- files of older versions ----------------------------------------------------------------------

_TEXTS = frozenset({"response_text", "prompt_text", "truncate_status"})
_PACKED, _SHAPE = ":msgpack", ":shape"
_KINDS = b"trinity_buffer.columns"
_KEPT, _CHECKSUM = "kept:", "checksum:"
"""Prefixes of columns that hold, in a segment's first row, a family's blob if it cannot be encoded
from the other columns, and its checksum."""


class _Kind(NamedTuple):
    """The field, dtype and shape of the values in a column of a file."""

    family: str
    field: str
    dtype: str
    ndim: int
    encoding: str


def _read_columns(
    parquet: Any, path: str, keys: Sequence[bytes], families: Sequence[str]
) -> tuple[set[bytes], SegmentParts]:
    """Read a file of typed columns; see `_read_parts`."""
    rows = parquet.read_table(path, filters=[("segment", "in", list(keys))])
    families = [family for family in families if family in FAMILIES]
    kinds = {_Kind(*kind): name for *kind, name in json.loads(rows.schema.metadata[_KINDS])}
    held, parts, start = set[bytes](), SegmentParts(), 0
    for key, slots in groupby(rows["segment"].to_pylist()):
        held.add(key)
        number = len(list(slots))
        segment = rows.slice(start, number)
        start += number
        for family in families:
            if (blob := _encoded(segment, kinds, family)) is not None:
                parts[key, family] = [(0, segment[_CHECKSUM + family][0].as_py(), blob)]
    return held, parts


def _encoded(rows: Any, kinds: Mapping[_Kind, str], family: str) -> bytes | None:
    """Return the blob of a family, encoded from the rows of its segment; None if it has none."""
    present = {name for name in rows.column_names if rows[name].null_count < len(rows)}
    if _KEPT + family in present:
        whole: bytes = rows[_KEPT + family][0].as_py()
        return whole
    columns = [
        _column(rows, kind, name)
        for kind, name in kinds.items()
        if kind.family == family and name in present
    ]
    packed = {}
    for field in FAMILIES[family]:
        if field + _PACKED in present:
            packed[field] = [piece or b"" for piece in rows[field + _PACKED].to_pylist()]
        elif field in present and str(rows[field].type) in ("large_string", "string"):
            packed[field] = _packed(field, rows[field].to_pylist())
    if not columns and not packed:
        return None
    # The checksum beside the columns is of these bytes, so that the order counts.
    columns.sort(key=_place_in_segment)
    return encode_segment(columns, {}, len(rows), packed=packed)


def _place_in_segment(column: Column) -> tuple[int, str, int]:
    """Return the sort key of columns in a segment; the bytes depend on their order."""
    field = column.field.partition(".")[0]
    fields = next(fields for fields in FAMILIES.values() if field in fields)
    first = 0 if column.rows is None else int(column.rows[0])
    return fields.index(field), column.field, first


def _column(rows: Any, kind: _Kind, name: str) -> Column:
    values = rows[name].combine_chunks()
    present = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    if kind.ndim:
        shapes = values.value_lengths().drop_null().to_numpy().reshape(-1, 1)
        flat = values.flatten()
    else:
        shapes, flat = np.zeros((len(present), 0)), values.drop_null()
    if kind.ndim > 1:
        flat_shapes = rows[name + _SHAPE].combine_chunks().flatten()
        shapes = flat_shapes.to_numpy().reshape(-1, kind.ndim)
    elements = flat.to_numpy(zero_copy_only=False)
    if kind.dtype == "bfloat16":  # stored as float32, whose upper half it is
        elements = (elements.view(np.uint32) >> 16).astype(np.uint16)
    data, shapes = np.ascontiguousarray(elements).view(np.uint8), shapes.astype(np.int64)
    places = None if len(present) == len(rows) else present.astype(np.int64)
    return Column(kind.field, kind.dtype, shapes, data, places, kind.encoding)


def _packed(name: str, texts: Sequence[str | None]) -> list[bytes]:
    """Return texts, or objects as JSON, as a segment packs them."""
    distinct = [text for text in dict.fromkeys(texts) if text is not None]
    values = distinct if name in _TEXTS else json.loads(f"[{','.join(distinct)}]")
    piece_of = dict(zip(distinct, ObjectPacker().pack_all(values, name), strict=True))
    return [b"" if text is None else piece_of[text] for text in texts]
