"""What is started again, and what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from tests.cli.calling import Cli
from trinity_buffer import open_store
from trinity_buffer.cli.supervisor import (
    ENDS_WITH_PARENT,
    GIVEN_UP,
    Child,
    Supervisor,
    exit_code_of,
)
from trinity_buffer.errors import (
    CheckpointError,
    InvalidArgumentError,
    LeaseLostError,
    NonFiniteError,
    TrinityBufferError,
    UnknownExperimentError,
)


def given_up(folder: Path, code: int) -> Child:
    """Return a process that ends with ``code`` as soon as it starts, once it is given up."""
    command = [sys.executable, "-c", f"print('error: the disk is full'); raise SystemExit({code})"]
    supervisor = Supervisor({"trainer": command}, folder)
    supervisor.start()
    while (broken := supervisor.tend()) is None:
        for child in supervisor.children:
            assert child.process is not None
            child.process.wait()
    return broken


@pytest.mark.parametrize(("code", "restarts"), [(2, 0), (GIVEN_UP, 0), (1, 3)])
def test_who_was_refused_or_gives_up_is_not_started_again(
    code: int, restarts: int, tmp_path: Path
) -> None:
    broken = given_up(tmp_path, code)
    assert (broken.name, broken.restarts) == ("trainer", restarts)
    assert broken.last_line() == "error: the disk is full"


@pytest.mark.parametrize(
    ("error", "alone", "supervised"),
    [
        (InvalidArgumentError("x"), 2, GIVEN_UP),
        (UnknownExperimentError("x"), 2, GIVEN_UP),
        (NonFiniteError("x"), 1, GIVEN_UP),
        (LeaseLostError("x"), 2, 1),
        (CheckpointError("x"), 2, 1),
    ],
)
def test_a_supervised_process_says_whether_a_restart_would_mend_its_error(
    error: TrinityBufferError, alone: int, supervised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENDS_WITH_PARENT, raising=False)
    assert exit_code_of(error) == alone
    monkeypatch.setenv(ENDS_WITH_PARENT, "1")
    assert exit_code_of(error) == supervised


WORKS = "import time; print('starts', flush=True); print('a step', flush=True); time.sleep(60)"
STARTS = "import time; print('starts', flush=True); time.sleep(60)"


def test_chaos_lets_its_victim_do_something_first(tmp_path: Path) -> None:
    commands = {name: [sys.executable, "-c", code] for name, code in (("w", WORKS), ("s", STARTS))}
    supervisor = Supervisor(commands, tmp_path, chaos_every_s=0.0)
    supervisor.start()
    try:
        while supervisor.kills < 3:
            assert supervisor.tend() is None
        works, starts = supervisor.children
        assert (works.kills, starts.kills) == (supervisor.kills, 0)
    finally:
        supervisor.stop(0.0)


def test_a_child_whose_parent_died_while_it_imported_ends(tmp_path: Path) -> None:
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "trinity_buffer", "stats", "--store", str(tmp_path / "a.db")],
        env={**os.environ, ENDS_WITH_PARENT: gone.stdout.strip()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_trainer_that_trained_nothing_has_failed(
    cli: Cli, new_sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENDS_WITH_PARENT, raising=False)

    async def empty() -> None:
        async with open_store(new_sqlite_url) as store:
            await store.experiment("run", config={"algorithm": "rloo", "model": {}})

    anyio.run(empty)
    code, _, err = cli("train", "--store", new_sqlite_url)
    assert code == 1
    assert err.startswith("error: no step was trained of run: nothing is ready for the trainer")
    assert "What a trainer rejected it never takes again" in err
