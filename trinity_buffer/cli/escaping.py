"""Escape what a terminal would obey, in all that is printed and logged. Quick to import."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that control a terminal or hide or reorder others; all but tab and line feed."""

_ESCAPES = re.compile(r"\\(?:[nrt\\]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def escaped(text: str) -> str:
    """Return ``text`` with escapes in place of control characters."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escaped_in_json(text: str) -> str:
    """Return a line of JSON with JSON's own escapes: parsing it gives the same text."""
    # json.dumps leaves DEL as it is.
    escapes = {"\x7f": "\\u007f"}
    return _CONTROLS.sub(lambda match: escapes.get(match[0]) or json.dumps(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return ``text`` escaped, line feeds and tabs too, so that it cannot fake a line of ours."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def unescaped(text: str) -> str:
    """Return the text that `one_line` escaped."""
    return _ESCAPES.sub(lambda match: match[0].encode().decode("unicode_escape"), text)


FORMAT, LEVEL = "TRINITY_BUFFER_LOG_FORMAT", "TRINITY_BUFFER_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class JSONFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, process, message, and error."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TextFormatter(logging.Formatter):
    """Formats a record as escaped text; its message is one line, so that it cannot fake another."""

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, without the error that may follow it."""
        return one_line(super().formatMessage(record))

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Return the text."""
        return escaped(super().format(record))


def set_up_logs(environment: Mapping[str, str]) -> None:
    """Let this package's loggers write to standard error as the environment asks.

    The root logger stays as it is. If neither variable is set nothing changes, and Python prints
    warnings as it does without any set-up.

    Raises:
        InvalidArgumentError: a variable has an unknown value.
    """
    form, named_level = environment.get(FORMAT, ""), environment.get(LEVEL, "")
    level = named_level.upper()
    if form not in {"", "text", "json"}:
        raise InvalidArgumentError(f"{FORMAT}={form!r}: it is text or json")
    if level not in {"", *LEVELS}:
        raise InvalidArgumentError(f"{LEVEL}={named_level!r}: it is one of {', '.join(LEVELS)}")
    if not form and not level:
        return
    handler = logging.StreamHandler()
    text = TextFormatter("%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JSONFormatter() if form == "json" else text)
    logger = logging.getLogger("trinity_buffer")
    logger.addHandler(handler)
    logger.setLevel(level or "WARNING")
    logger.propagate = False
