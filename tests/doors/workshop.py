"""Where the doors are opened: a copy of the repository, or a folder with a small run in it."""

from __future__ import annotations

import fcntl
import io
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from tests.doors.finding import ROOT
from tests.warm_python import make_python
from trinity_buffer.cli.main import run_command

SMALL_RUN = """\
groups_per_batch = 4
groups_per_step = 1
rollouts_per_group = 2
max_steps = 40
max_staleness = 1000
max_queued_groups = 1000
commit_every_steps = 5

[model]
width = 8
layers = 1
heads = 1

[evaluation]
every_steps = 40
num_eval_samples = 8
"""
"""Forty steps in two seconds: after it, `runs/` looks as after a demo."""

MAIN = "from trinity_buffer.cli.main import main\n\nmain()\n"
LIMIT_S = 900.0


def small_run(folder: Path) -> None:
    """Leave in ``folder`` what a demo leaves: ``runs/demo.db``, its checkpoints and receipts."""
    (folder / "runs").mkdir(parents=True)
    (folder / "run.toml").write_text(SMALL_RUN)
    at = "--store runs/demo.db --experiment demo"
    with _working_in(folder):
        for command in (
            f"explore {at} --config run.toml --actor e0 --batches 10 --acknowledge runs/demo.acks",
            f"annotate {at}",
            f"train {at} --follow",
            f"reannotate {at} --strategy grpo --set epsilon=1e-4 --name grpo-4",
        ):
            code, said = call(f"trinity-buffer {command}")
            assert code == 0, said


def made_once(shared: Path) -> Path:
    """Return the folder with the small run; of all test processes, the first one makes it.

    It is made where it stays: the log names its checkpoints by their full paths.
    """
    folder, made = shared / "small-run", shared / "small-run.made"
    with (shared / "small-run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            small_run(folder)
            made.touch()
    return folder


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def call(command: str) -> tuple[int, str]:
    """Run a ``trinity-buffer`` command in this process; return its exit code and what it said."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", shlex.split(command)),
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        try:
            run_command()
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    raise AssertionError(f"{command} did not end with an exit code")


def copy_of_the_repository(folder: Path, warm: Path) -> Path:
    """Return a copy of the repository in ``folder``, with the environment of this process.

    Its ``.venv`` counts as built, whatever the times of the files: nothing is installed. Its Python
    has a process from the server at ``warm``. Compiled modules come along, as valid there as here:
    a process compiles the package for three seconds.
    """
    copy = folder / "repository"
    hidden = shutil.ignore_patterns(".*", "runs", "dist", "mutants", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=hidden)
    (copy / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".ready":
            (copy / ".venv" / entry.name).symlink_to(entry)
    (copy / ".venv" / ".ready").touch()
    warm_environment(copy / ".venv", warm)
    return copy


def warm_environment(folder: Path, warm: Path) -> None:
    """Give the environment in ``folder`` the programs of this one, with a Python from ``warm``."""
    programs = folder / "bin"
    programs.unlink(missing_ok=True)
    programs.mkdir(parents=True)
    for program in (Path(sys.prefix) / "bin").iterdir():
        if program.name not in ("python", "trinity-buffer"):
            (programs / program.name).symlink_to(program)
    make_python(programs / "python", programs / "python3", warm)
    command = programs / "trinity-buffer"
    command.write_text(f"#!{programs / 'python'}\n{MAIN}")
    command.chmod(0o755)


def environment(prefix: Path = Path(sys.prefix)) -> dict[str, str]:
    """Return the environment of a user's shell in which the virtual environment is active."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "MAKE", "MFLAGS"))}
    kept.pop("TRINITY_BUFFER_STORE", None)
    return {**kept, "PATH": f"{prefix / 'bin'}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}


def run(command: str, folder: Path) -> str:
    """Run a command line in ``folder`` as a shell would; return what it said, or fail with it."""
    return said_by(start(command, folder), command)


def run_in_terminals(commands: list[str], folder: Path) -> list[str]:
    """Run each command in a terminal of its own, begun when the one before has said something."""
    running: list[subprocess.Popen[str]] = []
    first: list[str] = []
    try:
        for command in commands:
            running.append(start(command, folder))
            said = running[-1].stdout
            assert said is not None
            first.append(said.readline())
        both = zip(running, commands, strict=True)
        return [line + said_by(*one) for line, one in zip(first, both, strict=True)]
    finally:
        for process in running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command line in ``folder`` as a shell would."""
    own = folder / ".venv"
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment(own if own.exists() else Path(sys.prefix)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said_by(process: subprocess.Popen[str], command: str) -> str:
    """Wait for a process; return what it said, or fail with it."""
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        pytest.fail(f"{command} did not end within {LIMIT_S:g} s:\n{said[-4000:]}")
    if process.returncode:
        pytest.fail(f"{command} ended with {process.returncode}:\n{said[-4000:]}")
    return said
