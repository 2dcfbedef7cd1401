"""A story for each test, told once: a copy is a tenth of the work."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import anyio
import pytest

from tests.postgres import PostgresServer
from tests.stories import Story, tell

_copy_number = count(1)


@pytest.fixture(scope="session")
def sqlite_original(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The story in a file that nobody opens again."""
    folder = tmp_path_factory.mktemp("original")
    return anyio.run(tell, f"sqlite:///{folder / 'store.db'}", folder / "run")


@pytest.fixture(scope="session")
def postgres_original(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Story:
    """The story in a database that nobody connects to again: others are made after it."""
    url = postgres_server.create_database("original")
    return anyio.run(tell, url, tmp_path_factory.mktemp("original") / "run")


@pytest.fixture
def sqlite_story(sqlite_original: Story, sqlite_url: str, tmp_path: Path) -> Story:
    """A story of the test's own, in a file."""
    original, copy = (url.removeprefix("sqlite:///") for url in (sqlite_original.url, sqlite_url))
    assert not Path(f"{original}-wal").exists()
    shutil.copy(original, copy)
    return _moved(sqlite_original, sqlite_url, tmp_path)


@pytest.fixture
def postgres_story(
    postgres_original: Story, postgres_server: PostgresServer, tmp_path: Path
) -> Iterator[Story]:
    """A story of the test's own, on the server."""
    name = f"story_{next(_copy_number)}"
    url = postgres_server.create_database(name, template="original")
    yield _moved(postgres_original, url, tmp_path)
    postgres_server.drop_database(name)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def story(request: pytest.FixtureRequest) -> Story:
    """A story of the test's own, on each backend in turn: a look at a whole store takes long."""
    fixture = {"sqlite": "sqlite_story", "postgresql": "postgres_story"}[request.param]
    found: Story = request.getfixturevalue(fixture)
    return found


def _moved(original: Story, url: str, folder: Path) -> Story:
    run = folder / "run"
    shutil.copytree(original.acknowledged.parent, run)
    return replace(
        original,
        url=url,
        acknowledged=run / original.acknowledged.name,
        checkpoint=run / original.checkpoint.name,
        manifests=list(original.manifests),
    )
