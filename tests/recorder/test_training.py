"""What was recorded is trained and replayed from the command line, as any other run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.explorer.vllm_dialect import VLLM, served
from tests.recorder.test_recorder import HELLO, client, recording, reward
from trinity_buffer.cli.main import run_command
from trinity_buffer.demo.tiny_model import make_tiny_model


async def talk(store: Path, upstream: str) -> None:
    """Let an agent attempt two tasks, twice each."""
    async with recording(f"sqlite:///{store}", upstream) as url:
        for task in range(2):
            for run in range(2):
                async with client(f"{url}/rollouts/{task}/{run}") as agent:
                    asked: Any = {"model": "tiny", "messages": HELLO}
                    await agent.chat.completions.create(**asked)
                assert (await reward(url, f"{task}/{run}", float(run))).status_code == 200


def test_what_was_recorded_is_trained_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model(tmp_path / "model", width=16, layers=1, heads=2)
    with served(VLLM(tmp_path / "model").app()) as upstream:
        anyio.run(talk, tmp_path / "agent.db", upstream)
    file = tmp_path / "run.toml"
    file.write_text(
        'store = "agent.db"\nexperiment = "agent"\nmodel = "model"\n'
        "rollouts_per_group = 2\ngroups_per_step = 2\n"
    )
    for command in ("annotate", "train", "replay"):
        argv = ["trinity-buffer", command, "--config", str(file)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            run_command()
        assert not end.value.code, capsys.readouterr().err
    assert "steps 1 to 1: weights bit-identical" in capsys.readouterr().out
