"""What SQLite meets outside: other libraries, file systems of a cluster, many processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from tests.contract.making import opened, rollout
from tests.crash.forking import CONTEXT
from tests.raw_store import contents, dbapi2
from trinity_buffer import open_store, verify
from trinity_buffer.errors import ReadOnlyStoreError, UnsafeStoreError
from trinity_buffer.store import sqlite
from trinity_buffer.store.sqlite import log_state

CALLS = 10


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def library(version: str) -> ModuleType:
    return cast("ModuleType", SimpleNamespace(sqlite_version=version))


@pytest.mark.parametrize("version", ["3.7.0", "3.40.1", "3.44.5", "3.45.0", "3.50.6", "3.51.2"])
def test_a_library_that_can_lose_commits_is_refused(version: str) -> None:
    with pytest.raises(UnsafeStoreError, match=rf"SQLite {version} .*install pysqlite3 >="):
        sqlite.require_safe_library(library(version))


@pytest.mark.parametrize("version", ["3.6.23", "3.44.6", "3.50.7", "3.51.3", "3.52.0", "4.0.0"])
def test_a_library_that_cannot_is_taken(version: str) -> None:
    assert sqlite.require_safe_library(library(version)) == version


async def test_no_store_is_opened_with_an_affected_library(
    new_sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dbapi2, "sqlite_version", "3.40.1")
    with pytest.raises(UnsafeStoreError, match="WAL-reset bug"):
        async with open_store(new_sqlite_url):
            pass
    assert names_in(tmp_path) == []


WITHOUT_THE_WHEEL = """
import asyncio, sys
from sqlite3 import dbapi2
sys.modules["pysqlite3"] = None
dbapi2.sqlite_version = sys.argv[2]
from trinity_buffer.errors import UnsafeStoreError
from trinity_buffer import open_store
async def main():
    async with open_store(sys.argv[1]) as store:
        experiment = await store.experiment("run", config={})
        await experiment.finish("enough")
        print(*[event.kind async for event in experiment.events()])
try:
    asyncio.run(main())
except UnsafeStoreError as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("3.51.3", "ExperimentCreated ExperimentFinished"),
        ("3.40.1", "SQLite 3.40.1 can lose committed"),
    ],
)
def test_where_the_wheel_is_missing_a_fixed_library_of_python_serves(
    new_sqlite_url: str, version: str, said: str
) -> None:
    command = [sys.executable, "-c", WITHOUT_THE_WHEEL, new_sqlite_url, version]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said)


FUSE = ["sshfs", "gcsfuse", "s3fs", "juicefs", "blobfuse2", "goofys", "rclone", "mountpoint-s3"]


@pytest.mark.parametrize(
    "kind", ["nfs4", "lustre", "cifs", "9p", *(f"fuse.{name}" for name in FUSE)]
)
def test_a_network_file_system_is_refused_with_the_ways_out(tmp_path: Path, kind: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n")
    with pytest.raises(UnsafeStoreError, match=rf"{kind}.*local disk.*postgresql://"):
        sqlite.check_path(tmp_path / "run.db", read_only=False, mounts=mounts)


@pytest.mark.parametrize(
    ("source", "kind", "network"),
    [
        ("mountpoint-s3", "fuse", True),
        ("/dev/sda1", "fuse", False),
        ("/dev/sda1", "fuseblk", False),
        ("a:b", "fuse.mergerfs", False),
    ],
)
def test_fuse_alone_makes_no_network_file_system(
    tmp_path: Path, source: str, kind: str, network: bool
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"{source} {tmp_path} {kind} rw 0 0\n")
    with pytest.raises(UnsafeStoreError) if network else nullcontext():
        sqlite.check_path(tmp_path / "run.db", read_only=False, mounts=mounts)


def test_a_local_disk_inside_a_network_file_system_is_local(tmp_path: Path) -> None:
    mounts, local = tmp_path / "mounts", tmp_path / "with space"
    local.mkdir()
    escaped = str(local).replace(" ", "\\040")
    mounts.write_text(f"server:/x {tmp_path} nfs4 rw 0 0\n/dev/vdb {escaped} xfs rw 0 0\n")
    assert sqlite.file_system_of(local, mounts) == "xfs"
    assert not sqlite.check_path(local / "run.db", read_only=False, mounts=mounts)
    assert sqlite.file_system_of(tmp_path / "with", mounts) == "nfs4"


async def test_no_store_is_opened_on_a_network_file_system(
    new_sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "file_system_of", lambda *_: "nfs4")
    with pytest.raises(UnsafeStoreError, match="nfs4"):
        async with open_store(new_sqlite_url):
            pass
    assert names_in(tmp_path) == []


def _write(url: str, number: int) -> None:
    """Write from a process of its own, call by call."""

    async def work() -> None:
        async with opened(url) as experiment:
            writer = experiment.writer(f"e{number}")
            for call in range(CALLS):
                await writer.write([rollout(f"b{number}", call, run) for run in range(2)])

    asyncio.run(work())


@pytest.mark.parametrize("processes", [2, pytest.param(16, marks=pytest.mark.long)])
def test_many_processes_write_and_none_finds_it_locked(new_sqlite_url: str, processes: int) -> None:
    """Whoever had ended with "database is locked" would have another exit code than 0."""
    asyncio.run(_create(new_sqlite_url))
    writers = [CONTEXT.Process(target=_write, args=(new_sqlite_url, n)) for n in range(processes)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert [process.exitcode for process in writers] == [0] * processes
    assert len(asyncio.run(contents(new_sqlite_url))["experience"]) == processes * CALLS * 2
    assert asyncio.run(_problems(new_sqlite_url)) == ()


async def _create(url: str) -> None:
    async with opened(url):
        pass


async def _problems(url: str) -> tuple[object, ...]:
    async with opened(url) as experiment:
        return (await verify(experiment)).problems


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_file_of_two_names_is_refused_under_both(
    sqlite_url: str, tmp_path: Path, *, read_only: bool
) -> None:
    path = tmp_path / "store.db"
    (tmp_path / "other.db").hardlink_to(path)
    for one in (path, tmp_path / "other.db"):
        with pytest.raises(UnsafeStoreError, match=r"2 names \(hard links\).*Keep one name"):
            async with open_store(one, read_only=read_only):
                pass
    (tmp_path / "other.db").unlink()
    async with opened(sqlite_url) as experiment:
        assert (await experiment.writer("e0").write([rollout()])).written == 1


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_a_file_that_is_mounted_by_itself_is_refused(
    sqlite_url: str, tmp_path: Path, suffix: str, *, read_only: bool
) -> None:
    """A container's ``-v FILE:FILE``: its log would lie elsewhere than that of the file itself."""
    path, mounts = tmp_path / "store.db", tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\n/dev/vda {path}{suffix} ext4 rw 0 0\n")
    with pytest.raises(UnsafeStoreError, match=r"mounted as a single file.*Mount the folder"):
        sqlite.check_path(path, read_only=read_only, mounts=mounts)
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\n/dev/vda {tmp_path} ext4 rw 0 0\n")
    assert sqlite.check_path(path, read_only=read_only, mounts=mounts)


MOUNT_AND_OPEN = """
import subprocess, sys, anyio
from tests.torture.sites import _hide_mounts
from trinity_buffer.errors import UnsafeStoreError
from trinity_buffer import open_store
async def open_it(path):
    async with open_store(path) as store:
        print(await store.experiments())
_hide_mounts()
subprocess.run(["mount", "--bind", *sys.argv[1:]], check=True)
anyio.run(open_it, sys.argv[1])
try:
    anyio.run(open_it, sys.argv[2])
except UnsafeStoreError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.long
def test_a_mount_over_another_file_is_seen(sqlite_url: str, tmp_path: Path) -> None:
    path, other = tmp_path / "store.db", tmp_path / "with space" / "store.db"
    other.parent.mkdir()
    other.touch()
    command = [sys.executable, "-c", MOUNT_AND_OPEN, str(path), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no mounts of our own" in done.stderr:
        pytest.skip("root may not mount in this container")
    assert done.stdout.startswith(f"[]\n{other} is mounted as a single file"), done


def _make_a_page(connection: sqlite.dbapi2.Connection) -> None:
    connection.execute("PRAGMA page_size=16384")
    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    connection.execute("PRAGMA user_version=0")


def _enter_wal(connection: sqlite.dbapi2.Connection) -> None:
    _make_a_page(connection)
    connection.execute("PRAGMA journal_mode=WAL")


@pytest.mark.parametrize("until", [_make_a_page, _enter_wal])
async def test_a_store_whose_maker_was_killed_is_made_again(
    new_sqlite_url: str, tmp_path: Path, until: Callable[[sqlite.dbapi2.Connection], None]
) -> None:
    """A kill between the statements that make the file leaves a page without tables."""
    path = tmp_path / "store.db"
    with closing(dbapi2.connect(str(path), isolation_level=None)) as connection:
        until(connection)
    assert path.stat().st_size == 16384
    async with opened(new_sqlite_url) as experiment:
        assert (await experiment.writer("e0").write([rollout()])).written == 1
    with closing(dbapi2.connect(str(path))) as connection:
        found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in MADE_WITH]
    assert found == list(MADE_WITH.values())


MADE_WITH = {"page_size": 16384, "journal_mode": "wal", "application_id": sqlite.APPLICATION_ID}


async def test_no_new_store_is_made_beside_the_log_of_one_that_was_moved(
    new_sqlite_url: str, tmp_path: Path
) -> None:
    path, elsewhere = tmp_path / "store.db", tmp_path / "elsewhere.db"
    async with opened(new_sqlite_url) as experiment:
        await experiment.writer("e0").write([rollout()])
        for name in ("store.db", "store.db-wal"):  # as a kill leaves them
            shutil.copy(tmp_path / name, tmp_path / f"killed-{name}")
    log = (tmp_path / "killed-store.db-wal").rename(tmp_path / "store.db-wal")
    path.rename(elsewhere)
    before = log.read_bytes()
    with pytest.raises(UnsafeStoreError, match=r"its log store\.db-wal may hold the last"):
        async with open_store(new_sqlite_url):
            pass
    assert (path.exists(), log.read_bytes()) == (False, before)
    (tmp_path / "killed-store.db").rename(path)
    async with opened(new_sqlite_url) as experiment:
        assert len([one async for one in experiment.read()]) == 1


@pytest.fixture
def closed_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be written, by root neither."""
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)


@pytest.mark.usefixtures("closed_folders")
async def test_what_is_read_as_it_lies_gets_no_files_beside_it(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with open_store(sqlite_url, read_only=True) as store:
        assert await store.experiments() == []
        assert names_in(tmp_path) == ["store.db"]


@pytest.mark.usefixtures("closed_folders")
def test_a_file_lies_still_where_no_log_holds_commits(tmp_path: Path) -> None:
    path, log = tmp_path / "run.db", tmp_path / "run.db-wal"
    assert sqlite.is_still(path)
    log.touch()
    assert sqlite.is_still(path)
    log.write_bytes(b"commits")
    with pytest.raises(ReadOnlyStoreError) as told:
        sqlite.is_still(path)
    assert str(told.value) == (
        f"{path}: its log run.db-wal holds commits that cannot be read in {tmp_path}, which "
        "cannot be written: copy run.db and run.db-wal to a folder of your own"
    )
    (tmp_path / "run.db-shm").touch()
    assert not sqlite.is_still(path)


@pytest.mark.parametrize("how", ["journal_mode=DELETE", "VACUUM INTO"])
async def test_a_store_that_lost_its_log_mode_gets_it_again(
    new_sqlite_url: str, tmp_path: Path, how: str
) -> None:
    async with opened(new_sqlite_url) as experiment:
        await experiment.writer("e0").write([rollout()])
    path = tmp_path / "store.db"
    with closing(dbapi2.connect(path)) as shell:
        if how == "VACUUM INTO":
            shell.execute(f"VACUUM INTO '{tmp_path / 'copy.db'}'")
            path = tmp_path / "copy.db"
        else:
            shell.execute(f"PRAGMA {how}")
    async with opened(str(path)) as experiment:
        await experiment.writer("e0").write([rollout(run=1)])
        with closing(dbapi2.connect(path)) as shell:
            assert shell.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert (await verify(experiment)).ok


async def test_the_log_of_a_store_behind_a_link_is_found(
    new_sqlite_url: str, tmp_path: Path
) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "store.db")
    async with opened(new_sqlite_url) as experiment:
        await experiment.writer("e0").write([rollout()])
        state = log_state(tmp_path / "link.db")
        assert state.size_bytes == log_state(tmp_path / "store.db").size_bytes > 0
