"""What the command does with log records of this package: nothing, unless the environment asks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from typing_extensions import override

from trinity_buffer.cli.escaping import escaped, one_line
from trinity_buffer.errors import InvalidArgumentError

FORMAT, LEVEL = "TRINITY_BUFFER_LOG_FORMAT", "TRINITY_BUFFER_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class JSONFormatter(logging.Formatter):
    """Makes one line of JSON of each record: time, level, logger, process, message, and error."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told)


class TextFormatter(logging.Formatter):
    """Makes text for people of each record, which orders no terminal about.

    A message is one line, so that nobody's name can pretend to be another record.
    """

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, without the error that may follow it."""
        return one_line(super().formatMessage(record))

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Return the text."""
        return escaped(super().format(record))


def set_up(environment: Mapping[str, str]) -> None:
    """Let the loggers of this package, and no others, write to standard error as is asked for.

    The root logger stays as it is. Where neither variable is set, nothing changes: Python prints
    the warnings of who set up nothing.

    Raises:
        InvalidArgumentError: a variable says what it cannot mean.
    """
    form, said = environment.get(FORMAT, ""), environment.get(LEVEL, "")
    level = said.upper()
    if form not in {"", "text", "json"}:
        raise InvalidArgumentError(f"{FORMAT}={form!r}: it is text or json")
    if level not in {"", *LEVELS}:
        raise InvalidArgumentError(f"{LEVEL}={said!r}: it is one of {', '.join(LEVELS)}")
    if not form and not level:
        return
    handler = logging.StreamHandler()
    text = TextFormatter("%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JSONFormatter() if form == "json" else text)
    logger = logging.getLogger("trinity_buffer")
    logger.addHandler(handler)
    logger.setLevel(level or "WARNING")
    logger.propagate = False
