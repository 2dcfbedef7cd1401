"""The rows of a data set in a file: JSON, JSONL, Parquet, or what `save_to_disk` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short
from typing import Any

from trinity_buffer.errors import (
    InvalidArgumentError,
    InvalidExperienceError,
    TrinityBufferError,
)
from trinity_buffer.extras import extra


def name_of(path: Path) -> str:
    """Return what a file or folder is called: a file without its ending."""
    return path.name if path.is_dir() else path.stem


@contextmanager
def reading(where: str, row: dict[str, Any]) -> Iterator[None]:
    """Let an error in the reading of one row say where the row stands, and what it holds.

    Raises:
        InvalidArgumentError: a field of the row is missing, or is not what it should be.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        if isinstance(error, TrinityBufferError) and not isinstance(error, InvalidExperienceError):
            raise
        why = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        held = ", ".join(f"{name}={short(value)}" for name, value in row.items())
        raise InvalidArgumentError(
            f"{where}: this row cannot be imported ({why}): {held:.500}"
        ) from error


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each row stands, as ``file:line``, and what it holds.

    Raises:
        InvalidArgumentError: the file is not there, or a line is no JSON object.
    """
    if not path.exists():
        raise InvalidArgumentError(f"{path}: there is no such file or folder")
    if path.is_dir():
        for file in sorted(path.rglob("*"), key=_by_number):
            if file.suffix in READERS:
                yield from rows(file)
        return
    if path.suffix not in READERS:
        raise InvalidArgumentError(
            f"{path}: a data set ends in {', '.join(READERS)}, or is a folder"
        )
    for number, row in enumerate(_read(path), 1):
        if not isinstance(row, dict):
            raise InvalidArgumentError(f"{path}:{number}: a row must be a JSON object")
        yield f"{path.name}:{number}", row


def _read(path: Path) -> Iterator[Any]:
    try:
        yield from READERS[path.suffix](path)
    except ValueError as error:  # not UTF-8, or what pyarrow says of a file that is none of its own
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{path}: it cannot be read ({error})") from None


def _by_number(file: Path) -> tuple[int, str]:
    """Order ``2.jsonl`` before ``10.jsonl``."""
    return (int(file.stem) if file.stem.isdigit() else 0, str(file))


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InvalidArgumentError(f"{path}:{number}: no JSON ({error})") from None


def _whole(path: Path) -> Iterator[Any]:
    if path.name in ("dataset_info.json", "state.json", "dataset_dict.json"):
        return  # of `save_to_disk`, beside the rows
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except ValueError:
        yield from _lines(path)  # JSON Lines under another name, or its first slip is told
    else:
        yield from found if isinstance(found, list) else [found]


def _parquet(path: Path) -> Iterator[Any]:
    for batch in extra("pyarrow.parquet", "parquet").ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _arrow(path: Path) -> Iterator[Any]:
    with extra("pyarrow", "parquet").memory_map(str(path)) as file:
        for batch in extra("pyarrow.ipc", "parquet").open_stream(file):
            yield from batch.to_pylist()


READERS = {".jsonl": _lines, ".json": _whole, ".parquet": _parquet, ".arrow": _arrow}
