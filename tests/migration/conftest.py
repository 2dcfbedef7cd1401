"""Migrations begin with nothing: here, not even the tables are there."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """URL of a file that does not exist, or of an empty database."""
    fixture = {"sqlite": "new_sqlite_url", "postgresql": "postgres_url"}[request.param]
    url: str = request.getfixturevalue(fixture)
    return url
