"""Other people's packages: which releases are allowed, and what is said where an import fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from trinity_buffer.lazy import TESTED

ROOT = Path(__file__).resolve().parents[1]
LOCKS = {
    "transformers": ("requirements.lock", "tests/outside/trl/requirements.lock"),
    "peft": ("requirements.lock",),
    "trl": ("tests/outside/trl/requirements.lock",),
    "verl": ("tests/outside/verl/requirements.lock",),
    "TransferQueue": ("tests/outside/verl/requirements.lock",),
    "trinity-rft": ("tests/outside/trinity-rft/requirements.lock",),
}
"""Package -> where the releases that our tests run with are pinned."""


def declared() -> dict[str, set[SpecifierSet]]:
    """Return the releases that `pyproject.toml` allows of each package of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, set[SpecifierSet]] = defaultdict(set)
    for requirements in project["optional-dependencies"].values():
        for one in map(Requirement, requirements):
            found[one.name].add(one.specifier)
    return found


def pinned(package: str) -> set[Version]:
    """Return the releases of a package that the tests run with."""
    texts = [(ROOT / lock).read_text() for lock in LOCKS[package]]
    versions = {re.search(rf"^{package}==(.+)$", text, re.MULTILINE) for text in texts}
    return {Version(one[1]) for one in versions if one}


@pytest.mark.parametrize("package", TESTED)
def test_the_releases_that_were_tested_are_allowed_and_no_later_ones(package: str) -> None:
    allowed = SpecifierSet(TESTED[package])
    if package != "trinity-rft":  # which no extra brings
        assert declared()[package] == {allowed}
    assert pinned(package)
    for version in pinned(package):
        assert version in allowed
        assert Version(f"{version.major}.{version.minor + 1}") not in allowed


def test_the_records_of_other_peoples_packages_are_of_allowed_releases() -> None:
    newest = {}
    for line in (ROOT / "docs" / "proofs" / "outside.jsonl").read_text().splitlines():
        record = json.loads(line)
        newest[record["package"]] = record["version"]
    known = newest.keys() & TESTED.keys()
    assert known == {"trl", "verl", "trinity-rft"}
    for package in known:
        assert newest[package] in SpecifierSet(TESTED[package])


def imported(python: str, module: str, folder: Path) -> str:
    """Return what is said where ``module`` is imported, with packages in ``folder``."""
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [python, "-c", f"import {module}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.splitlines()[-1]


@pytest.mark.long  # processes
def test_a_release_that_was_not_tested_is_named_where_an_import_fails(
    warm_python: str, tmp_path: Path
) -> None:
    for module in ("trl", "trl_async"):
        assert imported(warm_python, f"trinity_buffer.integrations.{module}", tmp_path).startswith(
            "ImportError: this needs trl>=1.16,<1.17, the releases that were tested: "
            "pip install 'trinity-buffer[trl]' (No module named '"
        )
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("GRPOConfig = GRPOTrainer = object")
    (tmp_path / "datasets.py").write_text("Dataset = object")  # which TRL brings
    information = tmp_path / "trl-1.18.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.18.0\n")
    assert imported(warm_python, "trinity_buffer.integrations.trl_async", tmp_path) == (
        "ImportError: this needs trl>=1.16,<1.17, and trl 1.18.0 is installed: "
        "pip install 'trinity-buffer[trl]' (No module named 'trl.experimental')"
    )
    assert imported(warm_python, "trinity_buffer.integrations.trinity_rft", tmp_path) == (
        "ImportError: this needs trinity-rft>=0.6,<0.7, the releases that were tested: "
        "pip install 'trinity-rft>=0.6,<0.7' (No module named 'trinity')"
    )
