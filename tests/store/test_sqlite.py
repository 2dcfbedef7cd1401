"""Checkpoints run beside the writers, and give up their place to nobody."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pysqlite3 import dbapi2
from typing_extensions import override

from tests.conftest import Resize
from tests.contract.making import group
from trinity_buffer import open_store
from trinity_buffer.limits import sizes
from trinity_buffer.store import sqlite
from trinity_buffer.store.sqlite import Checkpointer


def opened(path: Path) -> Any:
    """Return a connection that never makes a checkpoint of its own."""
    connection = dbapi2.connect(str(path), isolation_level=None)
    connection.execute("PRAGMA wal_autocheckpoint=0")
    return connection


def log_of(connection: Any) -> tuple[int, int]:
    """Return (pages in the log, how many of them are in the database too)."""
    _, pages, copied = connection.execute("PRAGMA wal_checkpoint(NOOP)").fetchone()
    return pages, copied


def test_the_log_is_copied_while_a_writer_goes_on(tmp_path: Path, resize: Resize) -> None:
    resize(wal_pages_per_checkpoint=8)
    path = tmp_path / "a.db"
    sqlite.prepare_file(path)
    deadline = time.monotonic() + 60
    with closing(opened(path)) as connection, closing(Checkpointer(path)) as beside:
        connection.execute("CREATE TABLE t (data BLOB)")
        while beside.checkpoints < 2:
            assert time.monotonic() < deadline, "no checkpoint came"
            connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
            beside.notify()
        before = log_of(connection)[1]
        assert before > 0
        # What the writers' own limit finds is the rest: here, what came since the last look.
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        pages, copied = log_of(connection)
        assert copied == pages
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
        assert log_of(connection)[0] < pages, "copied as a whole, the log begins anew"


def test_a_short_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    sqlite.prepare_file(path)
    with closing(opened(path)) as connection, closing(Checkpointer(path)) as beside:
        connection.execute("CREATE TABLE t (data BLOB)")
        beside._checkpoint(connection)
        assert beside.checkpoints == 0
        assert log_of(connection)[1] == 0


def test_it_ends_when_it_is_closed_just_before_it_forgets_the_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    sqlite.prepare_file(path)
    monkeypatch.setattr(sqlite, "PAUSE_S", 0.001)
    beside = Checkpointer(path)

    class ClosedMeanwhile(threading.Event):
        @override
        def clear(self) -> None:
            beside._closing.set()
            self.set()
            super().clear()

    beside._committed = ClosedMeanwhile()
    beside.notify()
    thread = beside._thread
    assert thread is not None
    thread.join(timeout=30)
    assert not thread.is_alive()


async def test_who_writes_has_one_and_who_reads_has_none(new_sqlite_url: str) -> None:
    def at_work() -> bool:
        return "trinity-buffer-checkpoint" in {one.name for one in threading.enumerate()}

    async with open_store(new_sqlite_url) as store:
        experiment = await store.experiment("e", config={})
        await experiment.writer("e0").write(group())
        assert at_work()
    assert not at_work()
    async with open_store(new_sqlite_url, read_only=True) as store:
        assert await (await store.experiment("e")).columns()
        assert not at_work()


def test_the_writers_own_limit_lies_behind_it() -> None:
    assert sizes.wal_pages_per_checkpoint < sizes.wal_pages_limit / 4


def test_a_file_that_is_gone_before_the_first_checkpoint_is_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside = Checkpointer(tmp_path / "gone.db")
    beside.notify()
    beside.close()
    (record,) = caplog.records
    assert record.getMessage().endswith("gone.db: unable to open database file")


def test_who_reads_only_for_a_moment_is_not_told_of_as_a_reader(
    tmp_path: Path, resize: Resize, monkeypatch: pytest.MonkeyPatch
) -> None:
    resize(wal_pages_limit=1)
    (tmp_path / "a.db-wal").write_bytes(bytes(3 * sqlite.PAGE_SIZE_BYTES))
    looks = [{(11, 124), (12, 125)}, {(11, 124), (12, 126)}, {(11, 124)}, {(11, 124), (12, 125)}]
    monkeypatch.setattr(sqlite, "_read_locks", lambda _: looks.pop(0) if looks else set())
    held = sqlite.log_state(tmp_path / "a.db")
    assert held.readers == (11,)
    assert "a reader holds an old state open (pid 11)" in held.message()
    assert held.remedy == "end the process that reads"
    free = sqlite.log_state(tmp_path / "a.db")
    assert free.readers == ()
    assert "no process that is visible here holds an old state open" in free.message()
    assert free.remedy.startswith("look again when the writers pause")
