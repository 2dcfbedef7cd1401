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

from trinity_buffer.pipeline.store import open_store

NOBODY = 65534

# Imports first: the checkout may be closed to nobody.
STEP_DOWN_AND_OPEN = f"""
import os, sys, anyio
import trinity_buffer.pipeline.store as s
from trinity_buffer.errors import ReadOnlyStoreError
import sqlalchemy.dialects.sqlite
async def open_it(read_only):
    async with s.open_store(sys.argv[1], read_only=read_only) as store:
        print(await store.experiments())
if os.geteuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
anyio.run(open_it, True)
try:
    anyio.run(open_it, False)
except ReadOnlyStoreError as error:
    print(error)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for everybody; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.path.realpath(name))
        folder.chmod(0o777)  # readers of a write-ahead log need a place for their shared memory
        yield folder


def test_a_file_that_cannot_be_written_is_read_and_not_changed(open_folder: Path) -> None:
    file = open_folder / "run.db"

    async def create() -> None:
        async with open_store(str(file)) as store:
            await store.experiment("sort", config={})

    anyio.run(create)
    file.chmod(0o444)
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
