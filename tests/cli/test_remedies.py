"""What cannot be done is told in a sentence that says what to do instead."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.calling import Cli

SERVERS = [("serve",), ("record", "--upstream", "http://127.0.0.1:9/v1")]


def new_store(cli: Cli, folder: Path) -> Path:
    """Return a store with an experiment of which nothing is recorded yet."""
    cli("train", "--store", folder / "run.db", "--set", "seed=7")
    return folder / "run.db"


@pytest.mark.parametrize("words", SERVERS)
def test_a_port_in_use_is_named(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    store = new_store(cli, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = cli(*words, "--store", store, "--port", port)
    said = f"error: port {port} of 127.0.0.1: Address already in use: choose another with --port\n"
    assert (ended.code, ended.err) == (1, said)


def test_a_recorder_without_a_port_leaves_no_store(cli: Cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = cli(
            *SERVERS[1], "--store", tmp_path / "new" / "a.db", "--port", taken.getsockname()[1]
        )
    assert (ended.code, list(tmp_path.iterdir())) == (1, [])


def test_a_host_that_is_none_is_named(cli: Cli, tmp_path: Path) -> None:
    store = new_store(cli, tmp_path)
    ended = cli("serve", "--store", store, "--token", "t", "--host", "h" * 70, "--port", 0)
    assert ended.code == 1
    assert "choose another with --host" in ended.err


@pytest.mark.parametrize("words", SERVERS)
@pytest.mark.parametrize("port", [-1, 99999])
def test_a_port_that_no_host_has_is_refused(cli: Cli, words: tuple[str, ...], port: int) -> None:
    ended = cli(*words, "--port", port)
    assert ended.code == 2
    assert f"{port} is not in the range 0<=x<=65535" in ended.err
