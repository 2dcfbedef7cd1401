"""The ``trinity-buffer`` command."""

from __future__ import annotations

import sys

import typer

from trinity_buffer.cli import (
    history_commands,
    inspect_commands,
    maintenance_commands,
    run_commands,
)
from trinity_buffer.cli.supervisor import end_with_parent
from trinity_buffer.errors import TrinityBufferError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
run_commands.register(app)
inspect_commands.register(app)
maintenance_commands.register(app)
history_commands.register(app)


def main() -> None:
    """Run the command; our errors are one sentence and exit code 2."""
    end_with_parent()
    try:
        app()
    except TrinityBufferError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
