"""Steps go from thread to thread, in order, and never more of them than there is room for."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest

from tests.contract.making import group, opened
from tests.handles import Experiment, TrainStep, TrainStream, Transaction
from tests.raw_store import rows
from trinity_buffer import open_train_stream, run_strategy
from trinity_buffer.errors import InvalidArgumentError, StoreError
from trinity_buffer.pipeline.coordination.lease import TrainerLease
from trinity_buffer.pipeline.train import stream as streams
from trinity_buffer.pipeline.train.step import Commit, LastCommits, StepQueue

GROUPS = 8


def numbered(number: int) -> TrainStep:
    """Return what passes for step ``number``."""
    return cast("TrainStep", number)


@pytest.mark.parametrize("ahead", [1, 3])
async def test_steps_arrive_in_order_and_none_is_made_beyond_the_room(ahead: int) -> None:
    between, received = StepQueue(ahead), list[Any]()
    most = 0

    def train() -> None:
        while (step := between.get()) is not None:
            received.append(step)

    trainer = threading.Thread(target=train)
    trainer.start()
    for number in range(200):
        await between.room()
        between.put(numbered(number))
        most = max(most, number + 1 - len(received))
    between.end()
    await anyio.to_thread.run_sync(trainer.join)
    assert received == list(range(200))
    assert most <= ahead + 1  # of which the trainer asked for one


async def test_who_waits_in_the_loop_is_woken_from_another_thread() -> None:
    between = StepQueue(1)
    received: list[Any] = []

    async def train() -> None:
        while (step := await between.receive()) is not None:
            received.append(step)

    def make() -> None:
        for number in range(50):
            while not between.has_room():
                pass
            between.put(numbered(number))
        between.end()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            await anyio.to_thread.run_sync(make)
    assert received == list(range(50))


async def test_a_cancelled_wait_asks_for_no_second_step() -> None:
    between = StepQueue(1)
    for _ in range(3):
        with anyio.move_on_after(0.01):
            await between.receive()
    for number in range(2):
        assert between.has_room()
        between.put(numbered(number))
    assert not between.has_room()
    received: list[Any] = [await between.receive(), between.get()]
    assert received == [0, 1]


async def test_the_end_stays_the_end() -> None:
    between = StepQueue(2)
    between.put(numbered(1))
    between.put(numbered(2))
    between.discard()
    ends = [between.get(), await between.receive(), between.get()]
    assert ends == [None, None, None]


async def leased(experiment: Experiment, number: int) -> int:
    """Wait until so many steps are leased; return how many are."""
    changes = experiment.database.changes
    with anyio.fail_after(10):
        while True:
            state = await changes.state()
            found = len(await rows(experiment, "step"))
            if found >= number:
                return found
            await changes.changed(state)


@pytest.mark.parametrize("in_one_go_s", [streams.IN_ONE_GO_S, 0.0])
async def test_no_more_is_leased_than_was_asked_for_and_prefetched(
    store_url: str, monkeypatch: pytest.MonkeyPatch, in_one_go_s: float
) -> None:
    monkeypatch.setattr(streams, "IN_ONE_GO_S", in_one_go_s)
    async with opened(store_url, rollouts_per_group=4) as experiment:
        for task in range(GROUPS):
            await experiment.writer("e0").write(group(task=task))
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        async with experiment.train_stream(strategy="grpo", prefetch=2) as stream:
            for taken in range(1, 4):
                assert (await anext(stream)).step == taken
                await leased(experiment, taken + 2)
                await anyio.sleep(0.02)  # for one too many
                assert await leased(experiment, 0) == taken + 2


async def test_a_stream_that_is_closed_has_ended(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
    with open_train_stream(store_url, experiment="run", strategy="grpo", follow=True) as stream:
        assert next(stream).step == 1
    with pytest.raises(StopIteration):
        next(stream)


@pytest.fixture
async def two_steps(sqlite_url: str) -> str:
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        for task in range(2):
            await experiment.writer("e0").write(group(task=task))
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
    return sqlite_url


def fail_to_renew(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> threading.Event:
    """Let a renewal of a trainer's lease raise each of ``errors``; return what tells of another."""
    renew, renewed = TrainerLease.renew, threading.Event()

    def fail_once(lease: TrainerLease, tx: Transaction) -> None:
        if errors:
            raise errors.pop()
        renew(lease, tx)
        renewed.set()

    monkeypatch.setattr(TrainerLease, "renew", fail_once)
    return renewed


def test_a_lease_that_a_full_disk_keeps_from_renewal_is_renewed_later(
    two_steps: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = fail_to_renew(monkeypatch, [StoreError("the disk is full")])
    options: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 1, "lease_ttl_s": 0.2}
    with open_train_stream(two_steps, experiment="run", **options) as stream:
        stream.commit(next(stream))
        assert renewed.wait(20)
        stream.commit(next(stream))
        assert list(stream) == []
    assert "trainer 'trainer' cannot renew its lease: the disk is full" in caplog.text


def test_a_stream_that_is_cancelled_does_not_look_like_one_at_its_end(
    two_steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = list[Exception]()
    fail_to_renew(monkeypatch, errors)
    options: dict[str, Any] = {"strategy": "grpo", "follow": True, "lease_ttl_s": 0.2}
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ZeroDivisionError, match="not the store's"))
        stream = stack.enter_context(open_train_stream(two_steps, experiment="run", **options))
        errors.append(ZeroDivisionError("not the store's"))  # not before it is open
        with pytest.raises(StoreError) as raised:
            list(stream)
    # Here, where the error of the stream itself does not take the place of a failure.
    assert "'trainer' was cancelled before its end" in str(raised.value)


async def test_an_error_beside_a_reader_of_the_stream_is_the_one_that_is_raised(
    two_steps: str,
) -> None:
    async def read(stream: TrainStream) -> None:
        async for step in stream:
            await stream.commit(step)

    async def fail(experiment: Experiment) -> None:
        options: dict[str, Any] = {"strategy": "grpo", "follow": True}
        async with anyio.create_task_group() as group, experiment.train_stream(**options) as stream:
            group.start_soon(read, stream)
            await anyio.sleep(0.1)
            raise ZeroDivisionError

    async with opened(two_steps) as experiment:
        with pytest.raises(ExceptionGroup) as raised:
            await fail(experiment)
    assert [type(error) for error in raised.value.exceptions] == [ZeroDivisionError]


async def test_a_reader_that_is_cancelled_with_the_stream_ends_by_its_own_cancellation(
    two_steps: str,
) -> None:
    async with opened(two_steps) as experiment:
        with anyio.CancelScope() as scope:
            async with experiment.train_stream(strategy="grpo", follow=True) as stream:
                scope.cancel()
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.1)  # the maker of steps has ended
                await anext(stream)
        assert scope.cancelled_caught


def test_a_commit_of_many_steps_is_remembered_with_all_of_them() -> None:
    commits = LastCommits("trainer")
    request = Commit(Path("/last"), None, {}, {}, {}, {})
    commits.add(1, 5_000, request)
    commits.require_same(5_000, request)
    for step in (1, 2_500, 4_999):
        with pytest.raises(InvalidArgumentError, match="committed already, without a checkpoint"):
            commits.require_same(step, request)


def test_a_commit_of_one_step_is_remembered_for_a_thousand_more() -> None:
    commits = LastCommits("trainer")
    for step in range(1, 1001):
        commits.add(step, step, Commit(Path(f"/{step}"), None, {}, {}, {}, {}))
    with pytest.raises(InvalidArgumentError, match="committed already, with /1"):
        commits.require_same(1, Commit(Path("/other"), None, {}, {}, {}, {}))
