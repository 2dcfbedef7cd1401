"""Fixtures: a folder with a small run, and a copy of the repository."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.doors.workshop import copy_of_the_repository, made_once

DUMPS = Path(__file__).parents[1] / "integrations" / "dumps"


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a small run that is made once, whatever the number of test processes."""
    base = tmp_path_factory.getbasetemp()
    return made_once(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


@pytest.fixture
def site(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder of the test: a copy of the small run, and a buffer of Trinity-RFT."""
    folder = tmp_path / "site"
    shutil.copytree(small_run, folder)
    shutil.copy(DUMPS / "trinity.db", folder / "buffer.db")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("TRINITY_BUFFER_STORE", raising=False)
    return folder


@pytest.fixture
def repository(small_run: Path, warm: Path, tmp_path: Path) -> Path:
    """Copy of the repository in which the small run was made."""
    copy = copy_of_the_repository(tmp_path, warm)
    shutil.copytree(small_run, copy, dirs_exist_ok=True)
    return copy
