"""What a recorder does to a store it does by way of a writer, which has tests of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def store_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty store; on a server in `make long` alone."""
    fixture = {"sqlite": "sqlite_store_url", "postgresql": "postgres_store_url"}[request.param]
    url: str = request.getfixturevalue(fixture)
    return url
