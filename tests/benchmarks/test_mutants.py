"""A sample of mutants is drawn, run and told: which does no test notice?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import mutant_tests, mutants

FILES = {
    "pyproject.toml": """\
[tool.mutmut]
source_paths = ["package"]
process_isolation = "forkserver"
pytest_add_cli_args_test_selection = ["tests"]
[tool.pytest.ini_options]
addopts = ["--import-mode=importlib"]
""",
    "package/__init__.py": "",
    "package/numbers.py": """\
def double(x: int) -> int:
    return x * 2

def at_least_zero(x: int) -> int:
    return x if x > 0 else 0

def unused(x: int) -> int:
    return x - 1
""",
    "tests/test_numbers.py": """\
from package.numbers import at_least_zero, double

def test_double() -> None:
    assert double(3) == 6

def test_at_least_zero() -> None:
    assert at_least_zero(1) == 1
    assert at_least_zero(-1) == 0
""",
    "docs/proofs/mutants.md": "",
}
SAME = "package.numbers.x_at_least_zero: `return x if x > 0 else 0` → `return x if x >= 0 else 0`"
NAMES = [f"package.numbers.x_double__mutmut_{number}" for number in range(40)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository, of whose mutants some survive."""
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def test_a_smaller_sample_begins_a_larger_one() -> None:
    assert mutants.drawn(NAMES, 7, 5) == mutants.drawn(NAMES, 7, 30)[:5]
    assert sorted(mutants.drawn(NAMES, 7, 100)) == sorted(NAMES)


def test_another_seed_draws_another_sample() -> None:
    assert mutants.drawn(NAMES, 7, 5) != mutants.drawn(NAMES, 8, 5)


def test_what_is_drawn_stays_when_others_come_or_go() -> None:
    first = mutants.drawn(NAMES, 7, 5)
    assert mutants.drawn([name for name in NAMES if name != first[2]], 7, 4) == [
        *first[:2],
        *first[3:],
    ]


@pytest.mark.long
def test_survivors_are_told_until_they_are_killed_or_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mutants.main(["--record"], root) == 1
    told = capsys.readouterr().out
    assert f"survived: {SAME}" in told
    assert "no tests: package.numbers.x_unused: `return x - 1` → `return x + 1`" in told
    first = json.loads((root / "docs" / "proofs" / "mutants.jsonl").read_text())
    assert {"survived", "no tests", "killed"} <= set(first)

    more = "\ndef test_zero() -> None:\n    from package.numbers import unused\n"
    with (root / "tests" / "test_numbers.py").open("a") as file:
        file.write(f"{more}    assert at_least_zero(0) == 0 and unused(2) == 1\n")
    (root / "docs" / "proofs" / "mutants.md").write_text(f"- {SAME}: zero is zero.\n")
    assert mutants.main(["--again"], root) == 0
    assert "1 equivalent" in capsys.readouterr().out


ORDER = {"narrow": (2, 0.1), "slow": (9, 50.0), "wide": (30, 0.2), "last": (31, 0.1)}


def test_the_narrowest_tests_come_first_and_none_begins_after_the_budget() -> None:
    assert mutant_tests.chosen(["last", "wide", "slow", "narrow"], ORDER, 50.2) == [
        "narrow",
        "slow",
        "wide",
    ]
    assert mutant_tests.chosen(["last", "wide", "slow", "narrow"], ORDER, 50.1) == [
        "narrow",
        "slow",
    ]


def test_a_test_that_is_not_known_yet_is_run() -> None:
    assert mutant_tests.chosen(["wide", "new"], ORDER, 0.1) == ["new", "wide"]


def test_what_mutmut_learns_of_a_test_is_kept_small(tmp_path: Path) -> None:
    called = {"f": ["a", "b"], "g": ["b"]}
    stats = {"tests_by_mangled_function_name": called, "duration_by_test": {"a": 0.5, "b": 2.0}}
    (tmp_path / mutant_tests.STATS).write_text(json.dumps(stats))
    mutant_tests.write_order(tmp_path)
    kept = json.loads((tmp_path / mutant_tests.ORDER).read_text())
    assert kept == {"a": [1, 0.5], "b": [2, 2.0]}
