"""Commits, the checkpoints they name, and what is served after them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from tests.contract.making import group, kinds, opened
from tests.handles import Experiment, TrainStep, TrainStream
from tests.raw_store import dbapi2
from tests.whole_stores import digest_of, recorded_end
from trinity_buffer import run_strategy, verify
from trinity_buffer.errors import (
    CheckpointError,
    ConflictingStrategyError,
    InvalidArgumentError,
    LeaseHeldError,
    StoreError,
)
from trinity_buffer.pipeline.history.replay import replayed_steps

GROUPS = 4
OPTIONS: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 1}


@asynccontextmanager
async def annotated(url: str) -> AsyncIterator[Experiment]:
    """Open an experiment with four groups to train on."""
    async with opened(url) as experiment:
        for task in range(GROUPS):
            await experiment.writer("e0").write(group(task=task))
        await experiment.writer("e0").seal("b", GROUPS * 4)
        await run_strategy(experiment, "grpo")
        yield experiment


def checkpoint_of(folder: Path, step: int) -> Path:
    """Write a checkpoint: a folder with two files, one of them in a folder of its own."""
    path = folder / f"step-{step}"
    (path / "optimizer").mkdir(parents=True)
    (path / "weights").write_bytes(bytes([step]) * 1000)
    (path / "optimizer" / "state").write_bytes(bytes([step]) * 10)
    return path


async def trained(experiment: Experiment, folder: Path, steps: int) -> list[TrainStep]:
    """Train ``steps`` steps, each committed with a checkpoint; return them."""
    async with experiment.train_stream(**OPTIONS) as stream:
        done = [await anext(stream) for _ in range(steps)]
        for step in done:
            await stream.commit(step, checkpoint=checkpoint_of(folder, step.step))
    return done


async def resumed(experiment: Experiment, **options: Any) -> tuple[TrainStream, list[TrainStep]]:
    """Open the stream again and take all that it serves."""
    async with experiment.train_stream(**OPTIONS, **options) as stream:
        return stream, [step async for step in stream]


@pytest.mark.parametrize("harm", ["changed", "longer", "renamed", "another file", "gone"])
async def test_a_checkpoint_that_is_another_is_refused(
    store_url: str, tmp_path: Path, harm: str
) -> None:
    async with annotated(store_url) as experiment:
        await trained(experiment, tmp_path, 2)
        weights = tmp_path / "step-2" / "weights"
        if harm == "changed":
            weights.write_bytes(bytes([2]) * 999 + b"!")
        elif harm == "longer":
            weights.write_bytes(bytes([2]) * 1001)
        elif harm == "renamed":
            weights.rename(weights.with_name("weight"))
        elif harm == "another file":
            weights.with_name("more").touch()
        else:
            (tmp_path / "step-2").rename(tmp_path / "elsewhere")
        before = await kinds(experiment)
        with pytest.raises(CheckpointError, match=r"step-2.*resume"):
            await resumed(experiment)
        assert await kinds(experiment) == before
        stream, steps = await resumed(experiment, resume_from=1)
        assert stream.resume is not None
        assert (stream.resume.step, [step.step for step in steps]) == (1, [2, 3, 4])


async def test_an_older_checkpoint_is_gone_on_from_and_later_steps_are_superseded(
    store_url: str, tmp_path: Path
) -> None:
    async with annotated(store_url) as experiment:
        first = await trained(experiment, tmp_path / "a", 3)
        stream, again = await resumed(experiment, resume_from=1)
        assert stream.resume is not None
        assert stream.resume.checkpoint == tmp_path / "a" / "step-1"
        assert stream.resume.chain == first[0].chain
        served = {step.step: step.manifest.experiences for step in again}
        assert served[2] == first[1].manifest.experiences
        assert len({row for rows in served.values() for row in rows}) == (GROUPS - 1) * 4
        assert not set(first[0].manifest.experiences) & {
            r for rows in served.values() for r in rows
        }
        assert (await kinds(experiment)).count("StepsCommitted") == 3
        assert (await kinds(experiment)).count("TrainerRewound") == 1
        await trained(experiment, tmp_path / "b", 3)
        assert (await verify(experiment)).problems == ()


@pytest.mark.parametrize(("step", "committed"), [(3, True), (1, False)])
async def test_one_can_only_go_on_from_where_there_is_a_checkpoint(
    store_url: str, tmp_path: Path, step: int, *, committed: bool
) -> None:
    async with annotated(store_url) as experiment:
        if committed:
            await trained(experiment, tmp_path, 2)
        else:
            async with experiment.train_stream(**OPTIONS) as stream:
                await stream.commit(await anext(stream))
                await stream.commit(await anext(stream))
        with pytest.raises(CheckpointError, match=rf"resume_from={step}.*last committed step is 2"):
            await resumed(experiment, resume_from=step)
        assert "TrainerRewound" not in await kinds(experiment)


async def test_a_rewind_to_a_checkpoint_that_is_gone_records_nothing_and_names_the_others(
    store_url: str, tmp_path: Path
) -> None:
    async with annotated(store_url) as experiment:
        await trained(experiment, tmp_path, 3)
        (tmp_path / "step-1").rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=r"step-1, which is gone.*checkpoints of 2, 3"):
            await resumed(experiment, resume_from=1)
        (tmp_path / "elsewhere").rename(tmp_path / "step-1")
        (tmp_path / "step-1" / "weights").write_bytes(b"others")
        with pytest.raises(CheckpointError, match=r"content is another now.*checkpoints of 2, 3"):
            await resumed(experiment, resume_from=1)
        assert "TrainerRewound" not in await kinds(experiment)


async def test_a_commit_takes_in_every_step_before_it_and_is_one_event(
    store_url: str, tmp_path: Path
) -> None:
    async with annotated(store_url) as experiment, experiment.train_stream(**OPTIONS) as stream:
        steps = [await anext(stream) for _ in range(3)]
        weights = tmp_path / "weights"
        weights.touch()
        for _ in range(2):
            await stream.commit(steps[2], policy=weights)
            await stream.commit(steps[0])
        (event,) = [e async for e in experiment.events(kinds=["StepsCommitted"])]
        assert event.body["steps"] == [1, 2, 3]
        assert event.body["manifests"] == [step.manifest.digest for step in steps]
        published = [e async for e in experiment.events(kinds=["PolicyPublished"])]
        assert [(e.body["version"], e.position) for e in published] == [(3, event.position + 1)]
        policy = await experiment.newest_policy()
        assert policy is not None
        assert policy.version == 3


async def test_a_checkpoint_is_the_new_policy_unless_the_commit_says_otherwise(
    store_url: str, tmp_path: Path
) -> None:
    async with annotated(store_url) as experiment, experiment.train_stream(**OPTIONS) as stream:
        first, second, third, last = [await anext(stream) for _ in range(4)]
        saved = checkpoint_of(tmp_path, 1)
        for _ in range(2):  # the same again is a no-op
            await stream.commit(first, saved)
        policy = await experiment.newest_policy()
        assert policy is not None
        assert (policy.version, policy.uri) == (1, str(saved))
        (commit,) = [e async for e in experiment.events(kinds=["StepsCommitted"])]
        assert policy.digest == commit.body["checkpoint_digest"]
        await stream.commit(second, checkpoint_of(tmp_path, 2), policy=False)
        with pytest.raises(InvalidArgumentError, match="without a policy"):
            await stream.commit(second, tmp_path / "step-2")
        await stream.commit(third)
        assert await experiment.newest_policy() == policy
        other = checkpoint_of(tmp_path, 4) / "weights"
        with pytest.raises(InvalidArgumentError, match="policy=True: leave it out"):
            await stream.commit(last, other.parent, policy=True)  # type: ignore[arg-type]
        await stream.commit(last, other.parent, policy=other)
        newest = await experiment.newest_policy()
        assert newest is not None
        assert (newest.version, newest.uri) == (4, str(other))


async def test_a_replay_compares_no_weights_with_a_checkpoint_that_was_published_whole(
    store_url: str, tmp_path: Path
) -> None:
    async with annotated(store_url) as experiment, experiment.train_stream(**OPTIONS) as stream:
        first, second = [await anext(stream) for _ in range(2)]
        await stream.commit(first, checkpoint_of(tmp_path, 1))
        assert (await recorded_end(experiment, "trainer", 1)).digest is None
        weights = checkpoint_of(tmp_path, 2) / "weights"
        await stream.commit(second, weights.parent, policy=weights)
        assert (await recorded_end(experiment, "trainer", 2)).digest == digest_of(weights)


async def test_what_cannot_be_committed_changes_nothing(store_url: str, tmp_path: Path) -> None:
    async with annotated(store_url) as experiment, experiment.train_stream(**OPTIONS) as stream:
        step = await anext(stream)
        empty = tmp_path / "empty"
        empty.mkdir()
        for path in (tmp_path / "nothing", empty):
            said = rf"{path.name} is missing or empty: write it .* restore it, or .*resume_from="
            with pytest.raises(CheckpointError, match=said):
                await stream.commit(step, checkpoint=path)
            with pytest.raises(CheckpointError, match=path.name):
                await stream.commit(step, policy=path)
        step.step += 1
        with pytest.raises(InvalidArgumentError, match="step 2 was not delivered"):
            await stream.commit(step)
        assert not {"StepsCommitted", "PolicyPublished"} & {*await kinds(experiment)}


async def test_what_was_not_committed_is_served_as_recorded_whatever_is_asked_now(
    store_url: str,
) -> None:
    async with annotated(store_url) as experiment:
        async with experiment.train_stream(**OPTIONS) as stream:
            first = [await anext(stream), await anext(stream)]
        async with experiment.train_stream(
            strategy="grpo", groups_per_step=3, layout="packed", tokens_per_microbatch=9
        ) as stream:
            again = [step async for step in stream]
        assert [step.manifest for step in again[:2]] == [step.manifest for step in first]
        assert [step.chain for step in again[:2]] == [step.chain for step in first]
        for one, other in zip(first, again, strict=False):
            assert other.recorded
            for before, after in zip(one.microbatches, other.microbatches, strict=True):
                assert before.keys() == after.keys()
                assert all(before[name].equal(after[name]) for name in before)
        assert again[-1].manifest.layout == "packed"


async def test_two_trainers_of_one_name_train_one_after_the_other(store_url: str) -> None:
    async with annotated(store_url) as experiment, opened(store_url) as other:
        served: list[list[int]] = []

        async def second() -> None:
            async with other.train_stream(**OPTIONS) as stream:
                served.append([step.step async for step in stream])

        async with anyio.create_task_group() as tasks, experiment.train_stream(**OPTIONS) as stream:
            with pytest.raises(LeaseHeldError, match="'trainer' is at work in"):
                await resumed(other, wait_for_lease=False)
            tasks.start_soon(second)
            for _ in range(2):
                await stream.commit(await anext(stream))
            assert served == []
        assert served == [[3, 4]]


async def test_a_name_stands_for_one_set_and_one_kind_of_consumer(store_url: str) -> None:
    async with annotated(store_url) as experiment:
        await resumed(experiment)
        with pytest.raises(ConflictingStrategyError, match="consumer="):
            await resumed(experiment, consumer="grpo")
        await run_strategy(experiment, "grpo", {"epsilon": 0.1}, name="other")
        with pytest.raises(ConflictingStrategyError, match="'trainer' is a trainer on 'grpo'"):
            async with experiment.train_stream(strategy="other"):
                pass


async def test_commits_at_the_same_time_are_recorded_one_after_the_other(
    store_url: str, tmp_path: Path
) -> None:
    async with annotated(store_url) as experiment:
        async with experiment.train_stream(**OPTIONS) as stream:
            first, second = await anext(stream), await anext(stream)
            large = checkpoint_of(tmp_path, 1)
            (large / "weights").write_bytes(bytes(20_000_000))  # the later commit would be quicker
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.commit, first, large)
                tasks.start_soon(stream.commit, second, checkpoint_of(tmp_path, 2))
        stream, again = await resumed(experiment)
        assert stream.resume is not None
        assert (stream.resume.step, [step.step for step in again]) == (2, [3, 4])
        assert (await verify(experiment)).problems == ()


async def test_a_commit_that_was_cancelled_and_went_on_is_not_made_once_more(
    sqlite_url: str,
) -> None:
    async with annotated(sqlite_url) as experiment:
        with closing(dbapi2.connect(experiment.database.path, isolation_level=None)) as other:
            async with experiment.train_stream(**OPTIONS) as stream:
                first, second = await anext(stream), await anext(stream)
                other.execute("BEGIN IMMEDIATE")
                # Cancelled as asyncio does it, the call ends while its transaction waits on.
                call = asyncio.ensure_future(stream.commit(first))
                await asyncio.wait([call], timeout=0.3)
                call.cancel()
                await asyncio.wait([call])
                call = asyncio.ensure_future(stream.commit(second))
                await asyncio.wait([call], timeout=0.3)
                other.execute("ROLLBACK")
                with suppress(StoreError):  # if the first one was quicker
                    await call
        assert (await kinds(experiment)).count("StepsCommitted") == 1
        assert (await verify(experiment)).problems == ()


async def test_a_step_of_another_stream_is_not_committed(store_url: str) -> None:
    async with annotated(store_url) as experiment:
        await run_strategy(experiment, "grpo", {"epsilon": 0.5}, name="other")
        async with (
            experiment.train_stream(**OPTIONS, consumer="a") as stream,
            experiment.train_stream(strategy="other", groups_per_step=2, consumer="b") as others,
        ):
            await anext(stream)
            with pytest.raises(InvalidArgumentError, match="step 1 was not delivered by this"):
                await stream.commit(await anext(others))
        assert (await verify(experiment)).problems == ()


async def test_a_checkpoint_of_a_step_that_is_committed_without_it_is_refused(
    store_url: str, tmp_path: Path
) -> None:
    async with annotated(store_url) as experiment:
        async with experiment.train_stream(**OPTIONS) as stream:
            first, second, third = [await anext(stream) for _ in range(3)]
            await stream.commit(first)
            late = checkpoint_of(tmp_path, 1)
            with pytest.raises(InvalidArgumentError, match="committed already, without a checkpoi"):
                await stream.commit(first, late)
            await stream.commit(third, checkpoint=checkpoint_of(tmp_path, 3))
            with pytest.raises(InvalidArgumentError, match="commit of step 2 with checkpoint"):
                await stream.commit(second, late)  # covered by the commit of the third
            with pytest.raises(InvalidArgumentError, match=r"step-1: .*with .*step-3"):
                await stream.commit(third, late)
            with pytest.raises(InvalidArgumentError, match=r"with policy .*step-1.*with .*step-3"):
                await stream.commit(third, policy=late / "weights")
            await stream.commit(third, str(tmp_path / "step-3"))  # the same again
            await stream.commit(third)
        assert (await kinds(experiment)).count("StepsCommitted") == 2


async def test_the_first_commit_of_a_stream_may_cover_several_steps(
    store_url: str, tmp_path: Path
) -> None:
    async with annotated(store_url) as experiment:
        async with experiment.train_stream(**OPTIONS) as stream:
            first, second = [await anext(stream) for _ in range(2)]
            await stream.commit(second, checkpoint_of(tmp_path, 2))
            with pytest.raises(InvalidArgumentError, match="committed already, without a checkpoi"):
                await stream.commit(first, checkpoint_of(tmp_path, 1))
        async with experiment.train_stream(**OPTIONS) as stream:
            third, fourth = [await anext(stream) for _ in range(2)]
            await stream.commit(fourth)
            with pytest.raises(InvalidArgumentError, match="commit of step 3 with checkpoint"):
                await stream.commit(third, checkpoint_of(tmp_path, 3))


async def test_a_commit_that_an_earlier_stream_made_is_not_made_again(
    store_url: str, tmp_path: Path
) -> None:
    async with annotated(store_url) as experiment:
        (step,) = await trained(experiment, tmp_path, 1)
        async with experiment.train_stream(**OPTIONS) as stream:
            await stream.commit(step, tmp_path / "step-1")
        assert (await kinds(experiment)).count("StepsCommitted") == 1


async def test_a_step_that_is_committed_without_weights_after_one_with_them_is_warned_of(
    store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with annotated(store_url) as experiment:
        async with experiment.train_stream(**OPTIONS) as stream:
            await stream.commit(await anext(stream), checkpoint_of(tmp_path, 1))
            assert not caplog.messages
            for _ in range(2):
                await stream.commit(await anext(stream))
        (said,) = caplog.messages
        assert "step 2 is committed without a checkpoint, step 1 had one" in said
        caplog.clear()
        async with experiment.train_stream(**OPTIONS) as stream:
            assert stream.resume is not None
            assert stream.resume.checkpoint is None
        (said,) = caplog.messages
        assert "goes on after step 3, whose commit names no checkpoint" in said


async def test_a_checkpoint_that_is_written_over_the_last_one_is_warned_of(
    store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with annotated(store_url) as experiment, experiment.train_stream(**OPTIONS) as stream:
        for number in range(3):
            (path := tmp_path / "latest").write_text(str(number))
            await stream.commit(await anext(stream), path)
            assert len(caplog.messages) == (number > 0)
    (said,) = caplog.messages
    assert "the checkpoint of step 2 was written over that of step 1" in said
    assert "give each step a path of its own" in said


async def test_a_metric_may_be_a_tensor_of_one_number(sqlite_url: str) -> None:
    loss: Any = torch.tensor(1.5, requires_grad=True)
    async with annotated(sqlite_url) as experiment:
        async with experiment.train_stream(**OPTIONS) as stream:
            await stream.commit(await anext(stream), metrics={"loss": loss})
        async with experiment.train_stream(**OPTIONS) as stream:
            assert stream.resume is not None
            assert stream.resume.metrics["loss"] == 1.5


async def test_a_metric_that_is_no_number_is_named(sqlite_url: str) -> None:
    async with annotated(sqlite_url) as experiment:
        async with experiment.train_stream(**OPTIONS) as stream:
            step = await anext(stream)
            with pytest.raises(InvalidArgumentError, match=r"metrics=\{'a': 'x'\}: each must be"):
                await stream.commit(step, metrics={"a": "x"})  # type: ignore[dict-item]
        with pytest.raises(
            InvalidArgumentError, match="'trainer' has committed no step yet, and a"
        ):
            await anext(replayed_steps(experiment))
