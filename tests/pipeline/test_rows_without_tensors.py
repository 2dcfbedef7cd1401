"""Rows whose tensors have left the database: all are read, and each says where its tensors are."""

from __future__ import annotations

import copy
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from tests.contract.making import group
from tests.handles import Experiment
from tests.whole_stores import replayed_steps
from trinity_buffer import assign_rewards, compact, inspector, open_store, run_strategy, verify
from trinity_buffer.errors import ArchivedSegmentError, InvalidArgumentError
from trinity_buffer.experience import Experience

GONE, KEPT, LATER = 2, 2, 1
"""Groups whose tensors leave, groups that keep theirs, and those that are written afterwards."""


@asynccontextmanager
async def compacted(
    url: str, archive: Path | None
) -> AsyncIterator[tuple[Experiment, list[Experience]]]:
    """Yield an experiment after its compaction, and what was written: a segment for each group."""
    written = [group(task=task) for task in range(GONE + KEPT + LATER)]
    async with open_store(url) as store:
        experiment = await store.experiment("x", config={"rollouts_per_group": len(written[0])})
        writer = experiment.writer("e0")
        for some in written[: GONE + KEPT]:
            await writer.write(some)
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            for _ in range(GONE):
                await stream.commit(await anext(stream))
        report = await compact(experiment, keep_steps=0, archive=archive, delete=archive is None)
        assert report.segments == GONE
        for some in written[GONE + KEPT :]:
            await writer.write(some)
        yield experiment, [one for some in written for one in some]


async def read(experiment: Experiment, **options: object) -> list[Experience]:
    return [one async for one in experiment.read(**options)]  # type: ignore[arg-type]


def same(read_back: list[Experience], written: list[Experience]) -> bool:
    """Whether these are all of the rows, in order, each with its tensors."""
    pairs = zip(read_back, written, strict=True)
    return all(a.eid == b.eid and torch.equal(a.tokens, b.tokens) for a, b in pairs)


async def test_every_row_is_read_and_what_was_deleted_says_so_when_asked(store_url: str) -> None:
    async with compacted(store_url, None) as (experiment, written):
        (event,) = [e async for e in experiment.events(kinds=["SegmentsArchived"])]
        found = await read(experiment)
        deleted, left = found[: GONE * 4], found[GONE * 4 :]
        assert same(left, written[GONE * 4 :])
        assert [one.archived for one in left] == [None] * len(left)
        for one, before in zip(deleted, written, strict=False):
            facts = (one.eid, one.reward, one.length, one.response_length, one.policy_version)
            assert facts == (before.eid, before.reward, 8, 5, 0)
            assert one.response_text is None, "there never was one"
            for field in ("tokens", "logprobs", "action_mask", "info"):
                with pytest.raises(
                    ArchivedSegmentError, match=f"deleted .* position {event.position} .* backup"
                ):
                    getattr(copy.deepcopy(one), field)


@pytest.mark.parametrize("delete", [True, False])
async def test_who_wants_no_tensors_is_told_nothing_of_them(
    store_url: str, tmp_path: Path, delete: bool
) -> None:
    async with compacted(store_url, None if delete else tmp_path / "a") as (experiment, written):
        if not delete:
            (tmp_path / "a").rename(tmp_path / "elsewhere")
        found = await read(experiment, families=())
        assert [one.eid for one in found] == [one.eid for one in written]
        assert [one.reward for one in found] == [one.reward for one in written]
        assert {one.archived for one in found} == {None}


async def test_what_was_archived_is_fetched_from_its_file(store_url: str, tmp_path: Path) -> None:
    async with compacted(store_url, tmp_path / "archive") as (experiment, written):
        assert same(await read(experiment), written)
        light = await read(experiment, families=("light",), task=0)
        assert [one.info for one in light] == [{"model_version": 0}] * 4
        with pytest.raises(AttributeError, match="needs 'tokens' among them"):
            _ = light[0].tokens


def taken_away(file: Path, _: pytest.MonkeyPatch) -> None:
    file.rename(file.with_suffix(".away"))


def cut(file: Path, _: pytest.MonkeyPatch) -> None:
    file.with_suffix(".away").write_bytes(file.read_bytes())
    file.write_bytes(file.read_bytes()[:-100])


def no_pyarrow(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "pyarrow", None)


HARMS = [
    (taken_away, "put it back"),
    (cut, "put a sound copy in its place"),
    (no_pyarrow, "pip install 'trinity-buffer"),
]


@pytest.mark.parametrize(("harm", "remedy"), HARMS)
async def test_an_archive_that_cannot_be_read_says_what_to_do_until_it_is_done(
    store_url: str, tmp_path: Path, harm: Callable[[Path, pytest.MonkeyPatch], object], remedy: str
) -> None:
    async with compacted(store_url, tmp_path / "archive") as (experiment, written):
        (file,) = (tmp_path / "archive").iterdir()
        with pytest.MonkeyPatch.context() as patch:
            harm(file, patch)
            found = await read(experiment)
            assert same(found[GONE * 4 :], written[GONE * 4 :])
            for one in found[: GONE * 4]:
                with pytest.raises(ArchivedSegmentError, match=f"{file.name} by .*{remedy}"):
                    _ = one.tokens
            with pytest.raises(ArchivedSegmentError, match=remedy):
                await run_strategy(experiment, "grpo", name="second")
            with pytest.raises(ArchivedSegmentError, match=remedy):
                async with experiment.train_stream(strategy="grpo", consumer="t2") as stream:
                    await anext(stream)
        if file.with_suffix(".away").exists():
            file.with_suffix(".away").rename(file)
        assert same(await read(experiment), written)
        assert (await run_strategy(experiment, "grpo", name="second")).annotated == len(written)


async def test_a_file_that_holds_something_else_is_not_taken_for_the_archive(
    store_url: str, tmp_path: Path
) -> None:
    async with compacted(store_url, tmp_path / "archive") as (experiment, _):
        (file,) = (tmp_path / "archive").iterdir()
        async with compacted(f"sqlite:///{tmp_path}/other.db", tmp_path / "other"):
            next((tmp_path / "other").iterdir()).rename(file)
        first, *_ = await read(experiment, task=0)
        with pytest.raises(ArchivedSegmentError, match="does not hold"):
            _ = first.tokens


async def test_a_strategy_rejects_what_was_deleted_and_goes_on(store_url: str) -> None:
    async with compacted(store_url, None) as (experiment, _):
        report = await run_strategy(experiment, "grpo", name="second")
        assert (report.rejected, report.annotated) == (GONE * 4, (KEPT + LATER) * 4)
        checked = await verify(experiment)
        assert checked.problems == ()
        (second,) = [one for one in checked.strategies if one.consumer == "second"]
        assert second.rejected == {"deleted": GONE * 4}


async def test_a_strategy_sees_what_was_archived(store_url: str, tmp_path: Path) -> None:
    async with compacted(store_url, tmp_path / "archive") as (experiment, written):
        report = await run_strategy(experiment, "grpo", name="second")
        assert (report.rejected, report.annotated) == (0, len(written))


async def served(experiment: Experiment, consumer: str) -> list[torch.Tensor]:
    """Return the tokens of the steps that a trainer of this name is served and commits."""
    found = []
    options = {"strategy": "grpo", "groups_per_step": 1, "consumer": consumer}
    async with experiment.train_stream(**options) as stream:
        async for step in stream:
            found += [microbatch["input_ids"] for microbatch in step.microbatches]
            await stream.commit(step)
    return found


async def test_another_trainer_rejects_what_was_deleted_and_is_served_what_was_archived(
    store_url: str, tmp_path: Path
) -> None:
    async with compacted(store_url, None) as (experiment, written):
        assert len(await served(experiment, "second")) == KEPT
        checked = await verify(experiment)
        assert checked.problems == ()
        (second,) = [one for one in checked.trainers if one.consumer == "second"]
        assert second.rejected == {"deleted": GONE * 4}
    async with compacted(f"sqlite:///{tmp_path}/other.db", tmp_path / "a") as (experiment, written):
        rows = torch.cat(await served(experiment, "second"))
        tokens = torch.stack([one.tokens for one in written[: (GONE + KEPT) * 4]])
        assert torch.equal(rows, tokens.long())


async def test_a_replay_reads_the_archive_and_names_the_event_that_deleted(
    store_url: str, tmp_path: Path
) -> None:
    async with compacted(store_url, None) as (experiment, _):
        with pytest.raises(ArchivedSegmentError, match="deleted for good by the event"):
            await anext(replayed_steps(experiment))
    async with compacted(f"sqlite:///{tmp_path}/other.db", tmp_path / "a") as (experiment, _):
        assert [step.step async for step in replayed_steps(experiment)] == [1, 2]


async def test_a_new_reward_function_may_do_without_what_was_deleted(store_url: str) -> None:
    async with compacted(store_url, None) as (experiment, written):
        assert await assign_rewards(experiment, "twice", lambda e: 2 * (e.reward or 0.0)) == len(
            written
        )
        with pytest.raises(ArchivedSegmentError, match="deleted for good"):
            await assign_rewards(experiment, "tokens", lambda e: float(e.tokens[0]))
        with pytest.raises(InvalidArgumentError, match="assign_rewards has families='token'"):
            await assign_rewards(experiment, "tokens", lambda _: 1.0, families=["token"])
        there = await assign_rewards(
            experiment, "tokens", lambda e: None if e.archived else float(e.tokens[0])
        )
        assert there == (KEPT + LATER) * 4


async def test_show_says_where_the_tensors_are(store_url: str, tmp_path: Path) -> None:
    async with compacted(store_url, None) as (experiment, written):
        told = await inspector.show(experiment, written[0].eid.uid)
        assert "deleted for good by the event at position" in (told.archived or "")
        assert (told.tensors, told.length) == ({}, 8)
        assert (await inspector.show(experiment, written[-1].eid.uid)).archived is None
    async with compacted(f"sqlite:///{tmp_path}/other.db", tmp_path / "a") as (experiment, written):
        told = await inspector.show(experiment, written[0].eid.uid)
        assert told.archived is None
        assert told.tensors["tokens"].shape == (8,)
