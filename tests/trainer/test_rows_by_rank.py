"""A commit says how many rows each rank took, and `verify` believes no commit."""

from __future__ import annotations

import pytest

from tests.trainer.data import recorded, rollouts
from tests.trainer.test_elastic_ranks import life
from trinity_buffer import open_store, verify
from trinity_buffer.pipeline.train import ranks, stream
from trinity_buffer.pipeline.train.step import Delivered


async def test_a_commit_says_how_many_rows_each_rank_took(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await life(experiment, 3, deliver=99, commit=99)
        commits = [e.body async for e in experiment.events(kinds=("StepsCommitted",))]
        assert [commit["rows_by_rank"] for commit in commits] == [[[3, 3, 0]]] * 3
        assert (await verify(experiment)).ok


async def test_verify_finds_a_commit_of_rows_that_no_rank_took(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "rows_by_rank", lambda _: [2, 2])
    monkeypatch.setattr(stream, "Delivered", lambda manifest, _: Delivered(manifest, 2))
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await life(experiment, 2, deliver=1, commit=1)
        (problem,) = (await verify(experiment)).problems
    assert problem.what == "step 1: its ranks took [2, 2] rows, they were dealt [3, 3]"
