"""Who waits for a commit of another process hears of it at once, and otherwise does nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from pysqlite3 import dbapi2

from tests.postgres import PostgresServer
from tests.raw_store import appending
from trinity_buffer import open_store
from trinity_buffer.events import PolicyPublished
from trinity_buffer.store import notify as module
from trinity_buffer.store import sqlite
from trinity_buffer.store.notify import SQLiteChanges
from trinity_buffer.store.sqlite import StoreFiles
from trinity_buffer.store.transaction import Owner

LONG_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An SQLite file with a table, as a store makes it."""
    path = tmp_path / "a.db"
    sqlite.prepare_file(path)
    return path


@pytest.fixture
def other(path: Path) -> Iterator[Any]:
    """A connection that stands for another process: it says nothing to `Changes`."""
    with closing(
        dbapi2.connect(str(path), isolation_level=None, check_same_thread=False)
    ) as connection:
        connection.execute("CREATE TABLE t (data BLOB)")
        yield connection


def put(other: Any, number_of_bytes: int = 100) -> None:
    other.execute("INSERT INTO t VALUES (zeroblob(?))", (number_of_bytes,))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of writes")
async def test_a_write_wakes_all_who_wait_and_nobody_polls(
    path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_POLL_S", LONG_S)
    monkeypatch.setattr(module, "SLOWEST_WATCHED_POLL_S", LONG_S)
    changes = SQLiteChanges(path, Owner("a.db"), StoreFiles(path, with_log=False))
    state = await changes.state()
    with anyio.fail_after(LONG_S / 2):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(changes.changed, state)
            await anyio.sleep(0.02)
            put(other)
    assert await changes.state() != state
    await changes.close()


@pytest.mark.parametrize("way", ["write", "session"])
async def test_a_commit_of_this_process_is_told_to_it_and_not_looked_for(
    new_sqlite_url: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_POLL_S", LONG_S)
    monkeypatch.setattr(module, "SLOWEST_POLL_S", LONG_S)
    monkeypatch.setattr(module, "watch_file", lambda _: None)
    async with open_store(new_sqlite_url) as store:
        database, key = store.database, (await store.experiment("e", config={})).key
        work = appending(key, PolicyPublished(number=1, uri="", digest=""))
        with anyio.fail_after(LONG_S / 4):
            async with anyio.create_task_group() as group:
                group.start_soon(database.changes.changed, await database.changes.state())
                await anyio.wait_all_tasks_blocked()
                if way == "write":
                    await database.write(work)
                else:
                    await database.session(lambda s: s.write(work))


@pytest.mark.parametrize("watched", [True, False])
async def test_no_commit_is_missed(
    path: Path, other: Any, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not watched:
        monkeypatch.setattr(module, "watch_file", lambda _: None)
    changes = SQLiteChanges(path, Owner("a.db"), StoreFiles(path, with_log=False))
    with anyio.fail_after(LONG_S):
        for size in (1, 100_000, 3_000_000):
            state = await changes.state()
            put(other, size)  # between the look and the wait
            await changes.changed(state)
            state = await changes.state()
            async with anyio.create_task_group() as group:
                group.start_soon(changes.changed, state)
                await anyio.sleep(0.02)
                await anyio.to_thread.run_sync(put, other, size)
    await changes.close()


@pytest.mark.parametrize("watched", [True, False])
async def test_a_wait_ends_in_time_and_can_be_cancelled(
    path: Path, other: Any, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not watched:
        monkeypatch.setattr(module, "watch_file", lambda _: None)
    changes = SQLiteChanges(path, Owner("a.db"), StoreFiles(path, with_log=False))
    state = await changes.state()
    began = time.monotonic()
    await changes.changed(state, timeout_s=0.05)
    with anyio.move_on_after(0.05) as scope:
        await changes.changed(state)
    assert scope.cancelled_caught
    assert time.monotonic() - began < LONG_S / 2
    assert await changes.state() == state
    put(other)
    with anyio.fail_after(LONG_S):
        await changes.changed(state)  # a wait that was cancelled leaves the next one whole
    await changes.close()


async def test_who_waits_for_nothing_hears_nothing(
    path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = 0

    def count(descriptor: int) -> None:
        nonlocal heard
        heard += 1
        os.read(descriptor, 4_096)

    changes = SQLiteChanges(path, Owner("a.db"), StoreFiles(path, with_log=False))
    await changes.changed(await changes.state(), timeout_s=0.01)
    monkeypatch.setattr(module, "drain", count)
    for _ in range(10):
        put(other)
        await anyio.lowlevel.checkpoint()
    assert heard == 0
    await changes.close()


@pytest.mark.long
async def test_an_idle_wait_costs_next_to_nothing(path: Path, other: Any) -> None:
    changes = SQLiteChanges(path, Owner("a.db"), StoreFiles(path, with_log=False))
    state = await changes.state()
    used, began = time.process_time(), time.monotonic()
    await changes.changed(state, timeout_s=1.5)
    share = (time.process_time() - used) / (time.monotonic() - began)
    assert share < 0.05, f"{share:.1%} of a core"
    await changes.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of writes")
def test_a_file_that_is_not_there_has_no_news(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert module.watch_file(tmp_path / "none") is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.long
async def test_a_store_closes_after_the_server_that_it_listened_to_was_killed() -> None:
    with PostgresServer() as server:
        server.create_database("gone")
        url = server.url("gone")
        async with open_store(url) as store:
            await store.experiment("run", config={})
            changes = store.database.changes
            await changes.state()
            server.kill9()  # the loop hears nothing of it before the store is closed
