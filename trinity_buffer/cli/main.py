"""The ``trinity-buffer`` command."""

from __future__ import annotations

import codecs
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from trinity_buffer import __version__
from trinity_buffer.cli.commands import CommandTable
from trinity_buffer.cli.escaping import escaped
from trinity_buffer.cli.logs import set_up as set_up_logs
from trinity_buffer.cli.supervisor import end_with_parent, exit_code_of
from trinity_buffer.errors import TrinityBufferError
from trinity_buffer.own_code import own_code

# Help is plain text: a formatted one would take twice as long to start as all else that it needs.
app = typer.Typer(
    cls=CommandTable,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trinity-buffer {__version__}")
        raise typer.Exit


@app.callback()
def trinity_buffer(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Say the version, and end."
        ),
    ] = False,
) -> None:
    """Know what every gradient step was trained on: an experience store for post-training.

    `trinity-buffer COMMAND --help` shows the options of a command, and an example.
    """


def run_command() -> None:
    """Run the command; our errors are one sentence, and exit code 1 (failed), 2 (refused) or 3.

    3 is that of a run in which nothing moves any more (`RunStalledError`).

    So are those of the system (a full disk, a folder that may not be written), and those of the
    user's own code.
    """
    try:
        set_up_logs(os.environ)
        with own_code():
            app()
    except TrinityBufferError as error:
        told = "; ".join([str(error), *getattr(error, "__notes__", [])])
        sys.stderr.write(f"error: {escaped(told)}\n")
        raise SystemExit(exit_code_of(error)) from None
    except OSError as error:
        sys.stderr.write(f"error: {escaped(str(error))}\n")
        raise SystemExit(1) from None


def _open_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr an empty one.

    Else the next file that is opened takes its number, and whatever is printed goes there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):  # a terminal of ASCII is no reason to end a run
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _speak_utf_8() -> None:
    """Begin again in Python's UTF-8 mode where the locale has no room for anybody's words.

    Python does so by itself in the locales C and POSIX, unless it is told not to. Names of files,
    arguments and output would each fail in a way of their own.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii":
        os.environ["PYTHONUTF8"] = "1"  # of the processes that this one starts
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def main() -> NoReturn:
    """Run the command, and end the process with it.

    At once: all is closed by then, and to take torch down would take each process a third of a
    second, for which somebody who has pressed Ctrl-C waits.
    """
    _speak_utf_8()
    _open_streams()
    end_with_parent()
    code: str | int | None = 0
    try:
        run_command()
    except SystemExit as end:
        code = end.code
    with suppress(OSError):  # nobody may be reading any more
        if isinstance(code, str):
            sys.stderr.write(f"{escaped(code)}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
