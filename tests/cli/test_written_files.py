"""Files that commands write beside a store."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pyarrow
import pytest

from tests.cli.calling import Cli
from tests.sample_run import record_sample_run
from trinity_buffer.cli import data
from trinity_buffer.inspector.table import record_batches


@pytest.mark.parametrize(
    ("command", "ending"),
    [("report", ".db"), ("report", ".db-wal"), ("export", ".jsonl"), ("export", ".parquet")],
)
def test_what_is_told_of_a_store_is_not_written_over_it(
    cli: Cli, tmp_path: Path, command: str, ending: str
) -> None:
    store = tmp_path / f"run{ending.removesuffix('-wal')}"
    anyio.run(record_sample_run, f"sqlite:///{store}", tmp_path / "run")
    before = store.read_bytes()
    ended = cli(command, "-o", tmp_path / f"run{ending}", "--store", store)
    assert (ended.code, "belongs to a database" in ended.err) == (2, True), ended.err
    assert store.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [tmp_path / "run", store]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_two_exports_to_one_name_leave_one_whole_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    store, path = tmp_path / "run.db", tmp_path / "out" / f"run.{ending}"
    anyio.run(record_sample_run, f"sqlite:///{store}", tmp_path / "run")
    words = ("export", "-o", str(path), "--store", str(store))
    whole: list[bytes] = []

    async def batches(*args: Any) -> AsyncIterator[pyarrow.RecordBatch]:
        async for batch in record_batches(*args):
            yield batch
            command = [sys.executable, "-m", "trinity_buffer", *words]
            await anyio.run_process(command)
            whole.append(path.read_bytes())
            yield batch
            assert path.read_bytes() == whole[0]

    monkeypatch.setattr(data, "record_batches", batches)
    ended = cli(*words)
    assert ended.code == 0, ended.err
    assert [*path.parent.iterdir()] == [path]
    assert len(path.read_bytes()) > len(whole[0])
