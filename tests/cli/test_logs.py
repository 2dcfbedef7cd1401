"""Log records of this package go where the environment says; the root logger stays as it is."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_buffer import StepReport
from trinity_buffer.cli.escaping import FORMAT, LEVEL, set_up_logs
from trinity_buffer.cli.roles import line_of
from trinity_buffer.errors import InvalidArgumentError

OURS = logging.getLogger("trinity_buffer")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    handlers, level, propagate = [*OURS.handlers], OURS.level, OURS.propagate
    yield
    OURS.handlers[:], OURS.propagate = handlers, propagate
    OURS.setLevel(level)


def test_a_record_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs({FORMAT: "json"})
    inner = logging.getLogger("trinity_buffer.store.somewhere")
    inner.info("not asked for")
    inner.warning("a %s\n\x1b[2J", "step")
    try:
        raise StopIteration("the end")  # noqa: TRY301 - to have one
    except StopIteration:
        inner.exception("broken")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"]) == ("WARNING", inner.name)
    assert first["message"] == "a step\n\x1b[2J"
    assert "error" not in first
    assert second["error"].endswith("StopIteration: the end")


def test_the_level_is_the_lowest_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs({LEVEL: "debug"})
    logging.getLogger("trinity_buffer.x").debug("\x1b[2J")
    assert capsys.readouterr().err == "DEBUG trinity_buffer.x: \\x1b[2J\n"


def test_a_name_cannot_pretend_to_be_another_record(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs({LEVEL: "warning"})
    logging.getLogger("trinity_buffer.x").warning("actor %s", "e0\nERROR trinity_buffer: all lost")
    told = capsys.readouterr().err
    assert told == "WARNING trinity_buffer.x: actor e0\\nERROR trinity_buffer: all lost\n"


def test_a_traceback_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs({LEVEL: "warning"})
    try:
        raise StopIteration("the end")  # noqa: TRY301 - to have one
    except StopIteration:
        logging.getLogger("trinity_buffer.x").exception("broken")
    first, *_, last = capsys.readouterr().err.splitlines()
    assert (first, last) == ("ERROR trinity_buffer.x: broken", "StopIteration: the end")


@pytest.mark.parametrize("environment", [{}, {FORMAT: "json"}, {LEVEL: "debug"}])
def test_the_root_logger_and_those_of_others_stay_as_they_are(environment: dict[str, str]) -> None:
    root = logging.getLogger()
    before = ([*root.handlers], root.level)
    set_up_logs(environment)
    assert ([*root.handlers], root.level) == before
    assert bool(OURS.handlers) == bool(environment)


@pytest.mark.parametrize("environment", [{FORMAT: "xml"}, {LEVEL: "loud"}])
def test_what_a_variable_cannot_mean_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(environment.values()))):
        set_up_logs(environment)


def test_the_command_reads_the_environment(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trinity_buffer", "--help"],
        env={FORMAT: "xml"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {FORMAT}='xml': it is text or json\n"


def test_a_line_of_a_step_keeps_small_numbers() -> None:
    report = StepReport(1, 0.5, 1.0, 1.0, 0.0, 8, 64, 0.1, False, True, metrics={"lr": 1.23456e-6})
    assert line_of(report).endswith('{"lr": 1.235e-06}')
