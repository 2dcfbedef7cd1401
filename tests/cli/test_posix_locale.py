"""Words that are not ASCII, where the locale says that all are."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from tests.sample_run import rollout
from trinity_buffer import open_store
from trinity_buffer.explorer.explore import Acknowledgements

POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""As in a container of its own Python; else Python itself sees to it."""

RECORDING = """
import sys
from pathlib import Path
from tests.cli.test_posix_locale import record
record(Path(sys.argv[1]))
"""


def record(folder: Path) -> None:
    """Write and acknowledge a rollout of a batch with an umlaut."""

    async def write() -> None:
        async with open_store(folder / "store.db") as store:
            experiment = await store.experiment("läuft", config={})
            writer = experiment.writer("erkunder-ü")
            acknowledged = Acknowledgements(folder / "acks" / "ü.acks")
            acknowledged.note(await writer.write([rollout("b-ü", 0, 0, 1.0)]))
            acknowledged.close()

    (folder / "acks").mkdir()
    anyio.run(write)


def ran(folder: Path, *words: str | bytes) -> subprocess.CompletedProcess[bytes]:
    """Run Python in a POSIX locale."""
    env = {**os.environ, **POSIX, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("PYTHONIOENCODING", None)
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, check=False
    )


@pytest.mark.long
def test_uids_are_written_read_and_printed_in_a_posix_locale(tmp_path: Path) -> None:
    recorded = ran(tmp_path, "-c", RECORDING, str(tmp_path))
    assert recorded.returncode == 0, recorded.stderr
    (acknowledged,) = (tmp_path / "acks").iterdir()
    assert acknowledged.name == "ü.acks"
    assert acknowledged.read_text("utf-8").startswith("b-ü/0/0/0/")
    (tmp_path / "läden").symlink_to(tmp_path)
    command = ("-m", "trinity_buffer")
    shown = ran(tmp_path, *command, "show", "b-ü/0/0/0", "--store", "läden/store.db", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["uid"] == "b-ü/0/0/0/"
    for words in (
        ("events", "--experiment", "läuft"),
        ("verify", "--acknowledged", "acks"),
        ("show", "b-ü/0/0/0"),
    ):
        done = ran(tmp_path, *command, *words, "--store", "läden/store.db")
        assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_an_argument_that_is_no_utf_8_is_an_error_in_a_sentence(tmp_path: Path) -> None:
    record(tmp_path)
    command = ("-m", "trinity_buffer", "show", b"b-\xff/0/0/0", "--store", "store.db")
    for done in (
        ran(tmp_path, *command),
        subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, check=False),
    ):
        assert done.returncode == 2
        assert b"is not valid UTF-8" in done.stderr
        assert b"Traceback" not in done.stderr


@pytest.mark.long
def test_json_is_json_where_the_output_is_ascii(tmp_path: Path) -> None:
    record(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "trinity_buffer", "show", "b-ü/0/0/0", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "TRINITY_BUFFER_STORE": "store.db"},
        capture_output=True,
        check=False,
    )
    assert json.loads(done.stdout.decode("ascii"))["uid"] == "b-ü/0/0/0/"


def test_lines_are_ascii_where_the_output_is(tmp_path: Path) -> None:
    record(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "trinity_buffer", "events"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "TRINITY_BUFFER_STORE": "store.db"},
        capture_output=True,
        check=False,
    )
    assert "of batch b-\\xfc" in done.stdout.decode("ascii")


def test_what_is_piped_is_not_shown_beside_the_progress(tmp_path: Path) -> None:
    record(tmp_path)
    words = ("search", "0 and 0", "--json", "--store", "store.db")
    terminal, of_command = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "trinity_buffer", *words],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=of_command,
        check=False,
    )
    os.close(of_command)
    shown = b""
    with suppress(OSError):  # at the end; the kernel may hand it on in pieces
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    os.close(terminal)
    assert b"search" in shown
    assert json.loads(done.stdout)["uid"] == "b-ü/0/0/0/"
