"""All commands: where each is, and what it does. Running one loads its own module alone."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import wraps
from importlib import import_module
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperGroup
from typing_extensions import override

_PLACES = (
    "run:demo init:init run:explore servers:record run:annotate run:train stats:stats "
    "inspect:events inspect:groups inspect:show maintenance:doctor maintenance:seal inspect:steps "
    "inspect:blame inspect:why inspect:rejected inspect:leases inspect:staleness inspect:diff "
    "inspect:search inspect:top data:export imports:import_ data:report data:track servers:serve "
    "maintenance:verify maintenance:rebuild maintenance:migrate maintenance:algorithms "
    "servers:sync_weights history:replay history:reannotate history:compact history:restore"
)
COMMANDS = {
    place.partition(":")[2].rstrip("_").replace("_", "-"): place for place in _PLACES.split()
}
"""Name -> ``module:function`` in this package, in the order of the help."""


def summary_of(name: str) -> str:
    """Return the first line of a command's help, which is that of its docstring."""
    module, _, function = COMMANDS[name].partition(":")
    # Read and not imported: all modules together take a second, and most of them torch.
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    _, _, own = source.partition(f"def {function}(")
    return own.split('"""', 2)[1].splitlines()[0]


@contextmanager
def _without_gc() -> Iterator[None]:
    """Import without garbage collection, and exempt what was imported from it: all of it stays."""
    # Importing torch and SQLAlchemy allocates enough to trigger dozens of collections.
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_ARGUMENT = re.compile(r"^    (\w+): ", re.MULTILINE)


def documented(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose options have the help that its docstring has for them under Args.

    A truth value is a flag, without a ``--no-`` form.
    """
    text, _, described = (getdoc(function) or "").partition("\n\nArgs:\n")
    _, *parts = _ARGUMENT.split(described)
    helps = dict(zip(parts[::2], parts[1::2], strict=True))
    own = signature(function, eval_str=True)

    def with_help(parameter: Parameter) -> Parameter:
        if parameter.name not in helps:  # its help stands in its annotation
            return parameter
        kind, settings = parameter.annotation, None
        if get_origin(kind) is Annotated:
            kind, settings = get_args(kind)
        elif parameter.default is Parameter.empty:
            settings = typer.Argument()
        elif kind is bool:
            settings = typer.Option(f"--{parameter.name.replace('_', '-')}")
        settings = copy(settings or typer.Option())
        settings.help = " ".join(helps[parameter.name].split())
        return parameter.replace(annotation=Annotated[kind, settings])

    @wraps(function)
    def command(**options: Any) -> None:
        function(**options)

    command.__doc__ = text
    command.__annotations__ = {}
    command.__signature__ = own.replace(parameters=[*map(with_help, own.parameters.values())])  # type: ignore[attr-defined]  # read by typer
    return command


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
        alone = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        with _without_gc():
            loaded = import_module(f"{__package__}.{module}")
            alone.command(cmd_name)(documented(getattr(loaded, function)))
        return typer.main.get_command(alone)

    @override
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary_of(name)) for name in COMMANDS])
