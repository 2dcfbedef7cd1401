"""The ``trinity-buffer`` command: where each of its commands is, and what it does. No torch.

Running a command loads its own module alone.
"""

from __future__ import annotations

import codecs
import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from trinity_buffer import __version__
from trinity_buffer.cli.escaping import escaped, set_up_logs
from trinity_buffer.cli.supervisor import end_with_parent, exit_code_of
from trinity_buffer.errors import TrinityBufferError
from trinity_buffer.user_code import own_code

_PLACES = (
    "run:demo run:init run:explore servers:record run:annotate run:train stats:stats "
    "inspect:events inspect:groups inspect:show maintenance:doctor maintenance:seal inspect:steps "
    "inspect:blame inspect:why inspect:rejected inspect:leases inspect:staleness inspect:diff "
    "inspect:search inspect:top data:export data:import_ data:report data:track servers:serve "
    "maintenance:verify maintenance:rebuild maintenance:migrate maintenance:algorithms "
    "servers:sync_weights data:replay data:reannotate data:compact data:restore"
)
COMMANDS = {at.partition(":")[2].rstrip("_").replace("_", "-"): at for at in _PLACES.split()}
"""Name -> ``module:function`` in this package, in the order of the help."""


def summary_of(name: str) -> str:
    """Return the first line of a command's help, which is that of its docstring."""
    module, _, function = COMMANDS[name].partition(":")
    # Read and not imported: all modules together take a second, and most of them torch.
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    _, _, own = source.partition(f"def {function}(")
    return own.split('"""', 2)[1].splitlines()[0]


# Help is plain text: rich would take twice as long to import as everything else that it needs.
PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
PLAIN["add_completion"] = False


class OwnCommand(TyperCommand):
    """A command that refuses an empty option, and a second ``--strategy``."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        values, _, written = self.make_parser(ctx).parse_args(args=[*args])
        options: list[Any] = [one for one in written if one.param_type_name == "option"]
        for option in options:
            # Of others the last one wins, as in a script that adds to a command.
            if option.name == "strategy" and options.count(option) > 1:
                ctx.fail("--strategy is there twice: several are one set, as reward_variance+grpo")
            # An unset variable of a shell would mean the default: another store, say.
            if values[option.name] == "":
                ctx.fail(f"{option.opts[0]} is empty: give it a value, or leave it out")
        return super().parse_args(ctx, args)


class CommandTable(TyperGroup):
    """The group of all commands: each is loaded when it is run, and listed without that."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": None})
        self.commands: Any = COMMANDS

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        alone = typer.Typer(**PLAIN)
        # Importing torch and SQLAlchemy allocates enough for dozens of collections, and all of it
        # stays: later ones leave it out.
        gc.disable()
        try:
            loaded = import_module(f"{__package__}.{module}")
            alone.command(cmd_name, cls=OwnCommand)(getattr(loaded, function))
        finally:
            gc.freeze()
            gc.enable()
        return typer.main.get_command(alone)

    @override
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary_of(name)) for name in COMMANDS])


app = typer.Typer(cls=CommandTable, no_args_is_help=True, **PLAIN)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trinity-buffer {__version__}")
        raise typer.Exit


VERSION = typer.Option(
    "--version", callback=_print_version, is_eager=True, help="Say the version, and end."
)


@app.callback()
def trinity_buffer(version: Annotated[bool, VERSION] = False) -> None:
    """Know what every gradient step was trained on: an experience store for post-training.

    `trinity-buffer COMMAND --help` shows the options of a command, and an example.
    """


def run_command() -> None:
    """Run the command; an error ends it with one sentence and exit code 1, 2 or 3.

    1: it failed, 2: it was refused, 3: the run has stalled (`RunStalledError`). Errors of the
    system (a full disk, a read-only folder) and of the user's own code are one sentence too.
    """
    try:
        set_up_logs(os.environ)
        with own_code():
            app()
    except (TrinityBufferError, OSError) as error:
        message = "; ".join([str(error), *getattr(error, "__notes__", [])])
        sys.stderr.write(f"error: {escaped(message)}\n")
        raise SystemExit(exit_code_of(error)) from None


def _open_streams() -> None:
    """Open /dev/null in place of each standard stream that the process was started without.

    Otherwise the next opened file would get its descriptor, and prints would go into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal must not end a run
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _speak_utf_8() -> None:
    """Restart in Python's UTF-8 mode if the locale is ASCII.

    Python does so by itself in the locales C and POSIX, unless told not to. In ASCII, file names,
    arguments and output would each fail in another way.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii":
        os.environ["PYTHONUTF8"] = "1"  # for child processes
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def main() -> NoReturn:
    """Run the command, and end the process with it.

    It ends by `os._exit`: everything is closed by then, and torch's teardown would make the user
    wait for a third of a second after Ctrl-C.
    """
    _speak_utf_8()
    _open_streams()
    end_with_parent()
    code: str | int | None = 0
    try:
        run_command()
    except SystemExit as end:
        code = end.code
    with suppress(OSError):  # the reader of a pipe may be gone
        if isinstance(code, str):
            sys.stderr.write(f"{escaped(code)}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
