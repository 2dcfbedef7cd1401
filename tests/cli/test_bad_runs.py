"""A demo that cannot learn ends soon, says why, and does not say that all is well."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from trinity_buffer.pipeline.store import open_store


def demo(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trinity_buffer", "demo", "--limit", "900", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_learning_rate_that_breaks_the_weights_ends_the_run(tmp_path: Path) -> None:
    ended = demo(tmp_path, "--set", "optimizer.learning_rate=1e9")
    assert ended.returncode == 1
    *_, conserved, last = ended.stdout.splitlines()
    assert conserved == "lost 0, duplicated 0"
    assert last.startswith("failed: ")
    assert "lower" in last
    assert "learning rate" in last or "learning_rate" in last
    assert "ends again and again" not in ended.stdout
    assert "everything holds" not in ended.stdout
    assert "verify: what was stored holds, but the run failed" in ended.stdout

    async def metrics() -> list[float]:
        async with open_store(
            f"sqlite:///{tmp_path / 'runs' / 'demo.db'}", read_only=True
        ) as store:
            experiment = await store.experiment("demo")
            committed = [e.body async for e in experiment.events(kinds=("StepsCommitted",))]
        return [number for body in committed for number in body["metrics"].values()]

    assert all(map(math.isfinite, anyio.run(metrics)))


@pytest.mark.long
def test_a_run_that_had_no_time_to_train_has_failed(tmp_path: Path) -> None:
    ended = demo(tmp_path, "--limit", "0.5")
    assert ended.returncode == 1
    assert "verify: what was stored holds, but the run failed" in ended.stdout
    last = ended.stdout.splitlines()[-1]
    assert last.startswith("failed: nothing was trained in ")
    assert last.endswith("cut short by --limit 0.5 at step 0: run the same command again to go on")
