"""What all pages share: templates that escape, and how numbers and times are written."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def templates() -> Environment:
    """Return the templates of this package; whatever is put into one stays text."""
    made = Environment(
        loader=PackageLoader("trinity_buffer.web"), autoescape=True, undefined=StrictUndefined
    )
    made.filters |= {"number": number, "time": time_of, "segment": segment, "cut": cut}
    return made


def number(value: Any) -> str:
    """Return a number as people read it."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def time_of(seconds: float | None) -> str:
    """Return a time since 1970 as people read it, in UTC."""
    if seconds is None:
        return "–"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def segment(name: str) -> str:
    """Return a name as one part of a path."""
    return quote(name, safe="")


def cut(text: Any, length: int) -> str:
    """Return the beginning of a text, and how long it is."""
    whole = str(text)
    return whole if len(whole) <= length else f"{whole[:length]} … {len(whole)} characters"
