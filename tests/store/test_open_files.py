"""Nobody takes the log away from a process that has the store open, whatever it does beside."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.contract.making import group, opened
from trinity_buffer import open_store
from trinity_buffer.errors import UnknownStoreError
from trinity_buffer.store import sqlite

CLOSE_AS_THE_LAST = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)
"""
"""Takes the lock that SQLite takes before it removes the log."""


LEAVE_A_CHILD = """
import asyncio, os, signal, sys
import trinity_buffer as tb

async def main():
    async with tb.open_store(sys.argv[1]):
        child = os.fork()
        if child == 0:
            os.close(1)
            signal.pause()
        print(child, flush=True)
        if sys.argv[2] == "killed":
            os._exit(0)

asyncio.run(main())
"""
"""Leaves a child that was forked while the store was open, and closes it, or does not get to it."""


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def could_close_as_the_last(path: Path) -> bool:
    """Return whether another process could take itself for the last that has it open."""
    command = [sys.executable, "-c", CLOSE_AS_THE_LAST, str(path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0 or "BlockingIOError" in done.stderr
    return done.returncode == 0


def read(path: Path) -> None:
    """Read the file, as to copy it: when it is closed, the process has no lock on it any more."""
    assert path.read_bytes()


def ask_pythons_library(path: Path) -> None:
    """Look into the store with another SQLite library, which does not know of ours."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM experience").fetchone() == (4,)


@pytest.mark.parametrize("beside", [read, ask_pythons_library])
async def test_the_log_stays_whoever_opens_the_file_beside(
    new_sqlite_url: str, tmp_path: Path, beside: Callable[[Path], None]
) -> None:
    path = tmp_path / "store.db"
    async with opened(new_sqlite_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group())
        beside(path)
        assert not could_close_as_the_last(path)
        await writer.write(group(task=1))
    assert could_close_as_the_last(path)
    assert names(tmp_path) == ["store.db"]  # the last one took it all in


async def test_one_of_two_stores_of_a_file_may_be_closed(
    new_sqlite_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "store.db"
    async with opened(new_sqlite_url) as experiment:
        async with open_store(new_sqlite_url, read_only=True):
            pass
        assert not could_close_as_the_last(path)
        await experiment.writer("e0").write(group())
    assert names(tmp_path) == ["store.db"]


@pytest.mark.long
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_forked_child_keeps_nothing_open(tmp_path: Path, end: str) -> None:
    path = tmp_path / "store.db"
    command = [sys.executable, "-W", "ignore", "-c", LEAVE_A_CHILD, str(path), end]
    child = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    try:
        assert could_close_as_the_last(path)
        assert not sqlite.in_use(path)
        assert end == "killed" or names(tmp_path) == ["store.db"]
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_that_was_removed_meanwhile_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(UnknownStoreError, match=r"a\.db cannot be opened: No such file"),
        sqlite.open_here(tmp_path / "a.db"),
    ):
        pass
