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
        "Write a run to start from: configuration, rollouts, a small random model.",
    ),
    "explore": Command(
        f"{_RUN}:explore",
        "Generate rollouts with the newest published policy, until the experiment is finished.",
    ),
    "record": Command(
        "trinity_buffer.cli.server_commands:record",
        "Run an OpenAI-compatible proxy that stores every conversation passing through it.",
    ),
    "annotate": Command(
        f"{_RUN}:annotate",
        "Run a strategy over stored rollouts, and store its advantages as annotations.",
    ),
    "train": Command(
        f"{_RUN}:train",
        "Train on annotated groups, and commit each checkpoint with what it was trained on.",
    ),
    "stats": Command(
        "trinity_buffer.cli.stats_command:stats",
        "Show what is in a store and how far each process is.",
    ),
    "events": Command(
        f"{_ASK}:events",
        "Print the events of the log, one per line: the last ones, or those after a position.",
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
        "Say what is stuck, since when, and what would help; exit code 1 if anything is.",
    ),
    "seal": Command(
        "trinity_buffer.cli.seal_command:seal",
        "Seal a batch as it is: its groups are decided with the runs that are stored.",
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
        f"{_STEP}:leases",
        "Show who holds each lease of a trainer or strategy, until when, and how far a trainer is.",
    ),
    "staleness": Command(
        f"{_STEP}:staleness",
        "Show staleness, in policy versions: by gradient step and by actor, and whether it grew.",
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
        f"{_COMPARE}:top",
        "Watch a run: how far each process is, the last steps, and the last events.",
    ),
    "export": Command(
        f"{_EXPORT}:export",
        "Write a file with a row for each rollout, its advantage and what became of it.",
    ),
    "import": Command(
        "trinity_buffer.cli.import_command:import_",
        "Import files of another package into a store, ready to be annotated and trained.",
    ),
    "report": Command(
        "trinity_buffer.cli.report_command:report",
        "Write a page about a run: one file that opens offline, without scripts.",
    ),
    "track": Command(
        "trinity_buffer.cli.track_command:track",
        "Send each committed step's numbers to TensorBoard or trackio, during a run or after it.",
    ),
    "serve": Command(
        "trinity_buffer.cli.serve_command:serve",
        "Show a store in the browser: red flags, steps, groups, rollouts, events; and /metrics.",
    ),
    "verify": Command(
        f"{_MEND}:verify",
        "Check every promise: the log, its segments and projections, and the proof from outside.",
    ),
    "rebuild": Command(f"{_MEND}:rebuild", "Rebuild every projection from the log."),
    "migrate": Command(f"{_MEND}:migrate", "Upgrade a store that an older version wrote."),
    "algorithms": Command(
        f"{_MEND}:algorithms",
        "List the algorithms and the parts that they are built from, with their arguments.",
    ),
    "sync-weights": Command(
        "trinity_buffer.cli.server_commands:sync_weights",
        "Load the newest published weights into inference servers: pause, load, resume.",
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
        f"{_HISTORY}:restore", "Restore archived tensors; the archive files stay where they are."
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
