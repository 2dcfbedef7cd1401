"""How commands print: tables for people, JSON for programs, progress where somebody watches."""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from trinity_buffer.cli.escaping import escaped, escaped_in_json, one_line
from trinity_buffer.inspector.output import strict_json

Report = Callable[[str, int, int], None]

PLAIN_WIDTH = 1000
"""Of lines that go into a file or a pipe: nobody cuts or wraps them there."""


class Terminal(Console):
    """Where everything for people is printed: what a rollout says is shown, never obeyed."""

    @override
    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(escaped(text), **style)


def console() -> Terminal:
    """Return where results are printed; lines are not wrapped where nobody watches."""
    watched = sys.stdout.isatty()
    width = None if watched else PLAIN_WIDTH
    return Terminal(width=width, highlight=False, emoji=False, soft_wrap=not watched)


def as_json(value: Any) -> str:
    """Return a result as one line of JSON; bytes are written as hexadecimal digits.

    Null stands for NaN and infinity. What a terminal would obey is escaped as JSON does it: who
    parses the line reads the same text.
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
    """Print one line of JSON for each value, each as soon as it is there."""
    is_unicode = codecs.lookup(sys.stdout.encoding or "utf-8").name.startswith("utf")
    for value in values:
        line = as_json(value)
        # Where the locale has no room for a character, the stream would write no JSON.
        sys.stdout.write(f"{line if is_unicode else json.dumps(json.loads(line))}\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return a table; numbers are set to the right."""
    found = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        numbers = all(isinstance(row[index], int | float) or row[index] is None for row in rows)
        side: JustifyMethod = "right" if numbers and rows else "left"
        found.add_column(column, justify=side, no_wrap=column == "uid")  # nobody can type half
    for row in rows:
        found.add_row(*(escape(shown(cell)) for cell in row))
    return found


def shown(value: Any) -> str:
    """Return a value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}"
    if isinstance(value, Mapping):
        return one_line(", ".join(f"{key} {count}" for key, count in value.items())) or "-"
    return one_line(str(value))


def end_if_damaged(rows: Sequence[object]) -> None:
    """Tell of the rows that could not be read, if there are any, and end with exit code 1."""
    for row in rows:
        sys.stderr.write(f"error: {one_line(str(row))}\n")
    if rows:
        raise typer.Exit(1)


def time_of(seconds: float | None) -> str:
    """Return a time since 1970 as people read it, in UTC."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def size_of(count: int) -> str:
    """Return a number of bytes as people read it."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


@contextmanager
def progress() -> Iterator[Report]:
    """Show progress on a terminal, and nothing elsewhere.

    It goes to standard error, so that what is printed can be read by a program.
    """
    screen = Terminal(stderr=True)
    if not screen.is_terminal:
        yield lambda _what, _done, _total: None
        return
    columns = (TextColumn("{task.description:<8}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bars:
        known: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=total)
            bars.update(known[what], completed=done, total=total)

        yield report
