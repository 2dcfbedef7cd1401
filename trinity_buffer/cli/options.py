"""Options that most commands share, what they mean when left out, and how a command runs."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial, wraps
from hashlib import sha256
from inspect import Parameter, Signature, getdoc, iscoroutinefunction, signature
from math import isnan
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_args, get_origin
from urllib.parse import quote

import anyio
import typer
from typer.models import OptionInfo

from trinity_buffer.cli.escaping import escaped
from trinity_buffer.cli.output import Answer, print_answer, progress
from trinity_buffer.errors import InvalidArgumentError, UnknownExperimentError, UnknownStoreError
from trinity_buffer.identity import TURNS
from trinity_buffer.inspector.source import Source
from trinity_buffer.inspector.source import as_of as opened_as_of
from trinity_buffer.pipeline.coordination.waiting import REPEATED_AFTER, wait_report_s
from trinity_buffer.pipeline.store import Experiment, Store, open_store
from trinity_buffer.pipeline.verify.projections import no_progress

STORE_VARIABLE = "TRINITY_BUFFER_STORE"

SQLITE_MAGIC = b"SQLite format 3\0"
"""The first bytes of every SQLite database."""

STORE_POLL_S = 0.2
"""How often a follower checks for a store that does not exist yet."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a shell: 128 + SIGINT."""

RESUMABLE = "interrupted; run it again to go on"

Count = Annotated[int, typer.Option(min=1)]
OptionalCount = Annotated[int | None, typer.Option(min=1)]
Required = Annotated[str, typer.Option()]

HELPS = {
    "store": f"Path or URL of the store. Default: ${STORE_VARIABLE}, else the newest runs/*.db.",
    "experiment": "Which experiment, if the store has more than one.",
    "as_of": "Answer as of this position of the log.",
    "as_json": "Print JSON",
    "annotation_set": "Annotation set whose advantages are shown. Default: the trainer's, else the "
    "first one.",
    "arguments": "An argument of the strategy: epsilon=1e-5, or grpo.epsilon=1e-5 if there are "
    "several (`trinity-buffer algorithms` lists them).",
    "config": "TOML or YAML file with the configuration and the run's store, which overrides "
    f"${STORE_VARIABLE}.",
    "follow": "Keep running until the experiment is finished.",
    "host": "Address to listen on.",
    "overrides": "Override a configuration key, such as optimizer.learning_rate=3e-4; repeatable.",
    "place": "Configuration file; only its store and experiment are read; the store overrides "
    f"${STORE_VARIABLE}.",
    "port": "Port; 0: any free one.",
    "trainer": "Which trainer. Default: the one that is furthest ahead.",
    "uid": "batch/task/run/step/suffix, such as e0-7/3/1/0/.",
}
"""Parameter of a command -> its help, unless the docstring of the command has another."""

FLAGS = dict.fromkeys(("annotation_set", "arguments", "overrides"), "--set")
FLAGS |= {"as_json": "--json", "place": "--config"}
"""Parameter -> its option, if that is not its name."""


def chosen_store(store: str | None) -> str:
    """Return the store to use: ``store``, else that of the environment, else the newest in runs/.

    If it is the newest of several files, standard error says so.

    Raises:
        UnknownStoreError: no store is named, and runs/ holds none.
    """
    named = store or os.environ.get(STORE_VARIABLE)
    if named:
        return named
    files = sorted(Path("runs").glob("*.db"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UnknownStoreError(
            f"no store: say --store, set ${STORE_VARIABLE}, or run `trinity-buffer demo` first"
        )
    if len(files) > 1:
        sys.stderr.write(escaped(f"store: {files[-1]}, the newest of {len(files)}") + "\n")
    return f"sqlite:///{files[-1]}"


class Run(NamedTuple):
    """A run that a command works on.

    Attributes:
        url: of its store.
        experiment: the one that is named, by an option or else by the file.
        file: the configuration in the file; None: there is none.
        overrides: of the configuration.
    """

    url: str
    experiment: str | None
    file: dict[str, Any] | None
    overrides: list[str]

    @classmethod
    def chosen(
        cls, store: str | None, name: str | None, file: Path | None, sets: list[str] | None = None
    ) -> Self:
        """Return the run that options choose: --store, --experiment, --config and --set.

        Raises:
            UnknownStoreError: no store is named, and runs/ holds none.
            InvalidArgumentError: the file cannot be read, or has an unknown key or a wrong value.
        """
        if file is None:
            return cls(chosen_store(store), name, None, sets or [])
        from trinity_buffer.cli.run_config import read_file  # noqa: PLC0415 - torch

        config = read_file(file)
        chosen = config.experiment if name is None else name
        return cls(chosen_store(store or config.store), chosen, config.values, sets or [])


class Place(Run):
    """A run, of whose file only store and experiment are read."""


def path_of(url: str) -> Path | None:
    """Return the file of a store; None of one on a server."""
    path = url.removeprefix("sqlite:///")
    if path != url:  # what follows a question mark is no part of the name of a file
        path = path.partition("?")[0]
    return None if "://" in path else Path(path).expanduser()


def base_of(path: Path) -> Path:
    """Return the path that files beside the store at ``path`` are named after."""
    # Not `with_suffix`: of lr0.1 and lr0.2 it makes one name.
    return path.with_name(path.name.removesuffix(".db") or path.name)


def beside(base: Path, ending: str) -> Path:
    """Return the file or folder beside a store that has this ending."""
    return base.with_name(base.name + ending)


def make_folder_of(url: str) -> None:
    """Make the folder that a store will be created in; one on a server has none.

    Raises:
        InvalidArgumentError: it cannot be made.
    """
    if (path := path_of(url)) is not None:
        make_folder(path.parent)


def make_folder(path: Path) -> Path:
    """Return the folder ``path``; create it if it is missing.

    Raises:
        InvalidArgumentError: it cannot be made, or is a file.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"folder {path}: {error.strerror}") from error
    return path


def no_database(path: Path) -> Path:
    """Return ``path``, unless writing there would overwrite a database or its log.

    Called before the store is opened: closing any handle of an SQLite file drops all POSIX locks
    that this process holds on it.

    Raises:
        InvalidArgumentError: it would.
    """
    database = path.with_name(path.name.removesuffix("-wal").removesuffix("-shm"))
    if database.is_file():
        with database.open("rb") as file:
            if file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC:
                raise InvalidArgumentError(f"{path} belongs to a database: name another file")
    return path


def require_folder(path: Path) -> None:
    """Raise InvalidArgumentError unless the folder ``path`` exists or can be made; make none."""
    # Nothing is made yet: the command may still be refused for another reason.
    whole = path.absolute()
    parent = next(folder for folder in (whole, *whole.parents) if folder.exists())
    wrong = None
    if not parent.is_dir():
        wrong = errno.EEXIST if parent == whole else errno.ENOTDIR
    elif parent != whole and not os.access(parent, os.W_OK):
        wrong = errno.EACCES
    if wrong is not None:
        raise InvalidArgumentError(f"folder {path}: {os.strerror(wrong)}")


async def chosen_experiment(url: str, experiment: str | None) -> str:
    """Return the experiment to use of the store at ``url``; see `experiment_in`."""
    async with open_store(url, read_only=True) as store:
        return await experiment_in(store, experiment)


async def experiment_in(store: Store, experiment: str | None) -> str:
    """Return the experiment to use.

    Raises:
        UnknownExperimentError: there is none of this name, or none at all.
        InvalidArgumentError: there are several and none is named.
    """
    names, where = await store.experiments(), store.url
    # An empty name is a mistake, such as an unset variable of a shell, and never the only one.
    chosen = only_one(names) if experiment is None else experiment
    known = ", ".join(names)
    if not names:
        raise UnknownExperimentError(
            f"{where} holds no experiment yet: `trinity-buffer explore` and "
            "`store.experiment(NAME, config={})` make one"
        )
    if chosen is None:
        raise InvalidArgumentError(
            f"{where} holds several experiments, say which with --experiment: {known}"
        )
    if chosen not in names:
        raise UnknownExperimentError(f"{where} holds no experiment {chosen!r} (there: {known})")
    return chosen


def only_one(names: Sequence[str]) -> str | None:
    """Return the only experiment but for a recorder's turns of it; None: there are several."""
    # A recorder keeps an experiment of turns beside that of whole conversations.
    own = [name for name in names if name.removesuffix(TURNS) not in {*names} - {name}]
    return own[0] if len(own) == 1 else None


async def folder_beside(url: str, experiment: str) -> Path:
    """Return the folder of checkpoints beside a file: no two trainers of it share one."""
    path = path_of(url)
    assert path is not None
    async with open_store(url, read_only=True) as store:
        first, *_ = await store.experiments()
        trainer = (await store.experiment(experiment)).config.get("trainer") or "trainer"
    base = beside(base_of(path), ".checkpoints")
    folder = base if experiment == first else base / _folder_of(experiment)
    # The folder of an experiment has no "=" in its name.
    return folder if trainer == "trainer" else folder / f"trainer={_folder_of(str(trainer))}"


def _folder_of(name: str) -> str:
    """Return the name of a folder that no other name has."""
    part = quote(name, safe="")
    if part in {".", ".."}:  # which are folders of others
        return part.replace(".", "%2E")
    # A folder's name has 255 bytes, and a letter may take twelve here.
    digest = sha256(name.encode()).hexdigest()
    return part if len(part) <= _LONGEST else f"{part[: _LONGEST - len(digest)]}{digest}"


_LONGEST = 240


async def awaited_experiment(url: str, experiment: str | None) -> str:
    """Wait until the experiment exists, and return its name; report the wait as other waits do.

    Raises:
        InvalidArgumentError: the store holds several and none is named.
    """
    due = time.monotonic() + wait_report_s()
    while True:
        try:
            return await chosen_experiment(url, experiment)
        except (UnknownStoreError, UnknownExperimentError) as error:
            if time.monotonic() >= due:
                message = f"waits for the first explorer or trainer to make it: {error}"
                sys.stderr.write(escaped(message) + "\n")
                due = time.monotonic() + REPEATED_AFTER * wait_report_s()
        # Nothing can notify of a store that does not exist, so this polls.
        await anyio.sleep(STORE_POLL_S)


async def _on_opened(
    job: Callable[..., Any], kind: type, where: Mapping[str, Any], *, read_only: bool, reports: bool
) -> Any:
    """Do the ``job`` of a command on a `Store`, or on an `Experiment` or a `Source` of one."""
    as_of = where.get("as_of")
    # Not for each: two live displays would disturb each other.
    with progress() if reports or as_of else nullcontext(no_progress) as report:
        job = partial(job, progress=report) if reports else job
        url = chosen_store(where["store"])
        async with open_store(url, read_only=read_only, create=False) as opened:
            if kind is Store:
                return await job(opened)
            experiment = await opened.experiment(await experiment_in(opened, where["experiment"]))
            if kind is Experiment:
                return await job(experiment)
            async with opened_as_of(experiment, as_of, report) as source:
                return await job(source)


_EXPERIMENT = {"store": str | None, "experiment": str | None}
_PLACES: dict[Any, dict[str, Any]] = {
    Run: _EXPERIMENT | {"config": Path | None, "overrides": list[str] | None},
    Place: _EXPERIMENT | {"place": Path | None},
    Store: {"store": str | None},
    Experiment: _EXPERIMENT,
    Source: _EXPERIMENT | {"as_of": OptionalCount},
}
"""What a command works on -> the options that choose it, and their types."""


def command(
    *, lines: bool = False, read_only: bool = True, resumable: bool = False, follows: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a command of a function, whose parameters are its options.

    If the first one is a `Store`, an `Experiment` or a `Source`, it is opened, and has the options
    that choose it; so has a `Run` or a `Place`. A function that returns an `Answer` has --json.
    ``progress`` is not an option: a function that takes it shows how far it is.

    Args:
        lines: with --json there is an object per line.
        read_only: how the store is opened.
        resumable: Ctrl-C says that the same command goes on.
        follows: with --follow it ends with Ctrl-C only, which is no failure then.
    """

    def decorated(work: Callable[..., Any]) -> Callable[..., None]:
        own = signature(work, eval_str=True)
        # What is passed to the function, beside what it works on and its progress.
        parameters = dict(own.parameters)
        reports = parameters.pop("progress", None) is not None
        kind: Any = next((parameter.annotation for parameter in parameters.values()), None)
        place = _PLACES.get(kind, {})
        if place:
            del parameters[next(iter(parameters))]

        @wraps(work)
        def run_command(**options: Any) -> None:
            _refuse_nan(options)
            chosen = {name: options[name] for name in place}
            passed = {name: value for name, value in options.items() if name in parameters}
            main = partial(work, **passed)
            if kind in {Run, Place}:
                main = partial(main, kind.chosen(*chosen.values()))
            elif place:
                main = partial(_on_opened, main, kind, chosen, read_only=read_only, reports=reports)
            try:
                answer: Any = anyio.run(main) if iscoroutinefunction(work) else main()
            except KeyboardInterrupt:
                if resumable:
                    typer.echo(RESUMABLE)
                ended = follows and options["follow"]
                raise typer.Exit(0 if ended else INTERRUPTED) from None
            if answer is not None:
                print_answer(answer, as_json=options.get("as_json", False))

        options = {name: _option(name, annotation) for name, annotation in place.items()}
        options |= parameters
        if own.return_annotation is Answer:
            options["as_json"] = _option("as_json", bool, default=False)
        run_command.__doc__, helps = _helps_in(work, lines=lines)
        run_command.__annotations__ = {}  # typer prefers those that `wraps` copied
        typed = [_for_typer(option, helps.get(name)) for name, option in options.items()]
        run_command.__signature__ = Signature(sorted(typed, key=_is_optional))  # type: ignore[attr-defined]  # read by typer
        return run_command

    return decorated


def _refuse_nan(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if isinstance(value, float) and isnan(value):  # no bound of an option refuses it
            raise InvalidArgumentError(f"--{name.replace('_', '-')} nan: give a number")


_ARGUMENT = re.compile(r"^    (\w+): ", re.MULTILINE)
"""The name of an argument in the section Args of a docstring."""


def _helps_in(work: Callable[..., Any], *, lines: bool) -> tuple[str, dict[str, str]]:
    """Return the help of a command, and that of each option, by its docstring."""
    text, _, described = (getdoc(work) or "").partition("\n\nArgs:\n")
    _, *parts = _ARGUMENT.split(described)
    helps = HELPS | dict(zip(parts[::2], parts[1::2], strict=True))
    helps["as_json"] += ", one object per line." if lines else "."
    return text, helps


def _option(name: str, annotation: Any, *, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_optional(parameter: Parameter) -> bool:
    return parameter.default is not Parameter.empty


def _for_typer(parameter: Parameter, text: str | None) -> Parameter:
    """Return a parameter as typer reads it, with its help; a flag has no ``--no-`` form."""
    name, kind, info = parameter.name, parameter.annotation, None
    if get_origin(kind) is Annotated:
        kind, info = get_args(kind)
    elif not _is_optional(parameter):
        info = typer.Argument()
    info = copy(info or typer.Option())
    # In an annotation, what typer calls the default of an option is its first name.
    if isinstance(info, OptionInfo) and info.default is ...:
        info.default = FLAGS.get(name, f"--{name.replace('_', '-')}")
    info.help = info.help if text is None else " ".join(text.split())
    return parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])
