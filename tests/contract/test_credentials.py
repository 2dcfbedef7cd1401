"""A password in a URL is in no error, no log, no event and no output."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path

import anyio.to_thread
import pytest
from sqlalchemy import make_url

from tests.contract.making import group, opened
from tests.raw_store import contents
from trinity_buffer import open_store
from trinity_buffer.cli.maintenance import migrate
from trinity_buffer.cli.options import chosen_experiment
from trinity_buffer.cli.run_config import read_file
from trinity_buffer.errors import TrinityBufferError, UnknownExperimentError

PASSWORD = "s3cret-hunter2"


def with_password(url: str) -> str:
    return make_url(url).set(password=PASSWORD).render_as_string(hide_password=False)


async def test_what_is_stored_and_said_of_a_store_holds_no_password(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = with_password(postgres_url)
    with caplog.at_level(logging.DEBUG):
        async with opened(url, extra="config") as experiment:
            await experiment.writer("e0").write(group())
            said = [experiment.database.name, repr(experiment), repr(experiment.database)]
        async with open_store(url, read_only=True) as store:
            said += [store.url, repr(store), str(store)]
        said += [caplog.text, repr(await contents(url))]
    assert "***" in said[0]
    assert PASSWORD not in "".join(said)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{PASSWORD}@127.0.0.1:1/run",
        f"postgresql://me:{PASSWORD}@no-such-host.invalid/run",
        f"postgresql://me:{PASSWORD}@/run?host=/no/such/folder",
        f"postgresql://me:{PASSWORD}@127.0.0.1:port/run",
        f"postgresql://me:{PASSWORD}@127.0.0.1/run?sslmod=require",
        f"mysql://me:{PASSWORD}@127.0.0.1/run",
        f"postgresql://me:p@{PASSWORD}/word@127.0.0.1/run",
        f"postgresql://me:p@{PASSWORD}?word@127.0.0.1/run",
    ],
)
async def test_no_error_tells_the_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(TrinityBufferError) as raised:
        async with open_store(url):
            pass
    # the whole chain, as an uncaught error would be printed
    assert PASSWORD not in "".join(traceback.format_exception(raised.value)) + caplog.text
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("slip", ['"{}', "{}: y", "'{}' x"])
def test_a_slip_in_a_runs_file_does_not_tell_it(tmp_path: Path, slip: str) -> None:
    file = tmp_path / "run.yaml"
    url = f"postgresql://me:{PASSWORD}@127.0.0.1:1/run"
    file.write_text(f"algorithm: grpo\nstore: {slip.format(url)}\n")
    with pytest.raises(TrinityBufferError) as raised:
        read_file(file)
    assert PASSWORD not in "".join(traceback.format_exception(raised.value))


@pytest.mark.long
def test_the_command_line_does_not_tell_it_either() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trinity_buffer", "stats", "--json"],
        env={**os.environ, "TRINITY_BUFFER_STORE": f"postgresql://me:{PASSWORD}@127.0.0.1:1/run"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


async def test_neither_do_commands_about_a_store_that_is_there(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = with_password(postgres_url)
    async with opened(url):
        with pytest.raises(UnknownExperimentError, match="holds no experiment 'sorf'") as raised:
            await chosen_experiment(url, "sorf")
    await anyio.to_thread.run_sync(lambda: migrate(store=url, as_json=True))
    said = capsys.readouterr().out + str(raised.value)
    assert said.count("***") == 2
    assert PASSWORD not in said


@pytest.mark.parametrize("name", ["sslmode", "ssl"])
async def test_what_libpq_calls_sslmode_is_taken(postgres_url: str, name: str) -> None:
    async with opened(f"{postgres_url}&{name}=disable") as experiment:
        state = await experiment.database.changes.state()  # a connection of another kind
        await experiment.writer("e0").write(group())
        await experiment.database.changes.changed(state, timeout_s=20)
        assert await experiment.database.changes.state() != state
