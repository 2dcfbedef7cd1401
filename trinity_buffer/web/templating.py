"""What all pages share: templates that escape, and how numbers and times are written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any
from urllib.parse import quote, unquote

from jinja2 import Environment, PackageLoader, StrictUndefined

from trinity_buffer.inspector.output import time_of, writable

# Percent-encoding leaves dots as they are, and browsers resolve them before they ask.
_DOTS = {".": "!.", "..": "!.."}
"""Names that a browser takes as a way up, and their parts of a path, which no other name has."""


@cache
def templates() -> Environment:
    """Return the templates of this package; whatever is put into one stays text."""
    # Autoescape: what a rollout says is never markup of ours.
    loader = PackageLoader("trinity_buffer.web")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    made.filters |= {"number": number, "segment": segment, "cut": cut, "own_name": own_name}
    made.filters["time"] = partial(time_of, unknown="–")
    return made


def rendered(template: str, shown: Mapping[str, Any]) -> str:
    """Return a page that UTF-8 can write."""
    return writable(templates().get_template(template).render(shown))


def number(value: Any) -> str:
    """Return a number as people read it."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def own_name(guest: str) -> str:
    """Return how a trainer is called in its own experiment, of one called EXPERIMENT/TRAINER."""
    return unquote(guest.rpartition("/")[2])


def segment(name: str) -> str:
    """Return a name as one part of a path."""
    return _DOTS.get(name) or quote(name, safe="")


def named(part: str) -> str:
    """Return the name that a part of a path stands for."""
    return next((name for name, known in _DOTS.items() if part == known), unquote(part))


def cut(text: Any, length: int) -> str:
    """Return the beginning of a text, and how long it is."""
    whole = str(text)
    return whole if len(whole) <= length else f"{whole[:length]} … {len(whole)} characters"
