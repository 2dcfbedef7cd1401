"""Classes of one's own in the current folder, or in that of the run, by their path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from tests.cli.calling import Cli
from tests.contract.making import group, opened

MODULE = """
from trinity_buffer.algorithm.add_strategy import GRPOAddStrategy

class Mine(GRPOAddStrategy):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the current folder, which is not on the path."""
    name = f"lies_here_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


async def _recorded(url: str, **config: object) -> None:
    async with opened(url, rollouts_per_group=4, **config) as experiment:
        await experiment.writer("e0").write(group("b0"))


@pytest.mark.parametrize("path", ["{}.Mine", "{}:Mine"])
def test_a_strategy_in_the_current_folder_is_found(
    cli: Cli, new_sqlite_url: str, module: str, path: str
) -> None:
    anyio.run(_recorded, new_sqlite_url)
    words = ("--store", new_sqlite_url, "--name", "own")
    ended = cli("reannotate", *words, "--strategy", path.format(module))
    assert ended.out.startswith("set own: 4 annotated, 0 rejected"), ended.err
    sys.modules.pop(module)
    sys.path[:] = [place for place in sys.path if place != str(Path.cwd())]
    assert " 0 annotated, 0 rejected" in cli("annotate", *words).out, "the set's own strategy"


def test_a_strategy_beside_the_file_of_the_run_is_found(
    cli: Cli, new_sqlite_url: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    async def record() -> None:
        await _recorded(new_sqlite_url, folder=str(tmp_path), strategy=f"{module}.Mine")

    anyio.run(record)
    ended = cli("annotate", "--store", new_sqlite_url)
    assert " 4 annotated, 0 rejected" in ended.out, ended.err


def test_names_alone_leave_the_path_as_it_is(cli: Cli, new_sqlite_url: str, module: str) -> None:
    anyio.run(_recorded, new_sqlite_url)
    ended = cli("reannotate", "--store", new_sqlite_url, "--name", "own", "--strategy", "grpo")
    assert ended.code == 0, ended.err
    assert str(Path.cwd()) not in sys.path
