"""A benchmark, a tool, a target, a shell block, a name: each, broken, turns its check red.

What must fail is what `make check` runs: the tests of the doors themselves, in a copy in which one
door does not open any more, and the checkers of the recipe.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.doors import test_blocks, test_make, test_scripts
from tests.doors.finding import blocks_of, usages
from tests.doors.workshop import copy_of_the_repository, run

MAKEFILE = Path(__file__).parents[2] / "Makefile"
CHECKERS = ("mypy", "vulture", "lint-imports")


def broken(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.fixture
def repository(warm: Path, tmp_path: Path) -> Path:
    """A copy of the repository, without a run: nothing here gets so far."""
    return copy_of_the_repository(tmp_path, warm)


@contextmanager
def red(says: str) -> Iterator[None]:
    """Fail unless the body fails, and says so."""
    with pytest.raises(BaseException, match=says) as failure:  # pytest's own are no Exception
        yield
    assert not isinstance(failure.value, KeyboardInterrupt)


@pytest.mark.long
def test_a_benchmark_that_asks_for_what_is_gone_is_found(repository: Path) -> None:
    script = repository / "benchmarks" / "verify.py"
    broken(script, "\ndef main(", "\nfrom trinity_buffer.pipeline import gone\n\n\ndef main(")
    with red("cannot import name 'gone'"):
        test_scripts.test_a_benchmark_runs_as_its_docstring_says(repository, usages(script)[0])


@pytest.mark.long
def test_a_tool_that_asks_for_what_no_store_has_is_found(
    repository: Path,
    sqlite_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (repository / "runs").mkdir()
    shutil.copy(sqlite_store, repository / "runs" / "demo.db")
    monkeypatch.chdir(repository)
    script = repository / "tools" / "inspect_store.py"
    broken(script, "store.experiments(", "store.all_experiments(")
    monkeypatch.setattr(test_scripts, "ROOT", repository)
    with red("all_experiments"):
        test_scripts.test_a_tool_runs_as_its_docstring_says(
            repository, monkeypatch, capsys, usages(script)[0]
        )


@pytest.mark.long
def test_a_target_whose_module_is_not_there_is_found(repository: Path) -> None:
    broken(repository / "Makefile", "-m benchmarks.run ", "-m benchmarks.runs ")
    with red(r"No module named benchmarks\.runs"):
        test_make.test_a_target_runs(repository, "bench")


@pytest.mark.long
def test_a_shell_block_with_an_option_that_is_not_there_is_found(repository: Path) -> None:
    page = repository / "docs" / "training.md"
    broken(page, "trinity-buffer explore ", "trinity-buffer explore --eagerly ")
    (block,) = (one for one in blocks_of(page) if "--eagerly" in one.text)
    with red("--eagerly"):
        test_blocks.test_a_shell_block_runs(repository, block)


@pytest.mark.long
@pytest.mark.parametrize(
    ("checker", "line", "says"),
    [
        ("vulture", "TRUTH = 1", "unused variable 'TRUTH'"),
        ("lint-imports", "import trinity_buffer.experience", "BROKEN"),
    ],
)
def test_what_a_checker_of_the_recipe_forbids_is_found(
    repository: Path, checker: str, line: str, says: str
) -> None:
    broken(repository / "trinity_buffer" / "identity.py", "\n@dataclass", f"\n{line}\n\n@dataclass")
    with red(says):
        run(checker, repository)


def test_make_check_runs_the_checkers_and_all_tests() -> None:
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", MAKEFILE.read_text(), re.MULTILINE)
    for checker in CHECKERS:
        assert f"\t$(BIN)/{checker}\n" in recipe
    assert '\t$(LONG) -m "not outside" $(ARGS)\n' in recipe
