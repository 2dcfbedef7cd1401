"""SIGKILL of each process at each named place, then the proof from outside."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import anyio
import pytest

from tests.crash.lives import LIFE_S, Lives, run_all
from tests.crash.points import CRASH_POINTS
from tests.handles import VerifyReport
from trinity_buffer import open_store, verify
from trinity_buffer.cli.run_config import resolved

EXPLORER_POINTS = [p for p in CRASH_POINTS if p.endswith(("plan", "append"))]
STRATEGY_POINTS = [p for p in CRASH_POINTS if p.endswith("annotate")]
TRAINER_POINTS = [p for p in CRASH_POINTS if p.endswith(("lease", "step", "checkpoint", "commit"))]

CONFIG = {
    "task": {"digits": 1},
    "model": {"width": 8, "layers": 1, "heads": 1},
    "groups_per_batch": 2,
    "rollouts_per_group": 2,
    "groups_per_step": 2,
    "max_staleness": 2,
    "evaluation": {"every_steps": 1000, "num_eval_samples": 1},
}


@pytest.mark.long
def test_a_kill_at_any_place_loses_nothing_and_doubles_nothing(
    new_sqlite_url: str, tmp_path: Path
) -> None:
    kill_everywhere(new_sqlite_url, tmp_path, second_explorer_dies=False)


@pytest.mark.long  # twenty seconds each
def test_two_explorers_that_are_killed_lose_nothing_and_double_nothing(
    store_url: str, tmp_path: Path
) -> None:
    kill_everywhere(store_url, tmp_path, second_explorer_dies=True)


def kill_everywhere(store_url: str, tmp_path: Path, *, second_explorer_dies: bool) -> None:
    """Let each process of a run die at each of its places, once; nothing may be lost."""
    acknowledgements, checkpoints = tmp_path / "acks", tmp_path / "checkpoints"
    acknowledgements.mkdir()
    checkpoints.mkdir()
    anyio.run(_create, store_url)
    common = {"url": store_url, "experiment": "crash"}
    acks = str(acknowledgements)
    lives = [
        # Both explorers count to another batch before they crash, so that more orders are met.
        Lives(
            "explorer",
            {**common, "actor": "e0", "acknowledgements": acks},
            EXPLORER_POINTS,
            tmp_path / "e0",
        ),
        Lives(
            "explorer",
            {**common, "actor": "e1", "acknowledgements": acks},
            [f"{point}:2" for point in EXPLORER_POINTS if second_explorer_dies],
            tmp_path / "e1",
        ),
        Lives("strategy", common, STRATEGY_POINTS, tmp_path / "strategy"),
        Lives(
            "trainer",
            {**common, "checkpoints": str(checkpoints)},
            TRAINER_POINTS,
            tmp_path / "trainer",
        ),
    ]
    run_all(lives, lambda: anyio.run(_finish, store_url))
    report = anyio.run(_verified, store_url, acknowledgements)

    assert [one.survived for one in lives] == [[], [], [], []]
    assert [one.exit_code for one in lives] == [0, 0, 0, 0]
    assert report.problems == ()
    assert (report.lost, report.duplicated) == (0, 0)


async def _create(url: str) -> None:
    async with open_store(url) as store:
        await store.experiment("crash", config=asdict(resolved(CONFIG)))


async def _finish(url: str) -> None:
    """Let everybody go on for three more steps, then end the run."""
    async with open_store(url) as store:
        experiment = await store.experiment("crash")
        commits = 0
        with anyio.fail_after(2 * LIFE_S):
            async for _ in experiment.events(follow=True, kinds=("StepsCommitted",)):
                commits += 1
                if commits >= 5:
                    break
        await experiment.finish(f"after {commits} commits")


async def _verified(url: str, acknowledgements: Path) -> VerifyReport:
    async with open_store(url) as store:
        experiment = await store.experiment("crash")
        checkpoint = await experiment.last_checkpoint()
        assert checkpoint is not None
        return await verify(experiment, acknowledged=acknowledgements, checkpoint=Path(checkpoint))
