"""SQLAlchemy takes a millisecond to compile a statement: once in a process is enough."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.sql.compiler import SQLCompiler

from trinity_buffer import open_store


async def asked(url: str) -> list[str]:
    """Return the experiments of a store, and make one if there is none."""
    async with open_store(url) as store:
        await store.experiment("run", config={})
        return list(await store.experiments())


async def test_another_connection_compiles_nothing_again(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asked(sqlite_url)  # makes it
    await asked(sqlite_url)  # finds it
    compiled: list[str] = []
    usual = SQLCompiler.__init__

    def noted(compiler: Any, *args: Any, **how: Any) -> None:
        usual(compiler, *args, **how)
        compiled.append(str(compiler))

    monkeypatch.setattr(SQLCompiler, "__init__", noted)
    assert await asked(sqlite_url) == ["run"]
    assert compiled == []
