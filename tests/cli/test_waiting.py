"""Who follows may come before there is anything to follow."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from trinity_buffer import open_store
from trinity_buffer.cli.options import awaited_experiment
from trinity_buffer.pipeline.coordination.waiting import WAIT_REPORT


async def test_a_follower_waits_for_the_store_and_its_first_experiment(
    store_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WAIT_REPORT, "0.01")
    found: list[str] = []

    async def wait() -> None:
        found.append(await awaited_experiment(store_url, None))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            said = ""
            while said.count("waits for the first explorer") < 2:  # it goes on to say so
                await anyio.sleep(0.001)
                said += capsys.readouterr().err
            async with open_store(store_url) as store:
                await store.experiment("sort", config={})
    assert found == ["sort"]


async def test_a_follower_of_a_folder_to_come_is_told_of_one_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WAIT_REPORT, "0.01")
    monkeypatch.chdir(tmp_path)
    with anyio.move_on_after(0.5):
        await awaited_experiment("sqlite:///runs/run.db", None)
    assert capsys.readouterr().err.splitlines()[0] == (
        f"waits for the first explorer or trainer to make it: {tmp_path}/runs/run.db: there is no "
        "store to read, nor is there its folder"
    )
