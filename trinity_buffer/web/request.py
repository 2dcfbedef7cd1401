"""What a request to the inspector asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.inspector.source import Source
from trinity_buffer.pipeline.store import Store

GREATEST = (1 << 62) - 1
GREATEST_STEP = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Asked:
    """A request about one experiment.

    Attributes:
        source: the experiment, as it is or as it was.
        query: what stands behind the question mark.
        part: the last part of the path where it is a value, such as the number of a step.
    """

    store: Store
    source: Source
    query: Mapping[str, str]
    part: str = ""

    @property
    def name(self) -> str:
        """Of the experiment."""
        return self.source.name

    def text(self, key: str) -> str | None:
        """Return a value of the query; None where it is missing or empty."""
        return self.query.get(key) or None

    def whole(self, key: str, greatest: int = GREATEST_STEP) -> int | None:
        """Return a whole number of the query, None where it is missing.

        Raises:
            InvalidArgumentError: it is not a whole number, or too large.
        """
        text = self.text(key)
        return None if text is None else whole(key, text, greatest)

    def real(self, key: str) -> float | None:
        """Return a number of the query, None where it is missing.

        Raises:
            InvalidArgumentError: it is not a number.
        """
        text = self.text(key)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise InvalidArgumentError(f"{key}={text!r}: it must be a number") from None


TRAIL = 50
"""So many pages back a page knows where each began."""


def turned(asked: Asked, key: str, following: int | None, keep: Sequence[str]) -> dict[str, Any]:
    """Return the queries of the ``previous`` and the ``following`` page, None where there is none.

    Args:
        asked: this page; its ``trail`` says where those before it began.
        key: says where a page begins; the first one has none.
        following: where the next page begins.
        kept: keys that stay.
    """
    here, trail = asked.text(key), [at for at in (asked.text("trail") or "").split(",") if at]
    stay = {name: value for name in keep if (value := asked.text(name)) is not None}

    def query(at: object, before: Sequence[str]) -> dict[str, Any]:
        trail = {"trail": ",".join(before[-TRAIL:])} if before else {}
        return stay | ({} if at is None else {key: at}) | trail

    behind = trail if here is None else [*trail, here]
    return {
        "previous": None if here is None else query(trail[-1] if trail else None, trail[:-1]),
        "following": None if following is None else query(following, behind),
    }


def whole(key: str, text: str, greatest: int = GREATEST_STEP) -> int:
    """Return a whole number, zero or more.

    Raises:
        InvalidArgumentError: it is not a whole number, or above ``greatest``.
    """
    # Few digits, or int() would take seconds for a long text.
    digits = text.isascii() and text.isdigit() and len(text) < 20
    if not digits or int(text) > greatest:
        raise InvalidArgumentError(f"{key}={text[:40]!r}: it must be a whole number")
    return int(text)


Page = tuple[str, dict[str, Any]]
"""The name of a template, and what stands in it."""
View = Callable[[Asked], Awaitable[Page]]
