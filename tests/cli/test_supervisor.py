"""What is started again, and what is not."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from tests.cli.calling import Cli
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
from trinity_buffer.pipeline.store import open_store


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


def test_a_trainer_that_trained_nothing_has_failed(
    cli: Cli, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENDS_WITH_PARENT, raising=False)

    async def empty() -> None:
        async with open_store(sqlite_url) as store:
            await store.experiment("run", config={"algorithm": "rloo", "model": {}})

    anyio.run(empty)
    code, _, err = cli("train", "--store", sqlite_url)
    assert code == 1
    assert err.startswith("error: no step was trained of run: nothing is ready for the trainer")
