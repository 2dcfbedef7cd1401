"""Commands of a run in which nothing moves end with exit code 3."""

from __future__ import annotations

import anyio
import pytest

from tests.cli.calling import Cli
from tests.contract.making import opened


def test_a_command_of_a_run_that_has_stalled_says_so_and_ends_with_3(
    cli: Cli, new_sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write() -> None:
        async with opened(new_sqlite_url, rollouts_per_group=4, stalled_after_s=0.2) as experiment:
            await experiment.writer("gone").plan("b", [0], 4)

    monkeypatch.setenv("TRINITY_BUFFER_WAIT_REPORT_S", "0.1")
    anyio.run(write)
    told = cli("annotate", "--strategy", "grpo", "--follow", "--store", new_sqlite_url)
    assert told.code == 3, told.err
    assert "nothing has moved for 0.2 s (stalled_after_s)" in told.err
