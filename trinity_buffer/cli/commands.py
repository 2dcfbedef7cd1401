"""All commands: where each is, and what it does. A command loads its own modules and no other's."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup
from typing_extensions import override


class Command(NamedTuple):
    """A command: ``module:function``, and the first line of its help, which a test holds to it."""

    place: str
    does: str


_RUN = "trinity_buffer.cli.run_commands"
_ASK = "trinity_buffer.cli.inspect_commands"
_STEP = "trinity_buffer.cli.step_commands"
_COMPARE = "trinity_buffer.cli.compare_commands"
_EXPORT = "trinity_buffer.cli.export_commands"
_MEND = "trinity_buffer.cli.maintenance_commands"
_HISTORY = "trinity_buffer.cli.history_commands"

COMMANDS = {
    "demo": Command(
        f"{_RUN}:demo",
        "Train a small policy from scratch, in four processes on one store, and watch it.",
    ),
    "init": Command(
        "trinity_buffer.cli.init_command:init",
        "Write a run of your own to begin with: configuration, rollouts, a small random model.",
    ),
    "explore": Command(
        f"{_RUN}:explore",
        "Generate rollouts with the newest published policy, until the experiment is finished.",
    ),
    "record": Command(
        "trinity_buffer.cli.server_commands:record",
        "Answer as an inference server does, and store every conversation that passes.",
    ),
    "annotate": Command(
        f"{_RUN}:annotate",
        "Run a strategy over what is stored: advantages in, annotations out.",
    ),
    "train": Command(
        f"{_RUN}:train",
        "Train on annotated groups, and commit each checkpoint with what it was trained on.",
    ),
    "stats": Command(
        "trinity_buffer.cli.stats_command:stats",
        "Say what is in a store and how far everybody is.",
    ),
    "events": Command(
        f"{_ASK}:events",
        "Print the events of the log, one a line: the last ones, or those after a position.",
    ),
    "groups": Command(
        f"{_ASK}:groups",
        "Show groups: rewards and advantages of the runs of a task, and what became of them.",
    ),
    "show": Command(
        f"{_ASK}:show",
        "Show one experience: what it holds, its annotations, where it was trained, or why not.",
    ),
    "doctor": Command(
        "trinity_buffer.cli.doctor_command:doctor",
        "Say what is stuck, since when, and what would move it; exit code 1 if anything is.",
    ),
    "steps": Command(
        f"{_STEP}:steps",
        "Show gradient steps: rows, tokens, reward, staleness, seconds, and what the trainer "
        "recorded.",
    ),
    "blame": Command(
        f"{_STEP}:blame",
        "Say exactly what one gradient step was trained on, and whether its commit proves it.",
    ),
    "why": Command(
        f"{_STEP}:why",
        "Say why a rollout was trained or never was: each event that decided it, in order.",
    ),
    "rejected": Command(f"{_STEP}:rejected", "Show what was left out, by whom and why."),
    "leases": Command(
        f"{_STEP}:leases", "Show who holds each trainer's work, until when, and how far it is."
    ),
    "staleness": Command(
        f"{_STEP}:staleness",
        "Show how old what was trained on was, in policy versions: by step and actor, and growth.",
    ),
    "diff": Command(
        f"{_COMPARE}:diff",
        "Compare two annotation sets over the same rollouts, or two runs step by step.",
    ),
    "search": Command(
        f"{_COMPARE}:search",
        "Find rollouts by their text; each is printed as soon as it is found.",
    ),
    "top": Command(
        f"{_COMPARE}:top", "Watch a run: who is how far, the last steps, and the last events."
    ),
    "export": Command(
        f"{_EXPORT}:export",
        "Write what is stored to a file: a row for each rollout, with its advantage and its fate.",
    ),
    "import": Command(
        "trinity_buffer.cli.import_command:import_",
        "Take what another package left in files into a store, ready to be annotated and trained.",
    ),
    "report": Command(
        "trinity_buffer.cli.report_command:report",
        "Write a page about a run: one file that opens offline, without scripts.",
    ),
    "track": Command(
        "trinity_buffer.cli.track_command:track",
        "Give the numbers of each committed step to TensorBoard or trackio, beside a run or after "
        "it.",
    ),
    "serve": Command(
        "trinity_buffer.cli.serve_command:serve",
        "Show a store in the browser: red flags, steps, groups, rollouts, events; and /metrics.",
    ),
    "verify": Command(
        f"{_MEND}:verify",
        "Check every promise: the log, its segments and projections, and the proof from outside.",
    ),
    "rebuild": Command(
        f"{_MEND}:rebuild", "Fold the log again, and make every projection row what it says."
    ),
    "migrate": Command(f"{_MEND}:migrate", "Bring a store that an older version wrote up to date."),
    "algorithms": Command(
        f"{_MEND}:algorithms",
        "List the algorithms, and the parts of which one's own are made, with their arguments.",
    ),
    "sync-weights": Command(
        "trinity_buffer.cli.server_commands:sync_weights",
        "Bring the newest published weights to inference servers: pause, load, resume.",
    ),
    "replay": Command(
        f"{_HISTORY}:replay",
        "Train again on the recorded batches, without explorers and without changing the store.",
    ),
    "reannotate": Command(
        f"{_HISTORY}:reannotate",
        "Add a second set of annotations beside the first, without touching it.",
    ),
    "compact": Command(
        f"{_HISTORY}:compact",
        "Archive, or delete, the tensors of what was committed long ago; events and lineage stay.",
    ),
    "restore": Command(
        f"{_HISTORY}:restore", "Bring back what was archived; the files stay where they are."
    ),
}
"""Name -> command, in the order of the help."""


@contextmanager
def _nothing_walked() -> Iterator[None]:
    """Import without a look for garbage, now or later, among what is imported: it all stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Loaded(Mapping[str, Any]):
    """The commands by name, each loaded when it is asked for."""

    @override
    def __getitem__(self, name: str) -> Any:
        module, _, function = COMMANDS[name].place.partition(":")
        alone = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        with _nothing_walked():
            alone.command(name)(getattr(import_module(module), function))
        return typer.main.get_command(alone)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    @override
    def __len__(self) -> int:
        return len(COMMANDS)


class CommandTable(TyperGroup):
    """The group of all commands; its help is read off the table."""

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
