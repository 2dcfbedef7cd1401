"""Each command's `--help` shows an example, and the example runs after a demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doors.finding import examples, helps
from tests.doors.sizes import sized
from tests.doors.workshop import call, run, warm_environment

EXAMPLES = examples()
IN_PROCESSES = {"demo"}
"""They start processes of their own."""
WITH_SERVERS = {"record", "serve", "sync-weights"}
"""They serve, or talk to a server; `tests/explorer`, `tests/recorder` and `tests/web` have one."""
WITH_PACKAGES = {"track"}
"""They need a package that is installed for `make outside` alone; `tests/outside/tensorboard`."""


def test_every_command_shows_an_example() -> None:
    assert sorted(EXAMPLES) == sorted(helps())


@pytest.mark.parametrize(
    "name", sorted(EXAMPLES.keys() - IN_PROCESSES - WITH_SERVERS - WITH_PACKAGES)
)
def test_the_example_of_a_help_runs(site: Path, name: str) -> None:
    code, said = call(EXAMPLES[name])
    assert code == 0, f"{EXAMPLES[name]}\n{said}"


def test_a_loss_without_a_gradient_has_no_shares_to_sort_by(site: Path) -> None:
    code, said = call("trinity-buffer blame 2 --sort loss-share")
    assert (code, "2 rows, by slot: the loss had no gradient" in said) == (0, True), said


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(IN_PROCESSES))
def test_the_example_of_a_help_runs_in_processes(warm: Path, tmp_path: Path, name: str) -> None:
    warm_environment(tmp_path / ".venv", warm)
    assert "lost 0, duplicated 0" in run(sized(EXAMPLES[name]), tmp_path)
