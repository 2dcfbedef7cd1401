"""Each tool and each benchmark runs as the lines of its docstring say, small."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.doors.finding import ON_PAGES, ROOT, scripts, usages
from tests.doors.sizes import known, sized, united
from tests.doors.workshop import run

TOOLS, BENCHMARKS = scripts("tools"), scripts("benchmarks")
ELSEWHERE = {
    "growth_role": "processes that `benchmarks.growth` starts",
    "latency_role": "processes that `benchmarks.run --only latency` starts",
    "learning": "runs in test_blocks and in tests/benchmarks",
    "measurement": "processes that `benchmarks.peers` starts",
    "mutants": "runs all tests first; tests/benchmarks calls it in a small repository",
    "torture": "runs in tests/torture",
}


def lines_of(files: list[Path]) -> list[str]:
    lines = [line for file in files if file.stem not in ELSEWHERE for line in usages(file)]
    elsewhere = known(ON_PAGES)
    return united([line for line in lines if known([line]).isdisjoint(elsewhere)])


@pytest.mark.parametrize("script", [*TOOLS, *BENCHMARKS], ids=lambda script: script.stem)
def test_a_script_shows_how_to_run_it(script: Path) -> None:
    name = script.relative_to(ROOT).as_posix()
    module = name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    called = re.compile(rf"python (-m {re.escape(module)}|{re.escape(name)})( |$)")
    assert usages(script)
    assert [line for line in usages(script) if not called.match(line)] == []


@pytest.mark.parametrize("line", lines_of(TOOLS))
def test_a_tool_runs_as_its_docstring_says(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    _, script, *arguments = shlex.split(line)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("line", lines_of(BENCHMARKS))
def test_a_benchmark_runs_as_its_docstring_says(repository: Path, line: str) -> None:
    run(sized(line), repository)
