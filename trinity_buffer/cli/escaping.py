"""What a terminal would obey, spelled out. Whatever is printed goes through here."""

from __future__ import annotations

import json
import re

_ORDERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that a terminal obeys, or that change how others are read; not tab and line feed."""

_ESCAPES = re.compile(r"\\(?:[nrt\\]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def escaped(text: str) -> str:
    """Return ``text`` with everything spelled out that a terminal would obey."""
    return _ORDERS.sub(_spelled, text)


def escaped_in_json(text: str) -> str:
    """Return a line of JSON escaped as JSON does it: who parses it reads the same text."""
    return _ORDERS.sub(_spelled_in_json, text)


def one_line(text: str) -> str:
    """Return ``text`` escaped, line feeds and tabs too: nobody's name begins a line of ours."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def unescaped(text: str) -> str:
    """Return what `one_line` spelled out."""
    return _ESCAPES.sub(lambda found: found[0].encode().decode("unicode_escape"), text)


def _spelled(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _spelled_in_json(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1] if found[0] != "\x7f" else "\\u007f"
