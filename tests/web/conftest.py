"""A store with one sample run, and a client of its inspector."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest
from starlette.testclient import TestClient

from tests.sample_run import record_sample_run
from trinity_buffer.web.app import inspector

BASE = "http://127.0.0.1:8500"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a store with one sample run; no test writes to it."""
    folder = tmp_path_factory.mktemp("served")
    url = f"sqlite:///{folder / 'store.db'}"
    anyio.run(record_sample_run, url, folder / "run")
    return url


@pytest.fixture
def client(told: str) -> Iterator[TestClient]:
    with TestClient(inspector(told), base_url=BASE) as client:
        yield client
