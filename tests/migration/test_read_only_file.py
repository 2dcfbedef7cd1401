"""A file that one may read and not write. Root may write everything: a process steps down."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from trinity_buffer import open_store
from trinity_buffer.errors import StoreReplacedError

NOBODY = 65534

# A store of its own first: it imports all that this needs. The checkout and the environment may
# then be closed to the user that the process becomes, as they are below /root.
STEP_DOWN_AND_OPEN = f"""
import os, sys, tempfile, anyio
import trinity_buffer.pipeline.store as s
from trinity_buffer.errors import ReadOnlyStoreError
async def open_it(read_only):
    async with s.open_store(sys.argv[1], read_only=read_only) as store:
        print(await store.experiments())
async def import_all(path):
    for read_only in (False, True):
        async with s.open_store(path, read_only=read_only) as store:
            await store.experiments()
with tempfile.TemporaryDirectory() as folder:
    anyio.run(import_all, folder + "/own.db")
imported = set(sys.modules)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
anyio.run(open_it, True)
try:
    anyio.run(open_it, False)
except ReadOnlyStoreError as error:
    print(error)
late = set(sys.modules) - imported
assert not late, f"imported by a user who may not read them: {{late}}"
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for everybody; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.path.realpath(name))
        folder.chmod(0o777)  # readers of a write-ahead log need a place for their shared memory
        yield folder


@pytest.mark.parametrize("mode", [0o777, 0o555])
def test_a_file_that_cannot_be_written_is_read_and_not_changed(
    open_folder: Path, mode: int
) -> None:
    file = open_folder / "run.db"

    async def create() -> None:
        async with open_store(str(file)) as store:
            await store.experiment("sort", config={})

    anyio.run(create)
    file.chmod(0o444)
    open_folder.chmod(mode)
    before = file.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", STEP_DOWN_AND_OPEN, f"sqlite:///{file}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    listed, refused = done.stdout.splitlines()
    assert listed == "['sort']"
    assert "cannot be written" in refused
    assert str(file) in refused
    assert file.read_bytes() == before


def test_commits_that_cannot_be_read_where_they_lie_are_told_of(open_folder: Path) -> None:
    file = open_folder / "run.db"

    async def create() -> None:
        async with open_store(str(file)) as store:
            await store.experiment("sort", config={})
            log = Path(f"{file}-wal").read_bytes()  # noqa: ASYNC240 - a test waits for nobody
        Path(f"{file}-wal").write_bytes(log)  # noqa: ASYNC240

    anyio.run(create)
    open_folder.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", STEP_DOWN_AND_OPEN, f"sqlite:///{file}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "run.db-wal holds commits that cannot be read" in done.stderr
    assert "copy run.db and run.db-wal" in done.stderr


async def test_who_reads_a_file_as_it_lies_hears_that_somebody_writes(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_folder / "run.db"
    async with open_store(str(file)) as store:
        await store.experiment("sort", config={})
    with monkeypatch.context() as patched:  # root may write everywhere
        patched.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
        still = open_store(str(file), read_only=True)
        reader = await still.__aenter__()
    assert await reader.experiments() == ["sort"]
    async with open_store(str(file)) as store:
        await store.experiment("other", config={})
        with pytest.raises(StoreReplacedError, match="another process writes to the store"):
            await reader.experiments()
    await still.__aexit__(None, None, None)
