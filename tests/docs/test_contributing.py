"""The documents send nobody to a file, a test or an error that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trinity_buffer import errors
from trinity_buffer.cli.main import COMMANDS, app

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
CODE = ("trinity_buffer", "migrations", "tools", "benchmarks", "tests")
FILES = [f"/{path.relative_to(ROOT)}" for at in CODE for path in (ROOT / at).rglob("*.py")]
DEFINED = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in re.findall(r"def (\w+)", path.read_text())
}
OTHERS = {
    *("rollout.py", "own.py", "policy_loss_fn_args", "FileNotFoundError", "TypeError", "KeyError"),
    *("IndexError", "OSError", "BrokenPipeError"),
}
"""What `init` and a reader of the README write, and errors of Python's."""


def test_every_path_of_contributing_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = {path for path in re.findall(r"`([\w./]+(?:/|\.\w+))`", text) if "NAME" not in path}
    places = (ROOT, ROOT / "trinity_buffer")
    assert len(named) > 15
    assert [path for path in sorted(named) if not any((at / path).exists() for at in places)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    files = set(re.findall(r"(?<![\w./])[\w./-]+\.py\b", text)) - OTHERS
    gone = [one for one in files if "NAME" not in one and not _is_there(one)]
    tests = set(re.findall(r"\btest_\w+\b(?!\.py|/)", text))
    gone += [one for one in tests if one not in DEFINED and not _is_there(f"{one}.py")]
    named = set(re.findall(r"`(\w+Error)`", text)) - OTHERS
    gone += [one for one in named if not hasattr(errors, one)]
    assert gone == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_have_the_options_that_it_gives_them(page: Path) -> None:
    said = re.findall(r"(?:trinity-buffer |`)([a-z-]+)((?: [^`#\n]*)?)", page.read_text())
    given = {(name, option) for name, rest in said for option in re.findall(r"--[a-z-]+", rest)}
    helps = {name: _help(name) for name, _ in given if name in COMMANDS}
    assert [one for one in given if one[0] in helps and one[1] not in helps[one[0]]] == []


def _help(name: str) -> str:
    return CliRunner().invoke(app, [name, "--help"]).output


def _is_there(path: str) -> bool:
    return any(file.endswith(f"/{path}") for file in FILES)
