"""Segments that have left the database, in Parquet files: a row for each part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from trinity_buffer.errors import InvalidArgumentError, StoreError
from trinity_buffer.sizes import sizes

SegmentParts: TypeAlias = dict[tuple[bytes, str], list[tuple[int, int, bytes]]]
"""(key, family) -> its parts as (part, checksum, data), as they lie in the database."""


def require_pyarrow() -> None:
    """Return if archives can be written here.

    Raises:
        InvalidArgumentError: pyarrow is not installed.
    """
    try:
        _parquet()
    except ImportError as error:
        raise InvalidArgumentError(
            "archiving needs pyarrow: pip install 'trinity-buffer[parquet]', or use delete=True"
        ) from error


def write_archive(folder: Path, experiment: str, stored: SegmentParts) -> str:
    """Write one file, durably and under a name that its content gives it; return its path."""
    pyarrow, parquet = _parquet()
    rows = [
        {"experiment": experiment, "segment": key, "family": family, "part": part}
        | {"checksum": checksum, "data": data}
        for (key, family), parts in sorted(stored.items())
        for part, checksum, data in parts
    ]
    name = hashlib.blake2b(b"".join(sorted({key for key, _ in stored})), digest_size=8).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"archive folder {folder}: {error.strerror}") from error
    path = (folder / f"{quote(experiment, safe='')}-{name}.parquet").absolute()
    temporary = path.with_suffix(".writing")
    table = pyarrow.Table.from_pylist(rows)
    group = sizes().parts_per_row_group
    parquet.write_table(table, temporary, compression="zstd", row_group_size=group)
    with temporary.open("rb") as handle:
        os.fsync(handle.fileno())
    temporary.rename(path)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return str(path)


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
        of_keys = ("segment", "in", list(keys))
        of_families = ("family", "in", list(families))
        held = parquet.read_table(path, columns=["segment"], filters=[of_keys])["segment"]
        filters = [of_keys, of_families]
        rows = parquet.read_table(path, filters=filters).to_pylist() if families else []
    except (OSError, pyarrow.ArrowException) as error:
        raise StoreError(
            f"that file cannot be read ({error}): put a sound copy in its place"
        ) from error
    if missing := set(keys).difference(held.to_pylist()):
        raise StoreError(
            f"that file does not hold {min(missing).hex()}: put the one that was written there back"
        )
    found: SegmentParts = {}
    for row in rows:
        part = (row["part"], row["checksum"], row["data"])
        found.setdefault((row["segment"], row["family"]), []).append(part)
    return found


def _parquet() -> tuple[Any, Any]:
    """Return pyarrow and its Parquet module; ImportError where the extra is not installed."""
    import pyarrow  # noqa: PLC0415 - an optional extra
    from pyarrow import parquet  # noqa: PLC0415 - an optional extra

    return pyarrow, parquet
