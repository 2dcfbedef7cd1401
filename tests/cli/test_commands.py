"""The table of commands: each starts with its own modules alone."""

from __future__ import annotations

import subprocess
import sys
from inspect import getdoc

import pytest
import typer

from tests.cli.calling import Cli
from trinity_buffer.cli.main import COMMANDS, app, summary_of


def told_by(last: str, *words: str) -> list[str]:
    """Return what a fresh ``trinity-buffer`` says when it ends, asked for ``last``."""
    code = (
        "import atexit, gc, sys\n"
        "from trinity_buffer.cli.main import run_command\n"
        f"atexit.register(lambda: print({last}))\n"
        f"sys.argv = {['trinity-buffer', *words]!r}\n"
        "run_command()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.stdout.decode().splitlines()[-1].split()


def loaded_by(*words: str) -> set[str]:
    """Return the modules that a fresh ``trinity-buffer`` holds when it ends."""
    return set(told_by("*sys.modules", *words))


def test_the_help_loads_neither_sql_nor_tables_nor_tensors() -> None:
    heavy = {"sqlalchemy", "rich", "numpy", "msgpack", "torch", "pydantic", "anyio"}
    assert not heavy & loaded_by("--help")


def test_a_question_loads_what_it_asks_with_and_no_more() -> None:
    modules = loaded_by("stats", "--store", "sqlite:///not-there.db")
    assert "sqlalchemy" in modules
    assert not {"torch", "alembic", "pyarrow", "psycopg"} & modules
    assert "trinity_buffer.cli.run" not in modules


@pytest.mark.long
@pytest.mark.parametrize("command", ["show", "groups", "steps", "why", "tokens"])
def test_a_question_about_tensors_loads_no_torch(command: str) -> None:
    words = (command, "b/0/0/0/") if command in {"show", "why", "tokens"} else (command,)
    assert "torch" not in loaded_by(*words, "--store", "sqlite:///not-there.db")


def test_a_question_loads_the_driver_of_its_own_database_and_no_orm(store_url: str) -> None:
    modules = loaded_by("stats", "--store", store_url)
    of_server = {"sqlalchemy.dialects.postgresql", "psycopg"} & modules
    assert len(of_server) == (0 if store_url.startswith("sqlite") else 2)
    assert "sqlalchemy.engine" in modules
    assert not {"sqlalchemy.orm", "alembic", "numpy"} & modules


def test_what_a_command_loads_is_never_walked_for_garbage() -> None:
    asked = ("stats", "--store", "sqlite:///not-there.db")
    kept, collects = told_by("gc.get_freeze_count(), gc.isenabled()", *asked)
    assert int(kept) > 50_000
    assert collects == "True"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says_of_itself(name: str) -> None:
    group: typer.core.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    command = group.get_command(typer.Context(group), name)
    assert summary_of(name) == (getdoc(command and command.callback) or "").splitlines()[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does_and_the_help_shows_no_docstring(name: str) -> None:
    group: typer.core.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    command = group.get_command(typer.Context(group), name)
    assert command is not None
    assert [param.name for param in command.params if not getattr(param, "help", None)] == []
    assert "Args:" not in (command.help or "")


def test_the_help_shows_every_command(cli: Cli) -> None:
    told = " ".join(cli("--help").out.split())
    assert all(f"{name} {summary_of(name)}" in told for name in COMMANDS)


def test_a_mistyped_command_is_told_what_was_meant(cli: Cli) -> None:
    ended = cli("stat")
    assert ended.code == 2
    assert "Did you mean 'stats'?" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("annotate", "--strategy", "grpo", "--strategy", "opmd"), "several are one set, as "),
        (("stats", "--store", ""), "--store is empty: give it a value, or leave it out"),
        (("replay", "--loss="), "--loss is empty: give it a value, or leave it out"),
    ],
)
def test_an_option_that_would_mean_something_else_is_refused(
    cli: Cli, words: tuple[str, ...], said: str
) -> None:
    ended = cli(*words)
    assert (ended.code, said in ended.err) == (2, True), ended.err


def test_what_may_be_repeated_is_not_refused(cli: Cli) -> None:
    ended = cli("explore", "--actor", "e", "--set", "a=1", "--set", "b=2", "--store", "x.db")
    assert "there is no key 'a', 'b'" in ended.err
