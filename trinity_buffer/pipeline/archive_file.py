"""Parquet files of what has left the database: a row for each experience, see `archive_columns`.

Files of older versions have a row for each part of a segment; they are read as ever.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from trinity_buffer.errors import InvalidArgumentError, StoreError
from trinity_buffer.identity import FAMILIES
from trinity_buffer.pipeline.archive_columns import (
    CHECKSUM,
    Written,
    columns_for,
    kinds_of,
    segments_in,
    table_of,
)
from trinity_buffer.sizes import sizes
from trinity_buffer.store.transaction import SegmentParts


class ArchiveFile(NamedTuple):
    """A file, and its sha256."""

    path: str
    digest: str


def require_pyarrow() -> None:
    """Return if archives can be written here.

    Raises:
        InvalidArgumentError: pyarrow is not installed.
    """
    if find_spec("pyarrow") is None:  # importing it takes as long as all else that starts a command
        raise InvalidArgumentError(
            "archiving needs pyarrow: pip install 'trinity-buffer[parquet]', or use delete=True"
        )


def write_archive(folder: Path, experiment: str, segments: Sequence[Written]) -> ArchiveFile:
    """Write one file, durably and under a name that its content gives it.

    Who writes at the same time writes a file of their own, or the same bytes under the same name.

    Raises:
        InvalidArgumentError: there can be no such folder, or pyarrow cannot be used.
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
    table = table_of(pyarrow, experiment, segments)
    per_row = max(table.nbytes // table.num_rows, 1)
    group = max(sizes().bytes_per_row_group // per_row, 1)
    temporary = folder / f"{uuid.uuid4().hex}.writing"
    try:
        parquet.write_table(table, temporary, compression="zstd", row_group_size=group)
        return _placed(folder.absolute(), quote(experiment, safe=""), temporary)
    except OSError as error:
        raise StoreError(f"archive folder {folder}: a file cannot be written ({error})") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _placed(folder: Path, experiment: str, temporary: Path) -> ArchiveFile:
    """Give a file that is written the name of its content, durably."""
    with temporary.open("rb") as handle:
        os.fsync(handle.fileno())
    digest = digest_of(temporary)
    path = folder / f"{experiment}-{digest[:16]}.parquet"
    temporary.rename(path)
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
    """Return the parts of some segments, unchecked; a family that a segment lacks is absent.

    Raises:
        StoreError: it cannot be read here; the message says why and what to do.
    """
    if not Path(path).is_file():
        raise StoreError("that file is not there: put it back, or read on the machine that has it")
    try:
        pyarrow, parquet = _parquet()
    except ImportError as error:
        raise StoreError(
            "reading that needs pyarrow: pip install 'trinity-buffer[parquet]'"
        ) from error
    try:
        schema = parquet.read_schema(path)
        read = _parts if "part" in schema.names else _columns
        held, found = read(parquet, path, keys, families)
    except (OSError, KeyError, ValueError, pyarrow.ArrowException) as error:
        raise StoreError(
            f"that file cannot be read ({error}): put a sound copy in its place"
        ) from error
    if missing := set(keys).difference(held):
        raise StoreError(
            f"that file does not hold {min(missing).hex()}: put the one that was written there back"
        )
    return found


def _columns(
    parquet: Any, path: str, keys: Sequence[bytes], families: Sequence[str]
) -> tuple[set[bytes], SegmentParts]:
    """Return which of ``keys`` a file holds, and their parts."""
    schema = parquet.read_schema(path)
    families = [family for family in families if family in FAMILIES]
    columns = columns_for(schema, families)
    rows = parquet.read_table(path, columns=columns, filters=[("segment", "in", list(keys))])
    kinds, found = kinds_of(schema), SegmentParts()
    held = set()
    for key, of_segment in _slices(rows):
        held.add(key)
        for family, blob in segments_in(of_segment, kinds, families):
            recorded = of_segment[CHECKSUM + family][0].as_py()
            found[key, family] = [(0, recorded, blob)]
    return held, found


def _slices(rows: Any) -> Iterator[tuple[bytes, Any]]:
    """Yield (key, rows) of the segments in a table."""
    start = 0
    for key, some in groupby(rows["segment"].to_pylist()):
        count = len(list(some))
        yield key, rows.slice(start, count)
        start += count


def _parts(
    parquet: Any, path: str, keys: Sequence[bytes], families: Sequence[str]
) -> tuple[set[bytes], SegmentParts]:
    """Do as `_columns`, of a file of parts."""
    of_keys, of_families = ("segment", "in", list(keys)), ("family", "in", list(families))
    held = parquet.read_table(path, columns=["segment"], filters=[of_keys])["segment"]
    found: SegmentParts = {}
    for row in parquet.read_table(path, filters=[of_keys, of_families]).to_pylist():
        part = (row["part"], row["checksum"], row["data"])
        found.setdefault((row["segment"], row["family"]), []).append(part)
    return set(held.to_pylist()), found


def _parquet() -> tuple[Any, Any]:
    """Return pyarrow and its Parquet module; ImportError where the extra is not installed."""
    import pyarrow  # noqa: PLC0415 - an optional extra
    from pyarrow import parquet  # noqa: PLC0415 - an optional extra

    return pyarrow, parquet
