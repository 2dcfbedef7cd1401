"""Stored values as files and pages hold them: strict JSON, texts that UTF-8 can write, times."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


def writable(text: str) -> str:
    """Return a text with U+FFFD in place of each lone surrogate, which UTF-8 cannot write."""
    return text if text.isascii() else _LONE_SURROGATES.sub("\ufffd", text)


def strict_json(value: Any, default: Callable[[Any], Any]) -> str:
    """Return a value as JSON, null in place of NaN and infinity, which JSON has not.

    Args:
        value: to write.
        default: returns what is written in place of a value that JSON does not have.
    """
    # Encoded as it is first: most values hold no NaN, and then one pass is enough.
    coder = json.JSONEncoder(default=default, ensure_ascii=False)
    text = coder.encode(value)
    if "NaN" in text or "Infinity" in text:  # in a string too, but then nothing changes below
        text = coder.encode(json.loads(text, parse_constant=lambda _: None))
    return text


def time_of(seconds: float | None, unknown: str = "-") -> str:
    """Return seconds since 1970 as a date and time in UTC."""
    if seconds is None:
        return unknown
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError):  # a flipped bit makes such a time, and `verify` names it
        return unknown
