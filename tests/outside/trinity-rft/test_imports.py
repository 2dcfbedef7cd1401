"""What Trinity-RFT's own writers left in files, imported."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trinity_rft import rollouts
from trinity.buffer.writer.file_writer import JSONWriter
from trinity.buffer.writer.sql_writer import SQLWriter
from trinity.common.config import StorageConfig

from trinity_buffer.integrations import trinity_rft
from trinity_buffer.integrations.imports import formats
from trinity_buffer.integrations.imports.rows import Rows, Texts


async def write(writer: Any, given: list[Any]) -> None:
    await writer.acquire()
    await writer.write(given)
    await writer.release()


def config(**given: str) -> StorageConfig:
    return StorageConfig(name="experiences", wrap_in_ray=False, **given)


async def imported_from_sql(folder: Path, given: list[Any]) -> list[Any]:
    path = folder / "trinity.db"
    places = {"storage_type": "sql", "schema_type": "experience", "path": f"sqlite:///{path}"}
    await write(SQLWriter(config(**places)), given)
    return list(formats.read_trinity(path, Texts(None), Rows("experience")))


def test_their_sqlite_comes_back_as_they_gave_it(tmp_path: Path) -> None:
    given = rollouts(0) + rollouts(1)
    found = asyncio.run(imported_from_sql(tmp_path, given))
    for one, other in zip(trinity_rft.from_trinity(given), found, strict=True):
        assert one.eid == other.eid
        for name in trinity_rft.PLAIN:
            a, b = getattr(one, name), getattr(other, name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name
        assert one.custom_fields == other.custom_fields


def test_their_jsonl_holds_what_we_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trinity.jsonl"
    given = rollouts(0)
    for one in given:
        one.prompt_text = "one two"
    asyncio.run(write(JSONWriter(config(storage_type="file", path=str(path))), given))
    monkeypatch.setattr(Texts, "prompt", lambda _, said, how: [0] * len(said))
    monkeypatch.setattr(Texts, "answer", lambda _, prompt, said, how: [1] * len(said))
    found = list(formats.read_trinity(path, Texts(None), Rows("experience")))
    assert [one.reward for one in found] == [one.reward for one in given]
    assert [one.response_text for one in found] == [one.response_text for one in given]
    assert [one.info for one in found] == [one.info for one in given]
