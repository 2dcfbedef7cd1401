"""Files that commands write beside a store."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.cli.calling import Cli
from tests.sample_run import record_sample_run


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
