"""Options that most commands share, and what they mean when they are not given."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import anyio
import typer

from trinity_buffer.cli.escaping import escaped
from trinity_buffer.cli.run_file import PLACES, parsed, store_in
from trinity_buffer.errors import InvalidArgumentError, UnknownExperimentError, UnknownStoreError
from trinity_buffer.identity import TURNS
from trinity_buffer.pipeline.spoken_wait import REPEATED_AFTER, wait_report_s
from trinity_buffer.pipeline.store import open_store

STORE_VARIABLE = "TRINITY_BUFFER_STORE"

_OF_SQLITE = b"SQLite format 3\0"
"""What each of its files begins with."""

STORE_LOOK_S = 0.2
"""How often a follower looks for a store that is not there yet."""

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
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
AsOfOption = Annotated[
    int | None,
    typer.Option("--as-of", help="Answer as of this position of the log.", min=1),
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


def chosen_store(store: str | None, config: Path | None = None) -> str:
    """Return the store to use: the one given, else that of the file ``config``, else the usual one.

    Where it is the newest of several files, that is said on standard error.

    Raises:
        UnknownStoreError: none is named and there is none under runs/.
    """
    in_file = store_of_file(config)  # read in any case: its keys are checked
    named = store or in_file or os.environ.get(STORE_VARIABLE)
    if named:
        return named
    files = sorted(Path("runs").glob("*.db"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UnknownStoreError(
            f"no store: say --store, set ${STORE_VARIABLE}, or run `trinity-buffer demo` first"
        )
    if len(files) > 1:
        told = escaped(f"store: {files[-1]}, the newest of {len(files)}")
        sys.stderr.write(f"{told}\n")
    return f"sqlite:///{files[-1]}"


def store_of_file(config: Path | None) -> str | None:
    """Return the store that the file of a run names; None: it names none.

    Raises:
        InvalidArgumentError: it has a key that nothing reads, which may have meant the store.
    """
    if config is None:
        return None
    from trinity_buffer.cli.config_checks import refuse_unknown  # noqa: PLC0415 - pydantic
    from trinity_buffer.cli.run_config import RunConfig  # noqa: PLC0415 - likewise

    refuse_unknown(parsed(config), RunConfig, f"configuration {config}: ", PLACES)
    return store_in(config)


def made_folder_of(url: str) -> None:
    """Make the folder that a store is to be created in; one on a server has none.

    Raises:
        InvalidArgumentError: it cannot be made.
    """
    path = url.removeprefix("sqlite:///")
    if "://" not in path:
        made_folder(Path(path).expanduser().parent)


def made_folder(path: Path) -> Path:
    """Return the folder ``path``, made where it is missing.

    Raises:
        InvalidArgumentError: it cannot be made, or is a file.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"folder {path}: {error.strerror}") from error
    return path


def require_no_database(path: Path) -> None:
    """Return if a file may be written at ``path``: no database is there, nor the log of one.

    Called before the store is opened: who closes a file of SQLite's loses all locks on it.

    Raises:
        InvalidArgumentError: it would be overwritten.
    """
    database = path.with_name(path.name.removesuffix("-wal").removesuffix("-shm"))
    if not database.is_file():
        return
    with database.open("rb") as file:
        if file.read(len(_OF_SQLITE)) == _OF_SQLITE:
            raise InvalidArgumentError(f"{path} belongs to a database: name another file")


def require_folder(path: Path) -> None:
    """Return if the folder ``path`` is there or can be made; make none.

    Raises:
        InvalidArgumentError: it is a file, or where it would be nothing may be written.
    """
    whole = path.absolute()
    there = next(one for one in (whole, *whole.parents) if one.exists())
    wrong = None
    if not there.is_dir():
        wrong = errno.EEXIST if there == whole else errno.ENOTDIR
    elif there != whole and not os.access(there, os.W_OK):
        wrong = errno.EACCES
    if wrong is not None:
        raise InvalidArgumentError(f"folder {path}: {os.strerror(wrong)}")


async def chosen_experiment(url: str, experiment: str | None) -> str:
    """Return the experiment to use.

    Raises:
        UnknownExperimentError: there is none of this name, or none at all.
        InvalidArgumentError: there are several and none is named.
    """
    async with open_store(url, read_only=True) as store:
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
    found = [name for name in names if name.removesuffix(TURNS) not in {*names} - {name}]
    return found[0] if len(found) == 1 else None


async def folder_of(base: Path, url: str, experiment: str) -> Path:
    """Return ``base`` for the store's first experiment, a folder in it for another: none shares."""
    async with open_store(url, read_only=True) as store:
        first, *_ = await store.experiments()
    return base if experiment == first else base / quote(experiment, safe="")


async def awaited_experiment(url: str, experiment: str | None) -> str:
    """Return the experiment to use, as soon as somebody has made it; say so as other waits do.

    Raises:
        InvalidArgumentError: there are several and none is named.
    """
    due = time.monotonic() + wait_report_s()
    while True:
        try:
            return await chosen_experiment(url, experiment)
        except (UnknownStoreError, UnknownExperimentError) as error:
            if time.monotonic() >= due:
                told = escaped(f"waits for the first explorer or trainer to make it: {error}")
                sys.stderr.write(f"{told}\n")
                due = time.monotonic() + REPEATED_AFTER * wait_report_s()
        # A store that is not there has nothing to tell of its coming.
        await anyio.sleep(STORE_LOOK_S)
