"""The rows of a data set in a file: JSON, JSONL, Parquet, or what `save_to_disk` wrote."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError, TrinityBufferError
from trinity_buffer.experience import Experience
from trinity_buffer.lazy import extra
from trinity_buffer.pipeline.write.checks import validate


def name_of(path: Path) -> str:
    """Return what a file or folder is called: a file without its ending."""
    return path.name if path.is_dir() else path.stem


_OF_A_ROW = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError)
"""What code raises that expects other fields than a row has."""


class Row(NamedTuple):
    """What stands in one place of a file.

    Attributes:
        number: how many rows come before it, those that are left out among them.
        where: file and line.
        held: its fields.
    """

    number: int
    where: str
    held: dict[str, Any]


class Rows:
    """The rows that an import reads, one after the other.

    Args:
        schema: what is made of them must have.
        skip_bad: leave out a row that cannot be imported. A last line that is torn always is.

    Attributes:
        where: file and line of the row that was read last.
        left_out: where rows were left out, and why.
    """

    def __init__(self, schema: str, *, skip_bad: bool = False) -> None:
        self._schema = schema
        self._skip_bad = skip_bad
        self.where = ""
        self.left_out: list[str] = []

    def of(self, path: Path) -> Iterator[Row]:
        """Yield what stands in ``path``, a file or a folder of files.

        Raises:
            InvalidArgumentError: the file is not there, cannot be read, or has a bad line.
        """
        values = (value for file in _files(path) for value in _read(file))
        for number, (where, value) in enumerate(values):
            if isinstance(value, dict):
                yield Row(number, where, value)
            elif isinstance(value, _NoJSON):
                self._leave_out(f"{where}: {value.why}", always=value.is_torn)
            else:
                self._leave_out(f"{where}: a row must be a JSON object")

    def read(
        self, rows: Iterable[Row], make: Callable[[Row], Iterable[Experience]]
    ) -> Iterator[Experience]:
        """Yield what ``make`` makes of each row, all of it or, if the row is left out, nothing.

        Raises:
            InvalidArgumentError: a field of the row is missing, or is not what it should be; the
                message says where the row stands, and what it holds.
        """
        for row in rows:
            self.where = row.where
            try:
                made = list(make(row))
                for experience in made:
                    validate(experience, self._schema)
            except _OF_A_ROW as error:
                if isinstance(error, TrinityBufferError) and not isinstance(
                    error, InvalidExperienceError
                ):
                    raise
                why = " ".join(
                    (f"{error} is missing" if isinstance(error, KeyError) else str(error)).split()
                )
                fields = ", ".join(f"{name}={short(value)}" for name, value in row.held.items())
                reason = f"{row.where}: this row cannot be imported ({why}): {fields:.500}"
                self._leave_out(reason, cause=error)
            else:
                yield from made

    def _leave_out(
        self, reason: str, *, always: bool = False, cause: Exception | None = None
    ) -> None:
        if not (always or self._skip_bad):
            raise InvalidArgumentError(
                f"{reason}; --skip-bad-lines leaves such rows out"
            ) from cause
        self.left_out.append(reason)


class _NoJSON(NamedTuple):
    """A line that cannot be read; one without an end is what a process wrote as it died."""

    why: str
    is_torn: bool


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise InvalidArgumentError(f"{path}: there is no such file or folder")
    if path.is_dir():
        files = sorted(path.rglob("*"), key=_by_number)
        yield from (file for file in files if file.suffix in READERS and file.is_file())
    elif path.suffix in READERS:
        yield path
    else:
        raise InvalidArgumentError(
            f"{path}: a data set ends in {', '.join(READERS)}, or is a folder"
        )


def _by_number(file: Path) -> tuple[int, str]:
    """Order ``2.jsonl`` before ``10.jsonl``."""
    return (int(file.stem) if file.stem.isdigit() else 0, str(file))


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        yield from READERS[path.suffix](path)
    except ValueError as error:  # not UTF-8, or no file that pyarrow reads
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{path}: it cannot be read ({error})") from None


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, ended in enumerate(file, 1):
            line = ended.removeprefix(BOM_UTF8) if number == 1 else ended
            if line.strip():
                yield f"{path}:{number}", _json(line)


def _json(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        is_torn = not line.endswith(b"\n")
        return _NoJSON(f"no JSON in UTF-8 ({error})" + ", it is torn" * is_torn, is_torn)


def _whole(path: Path) -> Iterator[tuple[str, Any]]:
    if path.name in ("dataset_info.json", "state.json", "dataset_dict.json"):
        return  # of `save_to_disk`, beside the rows
    text = path.read_text(encoding="utf-8-sig")
    try:
        value = json.loads(text)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError) and text.lstrip().startswith("["):
            why = f"{error.msg}: column {error.colno}"
            raise InvalidArgumentError(f"{path}:{error.lineno}: no JSON ({why})") from None
        yield from _lines(path)  # JSON Lines under another name, or its first slip is told
    else:
        yield from _numbered(path, value if isinstance(value, list) else [value])


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    batches = extra("pyarrow.parquet", "parquet").ParquetFile(path).iter_batches()
    return _numbered(path, (row for batch in batches for row in batch.to_pylist()))


def _arrow(path: Path) -> Iterator[tuple[str, Any]]:
    with extra("pyarrow", "parquet").memory_map(str(path)) as file:
        batches = extra("pyarrow.ipc", "parquet").open_stream(file)
        yield from _numbered(path, (row for batch in batches for row in batch.to_pylist()))


def _numbered(path: Path, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file that has no lines."""
    return ((f"{path}, row {number}", value) for number, value in enumerate(values, 1))


READERS = {".jsonl": _lines, ".json": _whole, ".parquet": _parquet, ".arrow": _arrow}
