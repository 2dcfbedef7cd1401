"""A demo that cannot learn ends soon, says why, and does not say that all is well."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from tests.cli.calling import Cli, Ended
from tests.crash.forking import fork_children
from trinity_buffer import open_store


@pytest.fixture
def demo(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run a demo in a folder of its own, whose processes are forked."""
    monkeypatch.chdir(tmp_path)
    fork_children(monkeypatch)
    return lambda *words: cli("demo", "--limit", "900", *words)


@pytest.mark.long
def test_a_learning_rate_that_breaks_the_weights_ends_the_run(
    demo: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = demo("--set", "optimizer.learning_rate=1e9")
    assert ended.code == 1
    *_, conserved, last = ended.out.splitlines()
    assert conserved == "lost 0, duplicated 0"
    assert last.startswith("failed: ")
    assert "lower" in last
    assert "learning rate" in last or "learning_rate" in last
    assert "ends again and again" not in ended.out
    assert "everything holds" not in ended.out
    assert "verify: what was stored holds, but the run failed" in ended.out

    async def metrics() -> list[float]:
        async with open_store(
            f"sqlite:///{tmp_path / 'runs' / 'demo.db'}", read_only=True
        ) as store:
            experiment = await store.experiment("demo")
            committed = [e.body async for e in experiment.events(kinds=("StepsCommitted",))]
        return [number for body in committed for number in body["metrics"].values()]

    assert all(map(math.isfinite, anyio.run(metrics)))


@pytest.mark.long
def test_a_run_that_had_no_time_to_train_has_failed(demo: Callable[..., Ended]) -> None:
    # Steps so large that none is trained before the processes are stopped, however long that takes.
    ended = demo("--limit", "0", "--set", "groups_per_step=1000")
    assert ended.code == 1
    assert "verify: what was stored holds, but the run failed" in ended.out
    last = ended.out.splitlines()[-1]
    assert last.startswith("failed: nothing was trained in ")
    assert last.endswith("cut short by --limit 0 at step 0: run the same command again to go on")
