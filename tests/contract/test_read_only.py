"""Who only reads changes nothing, in the database or beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.making import group, opened
from tests.raw_store import contents
from trinity_buffer import open_store
from trinity_buffer.errors import ReadOnlyStoreError


async def test_a_read_only_store_refuses_to_write(store_url: str) -> None:
    async with opened(store_url, max_queued_groups=1) as experiment:
        await experiment.writer("e0").plan("planned", [0], 1)
    before = await contents(store_url)
    async with open_store(store_url, read_only=True) as store:
        experiment = await store.experiment("run", config={"seed": 1})
        writer = experiment.writer("e0")
        for call in (
            lambda: writer.write(group()),
            lambda: writer.plan("b", [0], 1),
            lambda: writer.seal("b", 0),
            lambda: experiment.finish("over"),
            lambda: experiment.publish_policy(1, "x"),
        ):
            with pytest.raises(ReadOnlyStoreError, match="read-only"):
                await call()
    assert await contents(store_url) == before


async def test_a_read_only_store_changes_neither_the_file_nor_its_log(
    new_sqlite_url: str, tmp_path: Path
) -> None:
    path, wal = tmp_path / "store.db", tmp_path / "store.db-wal"
    async with opened(new_sqlite_url) as experiment:
        await experiment.writer("e0").write(group())
        before = path.read_bytes(), wal.read_bytes()
        assert before[1], "there is something in the log that could be moved"
        async with open_store(new_sqlite_url, read_only=True) as store:
            found = await store.experiment("run")
            assert len([e async for e in found.read()]) == 4
        assert (path.read_bytes(), wal.read_bytes()) == before


async def test_a_read_only_store_leaves_a_dead_writer_s_log_alone(
    new_sqlite_url: str, tmp_path: Path
) -> None:
    async with opened(new_sqlite_url) as experiment:
        await experiment.writer("e0").write(group())
        left = tmp_path / "left by kill -9"
        left.mkdir()
        for name in ("store.db", "store.db-wal"):
            (left / name).write_bytes((tmp_path / name).read_bytes())
    before = [(left / name).read_bytes() for name in ("store.db", "store.db-wal")]
    async with open_store(f"sqlite:///{left / 'store.db'}", read_only=True) as store:
        experiment = await store.experiment("run")
        assert len([e async for e in experiment.read()]) == 4
    assert [(left / name).read_bytes() for name in ("store.db", "store.db-wal")] == before


async def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    odd = tmp_path / "100% of #1? ü.db"
    async with open_store(str(odd)) as store:
        await (await store.experiment("run", config={})).writer("e0").write(group())
    async with open_store(str(odd), read_only=True) as store:
        assert await store.experiments() == ["run"]
    assert odd.exists()
