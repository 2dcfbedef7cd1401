"""How commands print: tables for people, JSON for programs, progress on a terminal."""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

import typer
from rich.console import Console, JustifyMethod, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from trinity_buffer.cli.escaping import escaped, escaped_in_json, one_line
from trinity_buffer.inspector.output import strict_json
from trinity_buffer.inspector.output import time_of as time_of

Report = Callable[[str, int, int], None]

PLAIN_WIDTH = 1000
"""Width for output into a file or a pipe, so that tables are neither cut nor wrapped."""


class Terminal(Console):
    """A console that shows control characters of stored texts instead of obeying them."""

    @override
    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(escaped(text), **style)


def console() -> Terminal:
    """Return where results are printed; lines are wrapped on a terminal only."""
    watched = sys.stdout.isatty()
    width = None if watched else PLAIN_WIDTH
    return Terminal(width=width, highlight=False, emoji=False, soft_wrap=not watched)


def say(*lines: str) -> None:
    """Print each of ``lines`` for people, line feeds escaped."""
    # Not by rich, which takes a millisecond a line.
    for line in lines:
        sys.stdout.write(f"{one_line(line)}\n")
    sys.stdout.flush()


def as_json(value: Any) -> str:
    """Return a result as one line of JSON; bytes are written as hexadecimal digits.

    NaN and infinity become null. Control characters are escaped as JSON does it: parsing the line
    gives the same text.
    """
    return escaped_in_json(strict_json(value, _plain))


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, bytes):
        return value.hex()
    tolist = getattr(value, "tolist", None)  # of NumPy's scalars and arrays
    return tolist() if callable(tolist) else str(value)


def print_json(*values: Any) -> None:
    """Print one line of JSON for each value, and flush: a reader sees it at once."""
    is_unicode = codecs.lookup(sys.stdout.encoding or "utf-8").name.startswith("utf")
    for value in values:
        line = as_json(value)
        # A stream that cannot encode a character would write a backslash escape, which is no JSON.
        sys.stdout.write(f"{line if is_unicode else json.dumps(json.loads(line))}\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return a table; columns of numbers are aligned to the right."""
    title = escape(title)
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        numbers = all(isinstance(row[index], int | float) or row[index] is None for row in rows)
        side: JustifyMethod = "right" if numbers and rows else "left"
        # A uid is for copying into the next command, so it must stay in one piece.
        made.add_column(escape(column), justify=side, no_wrap=column == "uid")
    for row in rows:
        made.add_row(*(escape(shown(cell)) for cell in row))
    return made


def table_of(title: str, columns: str, items: Iterable[object]) -> Table:
    """Return a table of attributes, a row for each item.

    Args:
        columns: separated by commas: an attribute, or ``title=attribute``; the attribute of one is
            ``counts.ready``, and a key of a table ``metrics.loss``.
    """
    titles, _, paths = zip(*(column.partition("=") for column in columns.split(", ")), strict=True)
    chosen = [path or title for title, path in zip(titles, paths, strict=True)]
    return table(title, titles, [[_value_at(path, item) for path in chosen] for item in items])


def _value_at(path: str, item: Any) -> Any:
    for name in path.split("."):
        item = item.get(name) if isinstance(item, Mapping) else getattr(item, name)
    return time_of(item) if path.endswith("_at") else item


def shown(value: Any) -> str:
    """Return a value as text for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}"
    if isinstance(value, Mapping):
        return one_line(", ".join(f"{key} {count}" for key, count in value.items())) or "-"
    return one_line(str(value))


Lines = Iterable[str | RenderableType]
"""What is printed for people: a text is one line, anything else is printed as rich does."""


class Answer(NamedTuple):
    """What a command prints, and whether it failed.

    Attributes:
        value: printed with --json; of a list, each item on a line of its own.
        text: what is printed without --json, or makes it; a text is one line; None: the value, as
            JSON.
        errors: such as rows that could not be read; they are printed to standard error.
        failed: end with exit code 1, as with an error.
        soft_wrap: leave it to the terminal to wrap lines.
    """

    value: Any
    text: str | Iterable[str | RenderableType] | Callable[[], Lines] | None = None
    errors: Sequence[object] = ()
    failed: bool = False
    soft_wrap: bool | None = None


def print_answer(answer: Answer | str, *, as_json: bool) -> None:
    """Print what a command answers, and end with exit code 1 if it failed."""
    if isinstance(answer, str):
        answer = Answer(answer, answer)
    if as_json or answer.text is None:
        print_json(*(answer.value if isinstance(answer.value, list) else [answer.value]))
    elif isinstance(answer.text, str):
        say(answer.text)
    else:
        for item in answer.text() if callable(answer.text) else answer.text:
            if isinstance(item, str):
                say(item)
            else:  # the markup of a table is its own, and its cells are escaped
                console().print(item, soft_wrap=answer.soft_wrap)
    for error in answer.errors:
        sys.stderr.write(f"error: {one_line(str(error))}\n")
    if answer.failed or answer.errors:
        raise typer.Exit(1)


def verbatim(text: str) -> Text:
    """Return a stored text with its line feeds, and with escapes in place of other controls."""
    return Text(escaped(text))


def size_of(count: int) -> str:
    """Return a number of bytes with its unit."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


@contextmanager
def progress() -> Iterator[Report]:
    """Show progress on a terminal, and nothing elsewhere.

    It goes to standard error: standard output may be piped into a program.
    """
    screen = Terminal(stderr=True)
    if not screen.is_terminal:
        yield lambda _what, _done, _total: None
        return
    columns = (TextColumn("{task.description:<8}"), BarColumn(), TimeRemainingColumn())
    # What is piped must not follow the progress to standard error.
    redirect = sys.stdout.isatty()
    with Progress(*columns, console=screen, transient=True, redirect_stdout=redirect) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
