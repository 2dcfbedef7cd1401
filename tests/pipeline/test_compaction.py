"""Retention: what leaves, what stays, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest

from tests.pipeline.watching import Killed
from trinity_buffer.errors import InvalidArgumentError, StoreError
from trinity_buffer.experience import EID, Experience
from trinity_buffer.pipeline.annotating.strategy_consumer import run_strategy
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.history import compaction
from trinity_buffer.pipeline.history.compaction import compact
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.verifying.verify import verify
from trinity_buffer.store import segments


def _group(task: int) -> list[Experience]:
    return [
        Experience(
            eid=EID("b", task, run),
            tokens=[1, 2, 3],
            prompt_length=1,
            logprobs=[-0.1, -0.2],
            reward=float(run),
        )
        for run in range(2)
    ]


async def _trained(experiment: Experiment, steps: int) -> None:
    """Write four groups in four writes, annotate them, and commit ``steps`` of one group each."""
    writer = experiment.writer("e0")
    await writer.plan("b", list(range(4)), 2)
    for task in range(4):
        await writer.write(_group(task))
    await run_strategy(experiment, "grpo")
    async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
        async for step in stream:
            if step.step <= steps:
                await stream.commit(step)


async def test_only_what_was_committed_before_the_horizon_leaves(
    store_url: str, tmp_path: Path
) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await _trained(experiment, steps=3)
        report = await compact(experiment, keep_steps=1, archive=tmp_path / "archive")

        assert report.segments == 2
        rows = pyarrow.parquet.read_table(report.files[0]).to_pylist()
        assert len({row["segment"] for row in rows}) == 2
        assert sum(len(row["data"]) for row in rows) == report.bytes
        assert [e.eid.task async for e in experiment.read(task=2)] == [2, 2]
        assert (await verify(experiment)).problems == ()
        again = await compact(experiment, keep_steps=1, archive=tmp_path / "archive")
        assert again.segments == 0


async def test_nothing_leaves_without_a_trainer_or_without_being_asked(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await experiment.writer("e0").write(_group(0))
        assert (await compact(experiment, keep_steps=0, archive=None, delete=True)).segments == 0
        with pytest.raises(InvalidArgumentError, match="folder to archive to, or delete"):
            await compact(experiment, keep_steps=0, archive=None)


async def test_a_segment_that_no_event_archived_cannot_be_deleted(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await experiment.writer("e0").write(_group(0))
        event = await anext(experiment.events(kinds=["ExperiencesRecorded"]))
        with pytest.raises(StoreError, match="archive it first"):
            await store.database.write(segments.delete, [event.body["segment"]])


@pytest.mark.parametrize("point", ["before-compact", "inside-compact", "after-compact"])
async def test_what_a_crash_left_half_done_is_finished_by_the_next(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def die(name: str) -> None:
        if name == point:
            raise Killed

    archive = tmp_path / "archive"
    async with open_store(store_url) as store:
        experiment = await store.experiment("a/b", config={})
        await _trained(experiment, steps=3)
        with monkeypatch.context() as patch:
            patch.setattr(compaction, "reached", die)
            with pytest.raises(Killed):
                await compact(experiment, keep_steps=0, archive=archive)
        assert (await verify(experiment)).problems == ()
        left = 0 if point == "after-compact" else 3
        assert (await compact(experiment, keep_steps=0, archive=archive)).segments == left
        assert (await verify(experiment)).problems == ()
        named = [e.body async for e in experiment.events(kinds=["SegmentsArchived"])]
    files = [pyarrow.parquet.read_table(file) for file in archive.iterdir()]
    assert {body["uri"] for body in named} == {str(file) for file in archive.iterdir()}
    assert sorted(key for body in named for key in body["segments"]) == sorted(
        {row["segment"] for file in files for row in file.to_pylist()}
    )
