"""Each shell block of the README and the documents runs, line after line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doors.finding import LANGUAGES, TERMINALS, Block, blocks, scripts, shell_blocks, usages
from tests.doors.sizes import sized, united
from tests.doors.workshop import run, run_in_terminals

SHELL = shell_blocks()
IN_DOCSTRINGS = [line for script in scripts("benchmarks") for line in usages(script)]


def test_every_block_names_its_language() -> None:
    """What is typed into a shell is `sh`: a block without a word for it would never run here."""
    unknown = [b.name for b in blocks() if b.info.split()[:1] not in ([one] for one in LANGUAGES)]
    assert not unknown


@pytest.mark.parametrize("language", sorted(LANGUAGES - {"sh"}))
def test_no_command_hides_in_a_block_of_another_language(language: str) -> None:
    prompts = ("$ ", "make ", "python ", "pip ", "trinity-buffer ")
    hidden = [
        f"{block.name}: {line}"
        for block in blocks()
        if block.info == language
        for line in block.text.splitlines()
        if line.startswith(prompts)
    ]
    assert not hidden


@pytest.mark.long
@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_a_shell_block_runs(repository: Path, block: Block) -> None:
    commands = [sized(command) for command in united(block.commands, IN_DOCSTRINGS)]
    assert commands
    if block.info == TERMINALS:
        run_in_terminals(commands, repository)
    else:
        run("\n".join(commands), repository)
