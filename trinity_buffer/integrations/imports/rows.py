"""The rows of a data set in a file, and their texts and conversations as token ids.

A file is JSON, JSONL, Parquet, or what `save_to_disk` wrote; the user names the tokenizer.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError, TrinityBufferError
from trinity_buffer.experience import Experience
from trinity_buffer.explorer.conversation import as_texts, rendered
from trinity_buffer.explorer.local_model import load_tokenizer, prompt_ids
from trinity_buffer.lazy import extra
from trinity_buffer.pipeline.write.batch import validate


def name_of(path: Path) -> str:
    """Return the name of a file or folder, of a file without its ending."""
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
        columns: what is read of a row; empty: what it holds is for the format to choose.

    Attributes:
        where: file and line of the row that was read last.
        left_out: where rows were left out, and why.
        unread: names of columns that rows have beside ``columns``.
    """

    def __init__(self, schema: str, *, skip_bad: bool = False, columns: Sequence[str] = ()) -> None:
        self._schema = schema
        self._skip_bad = skip_bad
        self.where = ""
        self.left_out: list[str] = []
        self._columns = columns
        self.unread = set[str]()

    def of(self, path: Path) -> Iterator[Row]:
        """Yield what stands in ``path``, a file or a folder of files.

        Raises:
            InvalidArgumentError: the file is not there, cannot be read, or has a bad line.
        """
        for number, (where, value) in enumerate(_values(path)):
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
                of_row = isinstance(error, InvalidExperienceError)
                if isinstance(error, TrinityBufferError) and not of_row:
                    raise
                text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                why = " ".join(text.split())
                fields = ", ".join(f"{name}={short(value)}" for name, value in row.held.items())
                reason = f"{row.where}: this row cannot be imported ({why}): {fields:.500}"
                self._leave_out(reason, cause=error)
            else:
                if self._columns:
                    self.unread |= {n for n, value in row.held.items() if value is not None}
                    self.unread.difference_update(self._columns, MEDIA)
                yield from made

    def _leave_out(self, why: str, *, always: bool = False, cause: Exception | None = None) -> None:
        if not (always or self._skip_bad):
            raise InvalidArgumentError(f"{why}; --skip-bad-lines leaves such rows out") from cause
        self.left_out.append(why)


class _NoJSON(NamedTuple):
    """A line that cannot be read; one without an end is what a process wrote as it died."""

    why: str
    is_torn: bool


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield where each row stands in a file, or in the files of a folder, and what it is."""
    if not path.exists():
        raise InvalidArgumentError(f"{path}: there is no such file or folder")
    files, splits = [path], path / "dataset_dict.json"
    if splits.is_file():  # of `save_to_disk`: rows to test on must not be trained
        try:
            names = list(json.loads(splits.read_text())["splits"])
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidArgumentError(f"{splits}: it cannot be read ({error})") from None
        if len(names) > 1:
            raise InvalidArgumentError(
                f"{path} holds the splits {', '.join(names)}: name one of them: {path / names[0]}"
            )
    if path.is_dir():
        files = _files_in(path)
    elif path.suffix not in READERS:
        raise InvalidArgumentError(f"{path}: data sets end in {', '.join(READERS)} or are folders")
    # ``2.jsonl`` comes before ``10.jsonl``.
    for file in sorted(files, key=lambda f: (int(f.stem) if f.stem.isdigit() else 0, str(f))):
        try:
            yield from READERS[file.suffix](file)
        except InvalidArgumentError:
            raise
        except (ValueError, RecursionError) as error:  # such as not UTF-8, or no Parquet
            raise InvalidArgumentError(f"{file}: it cannot be read ({error})") from None


_SPLIT = re.compile(r"(?:^|[-_.])(train|test|valid|validation|val|dev|eval)(?![a-z])")
"""The split in the names of files and folders, as the Hub and its cache have them."""


PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")


def _files_in(folder: Path) -> list[Path]:
    """Return the files of rows in ``folder``.

    Raises:
        InvalidArgumentError: some are packed, or some are to train on and others to test on.
    """
    every = [file for file in folder.rglob("*") if file.is_file()]
    # `map` and `filter` leave theirs beside those of `save_to_disk`.
    files = [f for f in every if f.suffix in READERS and not f.match("cache-*.arrow")]
    for file in every:  # zstd leaves what it unpacks
        rows = file.with_suffix("")
        if file.suffix in PACKED and rows.suffix in READERS and rows not in files:
            raise InvalidArgumentError(f"{file} is packed: unpack it, or its rows are missing")
    parts = {part for file in files for part in file.relative_to(folder).parts}
    names = sorted({match[1] for part in parts if (match := _SPLIT.search(part))})
    if "train" in names and len(names) > 1:
        raise InvalidArgumentError(
            f"{folder} holds files of the splits {', '.join(names)}: name a file, or a folder that "
            "holds those of one split"
        )
    return files


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
    return _numbered(path, (_given(row) for batch in batches for row in batch.to_pylist()))


def _arrow(path: Path) -> Iterator[tuple[str, Any]]:
    with extra("pyarrow", "parquet").memory_map(str(path)) as file:
        batches = extra("pyarrow.ipc", "parquet").open_stream(file)
        yield from _numbered(path, (_given(row) for batch in batches for row in batch.to_pylist()))


def _given(value: Any) -> Any:
    """Return ``value`` of an Arrow table without the nulls that it puts for keys of other rows.

    A chat template would write them into tools and the arguments of calls.
    """
    if isinstance(value, list):
        return [_given(item) for item in value]
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return value


def _numbered(path: Path, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file that has no lines."""
    return ((f"{path}, row {number}", value) for number, value in enumerate(values, 1))


READERS = {".jsonl": _lines, ".json": _whole, ".parquet": _parquet, ".arrow": _arrow}


MEDIA = ("image", "images", "video", "videos", "audio", "audios", "multi_modal_inputs")
"""Columns of data sets beside messages, of which tokens hold nothing."""

Fields = Mapping[str, Any]
"""Of a message, or of a row."""

Said = str | Sequence[Fields]
"""A text, or the messages of a conversation."""


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a row of a data set, in the column that TRL names.

    Raises:
        InvalidExperienceError: it holds pictures, sounds or films.
    """
    media = [name for name in MEDIA if row.get(name)]
    if media:
        raise InvalidExperienceError(
            f"it has {media[0]}, and texts alone are read: a model would be trained without them"
        )
    tools = row.get("tools")
    return (json.loads(tools) if isinstance(tools, str) and tools else tools) or None


class Texts:
    """A tokenizer of transformers; None where the files hold tokens themselves.

    What is tokenised here may have been sampled as other tokens: no log-probability goes with it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @cached_property
    def _tokenizer(self) -> Any:
        if self._folder is None:
            raise InvalidArgumentError("these files hold texts, no tokens: give --tokenizer FOLDER")
        if not self._folder.is_dir():  # or it would be looked for on the Hub, for a minute
            raise InvalidArgumentError(f"--tokenizer {self._folder}: there is no such folder")
        return load_tokenizer(self._folder)

    def prompt(self, messages: Said, row: Fields) -> list[int]:
        """Return the tokens of a prompt; of messages, up to where the answer begins.

        Args:
            row: what the chat template is given beside messages, in the columns that TRL names.

        Raises:
            InvalidExperienceError: a message holds more than texts.
        """
        if isinstance(messages, str):
            return prompt_ids(self._tokenizer, messages)
        return self._chat(messages, row, ask=True)

    def answer(self, prompt: Said, answered: Said, row: Fields) -> list[int]:
        """Return the tokens of an answer to ``prompt``, with the one that ends it.

        A text that the row calls truncated was cut off before that one.

        Raises:
            InvalidExperienceError: the chat template changes the prompt once it is answered, or a
                message holds more than texts, is not of the assistant, says nothing, or calls tools
                that the template does not write.
        """
        if isinstance(answered, str):
            if not isinstance(prompt, str):
                answered = [{"role": "assistant", "content": answered}]
            else:
                ids, end = self._behind(answered), self._tokenizer.eos_token_id
                is_cut = row.get("truncate_status") == "response_truncated"
                return ids if is_cut or end is None or ids[-1:] == [end] else [*ids, end]
        # All of them a model's: every token of an answer is trained.
        for message in _messages(answered):
            if message.get("role") != "assistant":
                raise InvalidExperienceError(
                    f"the answer has a message of role {message.get('role')!r:.40}, which would be "
                    "trained as if the model had said it: an answer has messages of role "
                    "'assistant'"
                )
            if message.get("content") is None and not message.get("tool_calls"):
                raise InvalidExperienceError(
                    "a message of the assistant has neither content nor tool_calls: nothing but "
                    "its end would be trained"
                )
        asked = [] if isinstance(prompt, str) else prompt
        before = self.prompt(prompt, row)
        whole = self._chat([*asked, *answered], row, ask=False)
        if whole[: len(before)] != before:
            raise InvalidExperienceError(
                "the chat template writes the prompt otherwise once it is answered: its answer has "
                "no tokens of its own"
            )
        mute = [{k: v for k, v in m.items() if k != "tool_calls"} for m in answered]
        calls = any(message.get("tool_calls") for message in answered)
        if calls and self._is_written(whole, [*asked, *mute], row):
            raise InvalidExperienceError(
                "the chat template writes no tool calls: the model would be trained to say all but "
                "those of the answer. Take a tokenizer with a template that writes them"
            )
        return whole[len(before) :]

    def _is_written(self, tokens: list[int], messages: Sequence[Fields], row: Fields) -> bool:
        """Return whether the chat template makes ``tokens`` of messages; it may refuse them."""
        try:
            return self._chat(messages, row, ask=False) == tokens
        except InvalidExperienceError:
            return False

    def turn(self, prompt: Said, answered: Said, row: Fields) -> dict[str, Any]:
        """Return fields of an experience: the tokens of a prompt with its answer, texts, tools."""
        before = self.prompt(prompt, row)
        return {
            "tokens": before + self.answer(prompt, answered, row),
            "prompt_length": len(before),
            "prompt_text": prompt if isinstance(prompt, str) else None,
            "response_text": answered if isinstance(answered, str) else None,
            "tools": tools_of(row),
        }

    def _text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _behind(self, text: str) -> list[int]:
        """Return the tokens of a text behind another; some tokenizers begin texts with a blank."""
        line, ids = self._text("\n"), self._text(f"\n{text}")
        return ids[len(line) :] if ids[: len(line)] == line else self._text(text)

    def _chat(self, messages: Sequence[Fields], row: Fields, *, ask: bool) -> list[int]:
        messages, options = _messages(messages), row.get("chat_template_kwargs") or {}
        tokenizer = self._tokenizer  # without one, no row can be imported
        try:
            text = rendered(tokenizer, messages, tools_of(row) or (), ask=ask, **options)
        except InvalidArgumentError as error:  # of this row
            raise InvalidExperienceError(str(error)) from error
        return self._text(text)


def only_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a row as texts, by `as_texts`.

    Raises:
        InvalidExperienceError: one of them holds more than texts.
    """
    try:
        return as_texts(messages)
    except InvalidArgumentError as error:
        raise InvalidExperienceError(str(error)) from error


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise TypeError(f"neither a text nor a list of messages: {value!r:.50}")
    return [dict(message) for message in value]
