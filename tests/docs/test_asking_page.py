"""The page of questions names commands that there are, with options that they have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trinity_buffer.cli.main import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "asking.md").read_text()
ASKED = sorted(set(re.findall(r"`trinity-buffer ([a-z]+)([^`]*)`", PAGE)))
FOLDED = (
    *("stats", "steps", "blame", "why", "groups", "show", "rejected", "leases", "staleness"),
    *("diff", "search", "events", "export"),
)


@pytest.mark.parametrize(("command", "rest"), ASKED)
def test_a_question_of_the_page_is_a_command(command: str, rest: str) -> None:
    answer = CliRunner().invoke(app, [command, "--help"])
    assert answer.exit_code == 0, answer.output
    assert [one for one in re.findall(r"--[a-z-]+", rest) if one not in answer.output] == []
    assert ("--as-of" in answer.output) == (command in FOLDED)
    assert ("--json" in answer.output) == (command not in ("top", "report", "track"))
