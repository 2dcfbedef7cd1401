"""The ranks of one trainer: the same steps for all, and one commit when all are done."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.conftest import Resize
from tests.handles import Experiment, TrainStep, TrainStream
from tests.raw_store import append, sql
from tests.small_sizes import small
from tests.trainer.data import recorded, rollouts
from trinity_buffer import open_store
from trinity_buffer.errors import InvalidArgumentError, LeaseLostError
from trinity_buffer.events import RankJoined
from trinity_buffer.pipeline.coordination import waiting
from trinity_buffer.pipeline.train.ranks import RankSession

OPTIONS = {"strategy": None, "groups_per_step": 2, "world_size": 2}
Life = Callable[[TrainStream, int], Coroutine[Any, Any, None]]


async def together(experiment: Experiment, life: Life, **options: object) -> None:
    """Let two ranks live at once, each with its stream."""

    async def of(rank: int) -> None:
        async with experiment.train_stream(**OPTIONS | options | {"rank": rank}) as stream:
            await life(stream, rank)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(of, 1)
            group.start_soon(of, 0)


async def events_of(experiment: Experiment, *kinds: str) -> list[str]:
    return [event.kind async for event in experiment.events(kinds=kinds)]


async def test_every_rank_trains_its_part_of_the_same_steps(store_url: str) -> None:
    served: list[list[TrainStep]] = [[], []]

    async def to_the_end(stream: TrainStream, rank: int) -> None:
        async for step in stream:
            served[rank].append(step)
            await stream.commit(step)

    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await together(experiment, to_the_end, tokens_per_microbatch=20)
        committed = await events_of(experiment, "StepsCommitted")
    assert [step.manifest for step in served[0]] == [step.manifest for step in served[1]]
    assert [step.chain for step in served[0]] == [step.chain for step in served[1]]
    assert len(served[0]) == len(committed) == 3
    for parts in zip(*served, strict=True):
        slots = [m["sample_index"].tolist() for part in parts for m in part.microbatches]
        assert [slot for some in slots for slot in some] == list(
            range(len(parts[0].manifest.experiences))
        )
        assert len(parts[0].microbatches) == len(parts[1].microbatches)
        groups = [{g for m in p.microbatches for g in m["group_index"].tolist()} for p in parts]
        assert groups[0].isdisjoint(groups[1])
        assert {m.layout.world_size for part in parts for m in part.microbatches} == {2}


async def served_to_ranks(url: str) -> list[list[Any]]:
    """Let two ranks train all there is in an empty store; return what each was served."""
    served: list[list[Any]] = [[], []]

    async def to_the_end(stream: TrainStream, rank: int) -> None:
        async for step in stream:
            tensors = [
                {k: m[k].tolist() for k in ("input_ids", "token_level_rewards")}
                for m in step.microbatches
            ]
            served[rank].append(
                (step.step, step.manifest.groups, step.manifest.microbatches, tensors)
            )
            await stream.commit(step)

    async with open_store(url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await together(experiment, to_the_end, tokens_per_microbatch=20)
    return served


@pytest.mark.parametrize("size", [2, 3])
async def test_no_size_of_a_page_changes_what_ranks_are_served(
    store_url: str, tmp_path: Path, size: int, resize: Resize
) -> None:
    usual = await served_to_ranks(f"sqlite:///{tmp_path / 'usual.db'}")
    assert [len(of_rank) for of_rank in usual] == [3, 3]
    resize(**small(size))
    assert await served_to_ranks(store_url) == usual


async def test_a_step_is_committed_once_and_after_all_parts(store_url: str) -> None:
    async def two_at_a_time(stream: TrainStream, rank: int) -> None:
        await anext(stream)
        second = await anext(stream)
        await stream.commit(second)
        await stream.commit(second)  # the same again is a no-op

    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await together(experiment, two_at_a_time)
        order = await events_of(experiment, "StepPartDone", "StepsCommitted")
    assert order == ["StepPartDone", "StepsCommitted"]


async def test_a_commit_of_several_steps_waits_for_the_last_of_each_rank(store_url: str) -> None:
    committed = anyio.Event()

    async def two(stream: TrainStream, rank: int) -> None:
        first, second = await anext(stream), await anext(stream)
        if rank == 0:
            await stream.commit(second)
            committed.set()
            return
        await stream.commit(first)
        with anyio.move_on_after(0.3):  # without rank 1, it takes some milliseconds
            await committed.wait()
        assert not committed.is_set()
        await stream.commit(second)

    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await together(experiment, two)
    assert committed.is_set()


async def test_after_a_crash_all_ranks_are_served_the_uncommitted_steps(store_url: str) -> None:
    served: list[list[TrainStep]] = [[], []]

    served_rank_1 = anyio.Event()

    async def crash_after_two(stream: TrainStream, rank: int) -> None:
        first = await anext(stream)
        await stream.commit(first)
        served[rank].append(await anext(stream))
        if rank == 1:
            served_rank_1.set()
        await served_rank_1.wait()  # without rank 0, rank 1 is served nothing

    async def go_on(stream: TrainStream, rank: int) -> None:
        assert stream.resume is not None
        assert stream.resume.step == 1
        async for step in stream:
            served[rank].append(step)
            await stream.commit(step)

    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await together(experiment, crash_after_two)
        await together(experiment, go_on, groups_per_step=4)
    for rank in range(2):
        lost, again, last = served[rank]
        assert again.manifest == lost.manifest
        assert again.recorded
        assert last.step == 3
    assert served[0][2].manifest == served[1][2].manifest


async def test_a_part_of_an_earlier_life_holds_nothing_up_and_counts_for_nothing(
    store_url: str,
) -> None:
    rank_1_is_through = anyio.Event()

    async def only_rank_1_gets_through(stream: TrainStream, rank: int) -> None:
        step = await anext(stream)
        if rank == 1:
            await stream.commit(step)
            rank_1_is_through.set()
        await rank_1_is_through.wait()  # without rank 0, rank 1 is served nothing

    async def both(stream: TrainStream, rank: int) -> None:
        step = await anext(stream)
        assert step.step == 1
        await stream.commit(step)

    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await together(experiment, only_rank_1_gets_through)
        await together(experiment, both)
        order = await events_of(experiment, "StepPartDone", "StepsCommitted", "RanksAssembled")
    assert order == [
        "RanksAssembled",
        "StepPartDone",
        "RanksAssembled",
        "StepPartDone",
        "StepsCommitted",
    ]


async def test_rank_0_does_not_go_on_with_a_rank_that_started_again(store_url: str) -> None:
    async def start_rank_1_again(stream: TrainStream, rank: int) -> None:
        step = await anext(stream)
        if rank == 1:
            async with anyio.create_task_group() as group:
                again = experiment.train_stream(**OPTIONS | {"rank": 1})
                group.start_soon(again.__aenter__)
                async for event in experiment.events(follow=True):
                    if event.kind == "RankJoined" and event.position > 5:
                        break
                joined.set()
                await refused.wait()
                group.cancel_scope.cancel()
            return
        await joined.wait()
        with pytest.raises(LeaseLostError, match="rank 1 started again"):
            await stream.commit(step)
        refused.set()

    joined, refused = anyio.Event(), anyio.Event()
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await together(experiment, start_rank_1_again)
        assert await events_of(experiment, "StepsCommitted") == []


async def test_rank_0_hears_that_the_process_of_another_is_gone(store_url: str) -> None:
    async def wait_for_the_dead(stream: TrainStream, rank: int) -> None:
        step = await anext(stream)
        if rank == 1:
            gone = "UPDATE presence SET pid = :pid WHERE role = 'rank 1'"
            await store.database.write(sql(gone, pid=ended_process()))
            await anyio.sleep_forever()
        await stream.commit(step)

    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        with pytest.raises(ExceptionGroup) as raised:
            await together(experiment, wait_for_the_dead)
        assert await events_of(experiment, "StepsCommitted") == []
    (error,) = raised.value.exceptions
    assert isinstance(error, LeaseLostError)
    found = re.fullmatch(
        r"rank 1 of trainer 'trainer' \(pid .*\) is gone: start all .*", str(error)
    )
    assert found, error


async def lost_rank(store_url: str, leave: Life) -> str:
    """Let rank 1 ``leave`` in its first step; return what the commit of rank 0 raises."""

    async def commit(stream: TrainStream, rank: int) -> None:
        step = await anext(stream)
        if rank == 1:
            await leave(stream, rank)
        else:
            await stream.commit(step)

    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        with pytest.raises(ExceptionGroup) as raised:
            await together(experiment, commit, lease_ttl_s=1.0)
        assert await events_of(experiment, "StepsCommitted") == []
    (error,) = raised.value.exceptions
    assert isinstance(error, LeaseLostError)
    return str(error)


async def test_rank_0_hears_that_another_has_left(store_url: str) -> None:
    async def leave(_stream: TrainStream, _rank: int) -> None:
        await anyio.sleep(0.1)

    error = await lost_rank(store_url, leave)
    assert "rank 1 of trainer 'trainer' (which has left) is gone: start all ranks again" in error


async def test_rank_0_hears_that_another_fell_silent_on_its_machine(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fall_silent(stream: TrainStream, _rank: int) -> None:
        there = "UPDATE presence SET host = 'elsewhere' WHERE role = 'rank 1'"
        await stream.experiment.database.write(sql(there))
        await anyio.sleep_forever()

    monkeypatch.setattr(waiting, "UNSEEN_S", 0.5)
    error = await lost_rank(store_url, fall_silent)
    assert re.search(r"rank 1 of .* \(pid \d+ on host elsewhere, .*\) is gone: start all", error)


async def test_a_rank_that_is_heard_of_is_waited_for(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def take_long(stream: TrainStream, rank: int) -> None:
        step = await anext(stream)
        write, now = stream.experiment.database.write, "last_seen = last_seen + 1"
        for _ in range(20 * rank):
            await write(sql(f"UPDATE presence SET host = 'elsewhere', {now} WHERE role = 'rank 1'"))
            await anyio.sleep(0.1)
        await stream.commit(step)

    monkeypatch.setattr(waiting, "UNSEEN_S", 1.0)
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await together(experiment, take_long)
        assert await events_of(experiment, "StepsCommitted") == ["StepsCommitted"]


def ended_process() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


async def test_a_rank_hears_that_rank_0_is_gone(sqlite_url: str) -> None:
    async def leave_early(stream: TrainStream, rank: int) -> None:
        for _ in range(1 + 3 * rank):
            await anext(stream)

    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        with pytest.raises(ExceptionGroup) as raised:
            await together(experiment, leave_early, follow=True, lease_ttl_s=2.0)
    (error,) = raised.value.exceptions
    assert isinstance(error, LeaseLostError)
    assert "rank 0 of trainer 'trainer' is gone" in str(error)


async def read_all(experiment: Experiment, rank: int) -> None:
    async with experiment.train_stream(**OPTIONS, rank=rank) as stream:
        async for _ in stream:
            pass


async def test_a_rank_that_reads_while_rank_0_ends_hears_its_last_word(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, ended = anyio.Event(), anyio.Event()
    read, end = RankSession._read, RankSession.end
    wait_for_news = RankSession.wait_for_news

    async def read_before_the_end(session: RankSession) -> None:
        await read(session)
        if reading.is_set() and session._rank == 1:
            await ended.wait()

    async def wait(session: RankSession, state: Any) -> None:
        reading.set()
        await wait_for_news(session, state)

    async def end_late(session: RankSession, last_step: int) -> None:
        await reading.wait()
        await end(session, last_step)

    monkeypatch.setattr(RankSession, "_read", read_before_the_end)
    monkeypatch.setattr(RankSession, "wait_for_news", wait)
    monkeypatch.setattr(RankSession, "end", end_late)

    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read_all, experiment, 1)
                await read_all(experiment, 0)
                ended.set()


async def test_a_rank_hears_that_rank_0_started_again(store_url: str) -> None:
    """If it is back before the others look, they see its lease and no gap."""
    again = RankJoined(consumer="trainer", rank=0, world_size=2)

    async def hear(stream: TrainStream, rank: int) -> None:
        if rank == 0:
            await anyio.sleep_forever()
        await append(experiment, again, actor="trainer")
        with pytest.raises(LeaseLostError, match="rank 0 started again"):
            async for _ in stream:
                pass
        raise HeardError

    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        with pytest.RaisesGroup(HeardError):
            await together(experiment, hear, follow=True)


class HeardError(Exception):
    """A rank heard what it was to hear."""


@pytest.mark.parametrize("first", [0, 1])
async def test_ranks_that_disagree_on_their_number_are_told(sqlite_url: str, first: int) -> None:
    """Whoever was there first hears of the other."""
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        both = [OPTIONS | {"rank": 0}, OPTIONS | {"rank": 1, "world_size": 3}]
        told = "world_size=3, this one with 2" if first == 0 else "world_size=2, this one with 3"

        async def open_second() -> None:
            await experiment.train_stream(**both[1 - first]).__aenter__()

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:

                async def second() -> None:
                    async for event in experiment.events(follow=True):
                        if event.kind == "RankJoined":
                            break
                    group.start_soon(open_second)

                group.start_soon(second)
                with pytest.raises(InvalidArgumentError, match=told):
                    await experiment.train_stream(**both[first]).__aenter__()
                group.cancel_scope.cancel()
