"""Options that most commands share, what they mean when left out, and how a command runs."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import anyio
import typer

from trinity_buffer.cli.escaping import escaped
from trinity_buffer.cli.output import Answer, print_answer, progress
from trinity_buffer.errors import InvalidArgumentError, UnknownExperimentError, UnknownStoreError
from trinity_buffer.identity import TURNS
from trinity_buffer.inspector.source import Source
from trinity_buffer.inspector.source import as_of as opened_as_of
from trinity_buffer.pipeline.coordination.waiting import REPEATED_AFTER, wait_report_s
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import Store, open_store

STORE_VARIABLE = "TRINITY_BUFFER_STORE"

SQLITE_MAGIC = b"SQLite format 3\0"
"""The first bytes of every SQLite database."""

STORE_POLL_S = 0.2
"""How often a follower checks for a store that does not exist yet."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a shell: 128 + SIGINT."""

RESUMABLE = "interrupted; run it again to go on"

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        help=f"Path or URL of the store. Default: ${STORE_VARIABLE}, else the newest runs/*.db.",
    ),
]
ExperimentOption = Annotated[
    str | None,
    typer.Option("--experiment", help="Which experiment, if the store has more than one."),
]
SetNameOption = Annotated[
    str | None,
    typer.Option(
        "--set", help="Annotation set whose advantages are shown. Default: the first one."
    ),
]
UidArgument = Annotated[
    str, typer.Argument(help="batch/task/run/step/suffix, such as e0-7/3/1/0/.")
]
FollowOption = Annotated[
    bool, typer.Option("--follow", help="Keep running until the experiment is finished.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
AsOfOption = Annotated[
    int | None, typer.Option("--as-of", help="Answer as of this position of the log.", min=1)
]
TrainerOption = Annotated[
    str | None,
    typer.Option("--trainer", help="Which trainer. Default: the one that is furthest ahead."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a configuration key, such as optimizer.learning_rate=3e-4; repeatable.",
    ),
]
ArgumentsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="An argument of the strategy: epsilon=1e-5, or grpo.epsilon=1e-5 if there are several"
        " (`trinity-buffer algorithms` lists them).",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML or YAML file with the configuration and the run's store, which overrides"
        f" ${STORE_VARIABLE}.",
    ),
]
PlaceOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Configuration file; only its store and experiment are read; the store overrides"
        f" ${STORE_VARIABLE}.",
    ),
]


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


def chosen_place(
    store: str | None, experiment: str | None, config: Path | None
) -> tuple[str, str | None]:
    """Return the store to use, and the experiment that is named: by an option, else by a file.

    Raises:
        UnknownStoreError: no store is named, and runs/ holds none.
        InvalidArgumentError: the file has an unknown key, which may have meant the store.
    """
    in_file, of_file = place_in(config)  # even if both are given: this checks the file's keys
    return chosen_store(store or in_file), of_file if experiment is None else experiment


def place_in(config: Path | None) -> tuple[str | None, str | None]:
    """Return the store and the experiment that a file names, if any.

    Raises:
        InvalidArgumentError: it has an unknown key, which may have meant the store.
    """
    if config is None:
        return None, None
    from trinity_buffer.cli import run_config  # noqa: PLC0415 - torch

    return run_config.place_in(config)


def make_folder_of(url: str) -> None:
    """Make the folder that a store will be created in; one on a server has none.

    Raises:
        InvalidArgumentError: it cannot be made.
    """
    path = url.removeprefix("sqlite:///")
    if "://" not in path:
        make_folder(Path(path).expanduser().parent)


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


def require_no_database(path: Path) -> None:
    """Raise InvalidArgumentError if writing to ``path`` would overwrite a database or its log."""
    database = path.with_name(path.name.removesuffix("-wal").removesuffix("-shm"))
    if not database.is_file():
        return
    # Before the store is opened: closing any handle of an SQLite file drops all POSIX locks that
    # this process holds on it.
    with database.open("rb") as file:
        if file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC:
            raise InvalidArgumentError(f"{path} belongs to a database: name another file")


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
    if experiment is not None and experiment in names:
        return experiment
    if not names:
        raise UnknownExperimentError(
            f"{where} holds no experiment yet: `trinity-buffer explore` and "
            "`store.experiment(NAME, config={})` make one"
        )
    if experiment is not None:
        known = ", ".join(names)
        raise UnknownExperimentError(f"{where} holds no experiment {experiment!r} (there: {known})")
    only = only_one(names)
    if only is None:
        raise InvalidArgumentError(
            f"{where} holds several experiments, say which with --experiment: {', '.join(names)}"
        )
    return only


def only_one(names: Sequence[str]) -> str | None:
    """Return the only experiment but for a recorder's turns of it; None: there are several."""
    # A recorder keeps an experiment of turns beside that of whole conversations.
    own = [name for name in names if name.removesuffix(TURNS) not in {*names} - {name}]
    return own[0] if len(own) == 1 else None


async def folder_of(base: Path, url: str, experiment: str) -> Path:
    """Return ``base`` for the store's first experiment, a folder in it for another: none shares."""
    async with open_store(url, read_only=True) as store:
        first, *_ = await store.experiments()
    return base if experiment == first else base / quote(experiment, safe="")


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


@contextmanager
def interruptible(message: str | None = None) -> Iterator[None]:
    """End with a message instead of a traceback on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        if message is not None:
            typer.echo(message)
        raise typer.Exit(INTERRUPTED) from None


def run(main: Callable[[], Awaitable[Any]], message: str | None = None) -> Any:
    """Run a command to its end; Ctrl-C ends it with ``message`` instead of a traceback."""
    with interruptible(message):
        return anyio.run(main)


async def on_experiment(
    store: str | None,
    experiment: str | None,
    work: Callable[[Experiment], Awaitable[Any]],
    *,
    read_only: bool = True,
) -> Any:
    """Return what ``work`` returns for the chosen experiment, in a store opened for it."""
    async with open_store(chosen_store(store), read_only=read_only, create=False) as opened:
        return await work(await opened.experiment(await experiment_in(opened, experiment)))


Work = Callable[..., Awaitable[Answer]]
"""What a command does: a question about a `Source`, or work on an `Experiment`."""

_PASSED = ("progress", "as_json")


def _option(name: str, annotation: Any, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def command(
    *, lines: bool = False, read_only: bool = True
) -> Callable[[Work], Callable[..., None]]:
    """Make a command of what asks a `Source`, or works on an `Experiment`, and returns an `Answer`.

    Its options are --store, --experiment, those of the function, --as-of where a `Source` is asked,
    and --json. ``progress`` and ``as_json`` are passed to a function that takes them.

    Args:
        lines: with --json there is an object per line.
        read_only: how the store is opened.
    """

    def decorated(work: Work) -> Callable[..., None]:
        first, *own = signature(work, eval_str=True).parameters.values()
        takes = {parameter.name for parameter in own}
        is_question = first.annotation is Source

        @wraps(work)
        def run_command(
            *,
            store: str | None,
            experiment: str | None,
            as_json: bool,
            as_of: int | None = None,
            **options: Any,
        ) -> None:
            async def answer(opened: Experiment) -> Answer:
                with progress() as report:
                    passed = dict(zip(_PASSED, (report, as_json), strict=True))
                    options.update({name: passed[name] for name in passed.keys() & takes})
                    if not is_question:
                        return await work(opened, **options)
                    async with opened_as_of(opened, as_of, report) as source:
                        return await work(source, **options)

            answered = run(partial(on_experiment, store, experiment, answer, read_only=read_only))
            print_answer(answered, as_json=as_json)

        mine = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own if p.name not in _PASSED]
        required = [p for p in mine if p.default is Parameter.empty]
        shared = [_option("store", StoreOption), _option("experiment", ExperimentOption)]
        last = [_option("as_of", AsOfOption)] if is_question else []
        last.append(_option("as_json", JsonLinesOption if lines else JsonOption, default=False))
        run_command.__annotations__ = {}
        run_command.__signature__ = Signature([*required, *shared, *mine[len(required) :], *last])  # type: ignore[attr-defined]  # read by typer
        return run_command

    return decorated
