"""A store is migrated under nobody; whoever had it open all the same hears of it."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import psycopg
import pytest
from pysqlite3 import dbapi2
from sqlalchemy import text

from tests.contract.making import group, opened
from tests.handles import Transaction
from tests.migration.test_kept_stores import copied_to_postgresql, laid_down
from tests.whole_stores import SCHEMA_REVISION, migrate, open_for_migration
from trinity_buffer.errors import SchemaTooNewError, StoreBusyError
from trinity_buffer.pipeline.coordination.waiting import WAIT_REPORT
from trinity_buffer.pipeline.history import migrate as module
from trinity_buffer.store.tables import policy

READ = "SELECT count(*) FROM event"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setenv(WAIT_REPORT, "0.02")


async def migrated_once_nobody_has_it(
    url: str, leave: anyio.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Migrate ``url``, which somebody has open: refused; then wait aloud until nobody has."""
    with pytest.raises(StoreBusyError, match=r"is open in .*--wait"):
        await migrate(url)
    done: list[tuple[str, str]] = []

    async def wait() -> None:
        done.append(await migrate(url, wait=True))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        with anyio.fail_after(60):
            while "migrate waits: " not in caplog.text:
                await anyio.sleep(0.01)
        assert re.search(r"migrate waits: .* is open in .*; it goes on when these end", caplog.text)
        assert done == []
        leave.set()
    assert done == [("0001", SCHEMA_REVISION)]


@pytest.mark.usefixtures("soon")
async def test_a_file_that_somebody_has_open_is_not_migrated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, leave = laid_down("0001", tmp_path), anyio.Event()
    other = dbapi2.connect(str(source))
    other.execute(READ).fetchall()

    async def close() -> None:
        await leave.wait()
        other.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        await migrated_once_nobody_has_it(f"sqlite:///{source}", leave, caplog)


@pytest.mark.usefixtures("soon")
async def test_a_database_that_somebody_has_open_is_not_migrated(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await copied_to_postgresql(laid_down("0001", tmp_path), "0001", postgres_url)
    other, leave = psycopg.connect(postgres_url), anyio.Event()

    async def close() -> None:
        await leave.wait()
        other.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        await migrated_once_nobody_has_it(postgres_url, leave, caplog)


async def test_who_has_a_store_open_while_it_is_migrated_is_told_what_to_install(
    store_url: str,
) -> None:
    def future(tx: Transaction) -> None:
        tx.execute(text("UPDATE alembic_version SET version_num = '0009'"))
        tx.execute(text("CREATE TABLE future (x INT)"))

    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group(task=1))
        async with open_for_migration(store_url) as database:
            await database.write(future)
        for _ in range(2):
            with pytest.raises(SchemaTooNewError, match=r"schema 0009.*pip install --upgrade"):
                await writer.write(group(task=2))

        def ask_nothing(tx: Transaction) -> None:
            tx.lock(experiment.key)
            tx.insert_many(policy, [(experiment.key, 1, 7, "weights", "")])

        with pytest.raises(SchemaTooNewError, match="pip install --upgrade"):
            await experiment.database.write(ask_nothing)
        if store_url.startswith("sqlite"):
            with pytest.raises(SchemaTooNewError, match="pip install --upgrade"):
                await experiment.newest_policy()
        else:
            assert await experiment.newest_policy() is None
