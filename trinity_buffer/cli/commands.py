"""All commands: where each is, and what it does. Running one loads its own module alone."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import wraps
from importlib import import_module
from inspect import Parameter, getdoc, signature
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer
from typer.core import TyperGroup
from typing_extensions import override


class Command(NamedTuple):
    """A command: ``module:function``, and the first line of its help, which a test compares."""

    place: str
    does: str


_DOES = {
    "demo": "Train a small policy from scratch, in four processes on one store, and watch it.",
    "init": "Write a run to start from: configuration, rollouts, a small random model.",
    "explore": "Generate rollouts with the newest published policy, until the experiment is "
    "finished.",
    "record": "Run an OpenAI-compatible proxy that stores every conversation passing through it.",
    "annotate": "Run a strategy over stored rollouts, and store its advantages as annotations.",
    "train": "Train on annotated groups, and commit each checkpoint with what it was trained on.",
    "stats": "Show what is in a store and how far each process is.",
    "events": "Print the events of the log, one per line: the last ones, or those after a "
    "position.",
    "groups": "Show groups: rewards and advantages of the runs of a task, and what became of them.",
    "show": "Show one experience: what it holds, its annotations, where it was trained, or why "
    "not.",
    "doctor": "Say what is stuck, since when, and what would help; exit code 1 if anything is.",
    "seal": "Seal a batch as it is: its groups are decided with the runs that are stored.",
    "steps": "Show gradient steps: rows, tokens, reward, staleness, seconds, and what the trainer "
    "recorded.",
    "blame": "Say exactly what one gradient step was trained on, and whether its commit proves it.",
    "why": "Say why a rollout was trained or never was: each event that decided it, in order.",
    "rejected": "Show what was left out, by whom and why.",
    "leases": "Show who holds each lease of a trainer or strategy, until when, and how far a "
    "trainer is.",
    "staleness": "Show staleness, in policy versions: by gradient step and by actor, and whether "
    "it grew.",
    "diff": "Compare two annotation sets over the same rollouts, or two runs step by step.",
    "search": "Find rollouts by their text; each is printed as soon as it is found.",
    "top": "Watch a run: how far each process is, the last steps, and the last events.",
    "export": "Write a file with a row for each rollout, its advantage and what became of it.",
    "import": "Import files of another package into a store, ready to be annotated and trained.",
    "report": "Write a page about a run: one file that opens offline, without scripts.",
    "track": "Send each committed step's numbers to TensorBoard or trackio, during a run or after "
    "it.",
    "serve": "Show a store in the browser: red flags, steps, groups, rollouts, events; and "
    "/metrics.",
    "verify": "Check every promise: the log, its segments and projections, and the proof from "
    "outside.",
    "rebuild": "Rebuild every projection from the log.",
    "migrate": "Upgrade a store that an older version wrote.",
    "algorithms": "List the algorithms and the parts that they are built from, with their "
    "arguments.",
    "sync-weights": "Load the newest published weights into inference servers: pause, load, "
    "resume.",
    "replay": "Train again on the recorded batches, without explorers and without changing the "
    "store.",
    "reannotate": "Add a second set of annotations beside the first, without touching it.",
    "compact": "Archive, or delete, the tensors of what was committed long ago; events and lineage "
    "stay.",
    "restore": "Restore archived tensors; the archive files stay where they are.",
}
_HOMES = {
    "run": "demo explore annotate train",
    "init": "init",
    "servers": "record serve sync-weights",
    "stats": "stats",
    "inspect": "events groups show steps blame why rejected leases staleness diff search top",
    "maintenance": "doctor seal verify rebuild migrate algorithms",
    "data": "export report track",
    "imports": "import",
    "history": "replay reannotate compact restore",
}
_PLACES = {
    name: f"trinity_buffer.cli.{module}:{name.replace('-', '_')}"
    for module, names in _HOMES.items()
    for name in names.split()
} | {"import": "trinity_buffer.cli.imports:import_"}  # `import` is a keyword of Python

COMMANDS = {name: Command(_PLACES[name], does) for name, does in _DOES.items()}
"""Name -> command, in the order of the help."""


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


class _Loaded(Mapping[str, Any]):
    """The commands by name, each loaded on access."""

    @override
    def __getitem__(self, name: str) -> Any:
        module, _, function = COMMANDS[name].place.partition(":")
        alone = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        with _without_gc():
            alone.command(name)(documented(getattr(import_module(module), function)))
        return typer.main.get_command(alone)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    @override
    def __len__(self) -> int:
        return len(COMMANDS)


class CommandTable(TyperGroup):
    """The group of all commands; its help comes from the table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": None})
        self.commands: Any = _Loaded()

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    @override
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.does) for name, command in COMMANDS.items()])
