"""The fixture that calls the command."""

from __future__ import annotations

import sys

import pytest

from tests.cli.calling import Cli, Ended
from trinity_buffer.cli.main import run_command


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command in this process, as a shell would."""
    monkeypatch.delenv("TRINITY_BUFFER_STORE", raising=False)

    def run(*args: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["trinity-buffer", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            run_command()
        said = capsys.readouterr()
        return Ended(int(end.value.code or 0), said.out, said.err)

    return run
