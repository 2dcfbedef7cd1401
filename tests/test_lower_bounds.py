"""What `pyproject.toml` requires: its oldest releases, and the locks that repeat it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = ("test_writing.py", "test_committing.py", "test_planning.py", "test_ready_rows.py")


def oldest() -> list[str]:
    """Return each requirement at its lower bound, but torch: another one pulls gigabytes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["postgresql"]]
    return [bound.replace(">=", "==", 1) for bound in declared if not bound.startswith("torch")]


@pytest.mark.long
def test_the_contract_holds_on_the_oldest_releases(tmp_path: Path) -> None:
    """They lie before the environment's own; their warnings, of newer neighbours, do not count."""
    wanted = oldest()
    assert len(wanted) > 15
    pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
    subprocess.run((*pip, "--target", str(tmp_path / "oldest"), *wanted), check=True)
    options = ("-q", "-p", "no:cacheprovider", "-m", "not long", "-o", "filterwarnings=default")
    done = subprocess.run(
        (
            sys.executable,
            "-m",
            "pytest",
            *options,
            f"--basetemp={tmp_path / 'tests'}",  # several that tidy up one folder trip
            *(f"tests/contract/{name}" for name in CONTRACT),
        ),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "oldest")},
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    assert passed, done.stdout
    assert int(passed[1]) > 50, done.stdout


# The environment that builds wheels installs them with what they require.
LOCKS = [
    lock
    for lock in sorted(ROOT.glob("tests/outside/*/requirements.lock"))
    if lock.parent.name != "wheels"
]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.parent.name)
def test_an_environment_of_others_has_all_that_the_package_requires(lock: Path) -> None:
    """They are installed without dependencies, so that nothing but the lock decides."""
    locked = {line.partition("==")[0].lower() for line in lock.read_text().splitlines()}
    required = {re.split(r"[^\w-]", bound)[0].lower() for bound in oldest()}
    servers = {"psycopg"}  # an extra: the packages of others are tested on SQLite
    assert {name.replace("_", "-") for name in required - servers} <= {
        name.replace("_", "-") for name in locked
    }
