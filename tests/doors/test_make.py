"""Each target of the Makefile does what `make help` says, in a copy of the repository."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.doors.finding import ON_PAGES, ROOT, targets
from tests.doors.sizes import sized
from tests.doors.workshop import run

ELSEWHERE = {
    "check": "runs this very test; here its recipe is only read",
    "long": "runs this very test, too",
    "torture": "its module runs in tests/torture",
    "mutants": "runs all tests first; tests/benchmarks calls it in a small repository",
    "setup": "has a test of its own below, in a copy without an environment",
}
TARGETS = [
    target
    for target in targets()
    if target not in ELSEWHERE and f"make {target}" not in ON_PAGES  # those run in test_blocks
]


def test_every_target_is_told_by_help() -> None:
    (phony,) = [t for t in (ROOT / "Makefile").read_text().splitlines() if t.startswith(".PHONY:")]
    assert sorted(phony.split()[1:]) == sorted(targets())


def test_the_targets_that_run_elsewhere_exist() -> None:
    assert set(ELSEWHERE) <= set(targets())


@pytest.mark.parametrize("target", targets())
def test_make_can_read_a_target(target: str) -> None:
    """What a dry run prints is a recipe; a prerequisite that is missing ends it."""
    assert run(f"make --no-print-directory --dry-run {target}", ROOT).strip()


def test_setup_says_what_it_installs_and_how_long_that_takes() -> None:
    recipe = run("make --no-print-directory --dry-run -W requirements.lock setup", ROOT)
    assert re.search(r"^echo '.*requirements\.lock.* GB.* minutes'$", recipe, re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs(repository: Path, target: str) -> None:
    run(sized(f"make {target}"), repository)


@pytest.mark.long
def test_setup_builds_an_environment_in_a_fresh_copy(repository: Path) -> None:
    """The packages are found where this process has them: what pip would fetch, it does not."""
    shutil.rmtree(repository / ".venv")
    run("python -m venv --without-pip .venv", repository)
    (site,) = (repository / ".venv").glob("lib/*/site-packages")
    here = Path(pytest.__file__).parents[1]
    (site / "borrowed.pth").write_text(f"{here}\n")
    run("PIP_NO_INDEX=1 make setup", repository)
    said = run(
        ".venv/bin/python -c 'import trinity_buffer; print(trinity_buffer.__file__)'", repository
    )
    assert said.strip() == str(repository / "trinity_buffer" / "__init__.py")
    assert (repository / ".venv" / ".ready").exists()
