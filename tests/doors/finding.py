"""The doors of the repository: every command that a Makefile, a page, a help or a script offers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import typer
from typer.core import TyperGroup

from trinity_buffer.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"json", "mermaid", "python", "sh", "sql", "text", "toml", "yaml"}
TERMINALS = "sh terminals"
"""A block of which each line is meant for a terminal of its own."""
OWN = "sh own"
"""A block that wants the program above it: `tests/docs/test_readme.py` runs both, with kills."""


class Block(NamedTuple):
    """What a page shows between two fences."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        lines = [line.split(" #")[0].strip() for line in self.text.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def targets() -> list[str]:
    """Return the targets of which `make help` speaks."""
    found = re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(found) > 5
    return found


def blocks() -> list[Block]:
    """Return every fenced block of the README and the documents."""
    return [block for page in PAGES for block in blocks_of(page)]


def blocks_of(page: Path) -> list[Block]:
    found, opened = [], None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            if opened is not None:
                found[-1] = found[-1]._replace(text=found[-1].text + line + "\n")
        elif opened is None:
            opened = line[3:].strip()
            found.append(Block(page, number, opened, ""))
        else:
            opened = None
    assert opened is None, f"{page.name}: a block is never closed"
    return found


def shell_blocks() -> list[Block]:
    """Return the blocks that a reader would type into a shell."""
    found = [b for b in blocks() if b.info.split()[:1] == ["sh"] and b.info != OWN]
    assert len(found) > 3
    return found


ON_PAGES = {command for block in shell_blocks() for command in block.commands}
"""They run in test_blocks, and nowhere else."""


def helps() -> dict[str, str]:
    """Return what the help of each ``trinity-buffer`` command says, on one line."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    context = typer.Context(group)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: " ".join(((c and c.help) or "").split()) for name, c in commands.items()}


def examples() -> dict[str, str]:
    """Return, for each command whose help has an ``Example:``, what it says to type."""
    found = helps().items()
    return {name: text.split("Example: ")[1] for name, text in found if "Example: " in text}


def scripts(folder: str) -> list[Path]:
    """Return the files of a folder that can be run."""
    files = sorted((ROOT / folder).rglob("*.py"))
    found = [f for f in files if '__name__ == "__main__"' in f.read_text() or f.stem == "__main__"]
    assert len(found) > 2
    return found


def usages(script: Path) -> list[str]:
    """Return the command lines that the docstring of a script shows."""
    docstring = script.read_text().split('"""')[1]
    lines = [line.split(" #")[0].strip() for line in docstring.splitlines()]
    return [line for line in lines if line.startswith("python ")]
