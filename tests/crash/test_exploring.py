"""SIGKILL in the midst of `explore`: what is stored stays, what is missing is made again, once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

import trinity_buffer as tb
from tests.crash.lives import Lives, run_all

POINTS = ["after-plan", "before-append:3", "after-append"]
LOST = 1  # rollout that deaths at these points cost one explorer, one run at a time: the second
CONFIG = {"groups_per_batch": 3, "rollouts_per_group": 2}
RUNS = {
    f"epoch{epoch}-{task // 3}/{task}/{run}": 1
    for epoch in range(2)
    for task in range(12)
    for run in range(2)
}


async def _create(url: str) -> None:
    async with tb.open_store(url) as store:
        await store.experiment("crash", config=CONFIG)


async def _found(url: str) -> tuple[Counter[str], Counter[str], dict[str, str], int]:
    """Return runs, seals by batch, who planned each batch, and how many plans there are."""
    async with tb.open_store(url) as store:
        experiment = await store.experiment("crash")
        runs = Counter([one.eid.rid async for one in experiment.read(include_refused=True)])
        kinds = ("BatchPlanned", "BatchSealed")
        events: list[Any] = [event async for event in experiment.events(kinds=kinds)]
    plans = [event for event in events if event.kind == "BatchPlanned"]
    seals = Counter(event.body["batch"] for event in events if event.kind == "BatchSealed")
    return runs, seals, {event.body["batch"]: event.actor for event in plans}, len(plans)


@pytest.mark.long
def test_an_explorer_that_is_killed_makes_only_what_is_missing(
    store_url: str, tmp_path: Path
) -> None:
    anyio.run(_create, store_url)
    made = tmp_path / "made"
    arguments = {"url": store_url, "actor": "e0", "made": str(made), "concurrency": 1}
    lives = Lives("any_rollout", arguments, POINTS, tmp_path / "log")
    run_all([lives], lambda: None)

    assert (lives.survived, lives.exit_code) == ([], 0), (tmp_path / "log").read_text()
    runs, seals, _, plans = anyio.run(_found, store_url)
    assert runs == RUNS
    assert (plans, len(seals), seals.total()) == (8, 8, 8)
    assert len(made.read_text().splitlines()) == len(RUNS) + LOST


@pytest.mark.long
def test_actors_that_are_killed_share_one_list_still(store_url: str, tmp_path: Path) -> None:
    anyio.run(_create, store_url)
    lives = []
    for actor, concurrency in (("e0", 4), ("e1", 1)):
        arguments = {
            "url": store_url,
            "actor": actor,
            "made": str(tmp_path / "made"),
            "concurrency": concurrency,
        }
        # A life that finds nothing left to do ends well: which ones do is up to the other actor.
        lives.append(Lives("any_rollout", arguments, POINTS, tmp_path / actor))
    run_all(lives, lambda: None)

    assert [one.exit_code for one in lives] == [0, 0]
    assert len([death for one in lives for death in one.crashed]) >= len(POINTS)
    runs, seals, actors, plans = anyio.run(_found, store_url)
    assert runs == RUNS
    assert plans == len(actors) == len(seals) == seals.total() == 8
