"""A sample run for each test, recorded once: a copy is a tenth of the work."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import anyio
import pytest

from tests.postgres import PostgresServer
from tests.sample_run import SampleRun, record_sample_run

_copy_number = count(1)


@pytest.fixture(scope="session")
def sqlite_original(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    """The sample run in a file that nobody opens again."""
    folder = tmp_path_factory.mktemp("original")
    return anyio.run(record_sample_run, f"sqlite:///{folder / 'store.db'}", folder / "run")


@pytest.fixture(scope="session")
def postgres_original(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> SampleRun:
    """The sample run in a database that nobody connects to again: others are made after it."""
    url = postgres_server.create_database("original")
    return anyio.run(record_sample_run, url, tmp_path_factory.mktemp("original") / "run")


@pytest.fixture
def sqlite_sample(sqlite_original: SampleRun, new_sqlite_url: str, tmp_path: Path) -> SampleRun:
    """A sample run of the test's own, in a file."""
    original, copy = (
        url.removeprefix("sqlite:///") for url in (sqlite_original.url, new_sqlite_url)
    )
    assert not Path(f"{original}-wal").exists()
    shutil.copy(original, copy)
    return _moved(sqlite_original, new_sqlite_url, tmp_path)


@pytest.fixture
def postgres_sample(
    postgres_original: SampleRun, postgres_server: PostgresServer, tmp_path: Path
) -> Iterator[SampleRun]:
    """A sample run of the test's own, on the server."""
    name = f"story_{next(_copy_number)}"
    url = postgres_server.create_database(name, template="original")
    yield _moved(postgres_original, url, tmp_path)
    postgres_server.drop_database(name)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def sample(request: pytest.FixtureRequest) -> SampleRun:
    """A sample run of the test's own, on each backend in turn: a look at a store takes long."""
    fixture = {"sqlite": "sqlite_sample", "postgresql": "postgres_sample"}[request.param]
    found: SampleRun = request.getfixturevalue(fixture)
    return found


def _moved(original: SampleRun, url: str, folder: Path) -> SampleRun:
    run = folder / "run"
    shutil.copytree(original.acknowledged.parent, run)
    return replace(
        original,
        url=url,
        acknowledged=run / original.acknowledged.name,
        checkpoint=run / original.checkpoint.name,
        manifests=list(original.manifests),
    )
