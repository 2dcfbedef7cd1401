"""How a command runs: Ctrl-C leaves no traceback."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import typer

INTERRUPTED = 130


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run a command to its end; Ctrl-C ends it without a traceback."""
    try:
        return anyio.run(main)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
