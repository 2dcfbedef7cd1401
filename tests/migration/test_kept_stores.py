"""A store that any released version wrote is migrated, holds, and goes on."""

from __future__ import annotations

import gzip
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pysqlite3 import dbapi2
from sqlalchemy import Connection, MetaData, insert

from tests.handles import Transaction
from tests.migration.kept import kept
from tests.pipeline.planting import unguarded
from tests.raw_store import sql
from tests.sample_run import record_sample_run, rollout
from tests.whole_stores import (
    SCHEMA_REVISION,
    diff_projections,
    downgrade,
    migrate,
    open_for_migration,
    revisions,
)
from trinity_buffer import open_store, run_strategy, verify
from trinity_buffer.pipeline.history import migrate as migrations


def laid_down(revision: str, folder: Path) -> Path:
    """Return the kept SQLite store of a revision, as a file."""
    path = folder / f"{revision}.db"
    path.write_bytes(gzip.decompress(kept(revision).read_bytes()))
    return path


async def copied_to_postgresql(source: Path, revision: str, url: str) -> None:
    """Make the schema that PostgreSQL had at a revision, and fill it with the same rows."""
    with closing(dbapi2.connect(str(source))) as connection:
        connection.row_factory = dbapi2.Row
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        names = {row[0] for row in found if not row[0].startswith("sqlite_")}
        rows = {
            name: [dict(row) for row in connection.execute(f'SELECT * FROM "{name}"')]
            for name in names - {"alembic_version"}
        }

    def fill(tx: Transaction) -> None:
        migrations.upgrade(tx, revision)
        _fill(tx.connection, rows)

    async with open_for_migration(url) as database:
        await database.write(fill)


def _fill(connection: Connection, rows: dict[str, list[dict[str, Any]]]) -> None:
    metadata = MetaData()
    metadata.reflect(connection)
    for name, some in rows.items():
        table = metadata.tables[name]
        kinds = {column.name: column.type.python_type for column in table.columns}
        typed = [
            {key: bool(value) if kinds[key] is bool else value for key, value in row.items()}
            for row in some
        ]
        if typed:
            connection.execute(insert(table), typed)


def test_every_older_revision_has_a_store_that_was_kept() -> None:
    """If this fails: python -m tests.migration.kept, at the last commit of that revision."""
    older = revisions()[:-1]
    assert [revision for revision in older if not kept(revision).exists()] == []


@pytest.mark.parametrize("revision", [one for one in revisions() if kept(one).exists()])
async def test_a_kept_store_is_migrated_holds_and_goes_on(
    store_url: str, tmp_path: Path, revision: str
) -> None:
    source = laid_down(revision, tmp_path)
    url = f"sqlite:///{source}"
    if store_url.startswith("postgresql"):
        url = store_url
        await copied_to_postgresql(source, revision, url)
    assert await migrate(url) == (revision, SCHEMA_REVISION)
    async with open_store(url) as store:
        experiment = await store.experiment("sort")
        assert await diff_projections(store.database, experiment.key) == []
        assert (await verify(experiment)).problems == ()
        stored = {e.eid.uid: e async for e in experiment.read(include_refused=True)}
        told = rollout("b0", 2, 3, 1.0)
        assert stored[told.eid.uid].tokens.equal(told.tokens)
        assert stored[told.eid.uid].logprobs is not None
        receipt = await experiment.writer("e0").write([told])
        assert (receipt.written, receipt.duplicates) == (0, 1)
        missing = [(0, run) for run in (0, 2, 3)]
        assert await experiment.writer("e0").missing("b1") == missing
        await experiment.writer("e0").write([rollout("b1", *pair, 0.5) for pair in missing])
        report = await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        assert (report.annotated, report.waiting) == (4, 0)
        stream = experiment.train_stream(strategy="grpo", groups_per_step=1, consumer="another")
        async with stream as steps:
            assert [len(step.manifest.experiences) async for step in steps] == [4] * 5
        assert (await verify(experiment)).problems == ()


async def test_what_was_recorded_before_there_were_heads_is_proven_too(tmp_path: Path) -> None:
    url = f"sqlite:///{laid_down('0001', tmp_path)}"
    await migrate(url)
    old = sql("UPDATE event SET actor = 'somebody else' WHERE position = 3")
    await unguarded(url, old, chained=False)
    async with open_store(url, read_only=True) as store:
        report = await verify(await store.experiment("sort"))
        events = [e async for e in (await store.experiment("sort")).events()]
    assert events[-1].kind == "ChainStarted"
    told = [problem for problem in report.problems if problem.check == "chain"]
    assert {problem.where for problem in told} == {f"position {events[-1].position}"}
    assert "as the head of all before it, which has" in told[-1].what


async def test_a_store_that_was_taken_back_and_migrated_again_holds(
    store_url: str, tmp_path: Path
) -> None:
    await record_sample_run(store_url, tmp_path / "run")
    async with open_for_migration(store_url) as database:
        await database.write(downgrade, "0001")
    for _ in range(2):
        await migrate(store_url)
    async with open_store(store_url) as store:
        experiment = await store.experiment("sort")
        await experiment.writer("e0").write([rollout("c", 0, 0, 1.0)])
        assert (await verify(experiment)).problems == ()
