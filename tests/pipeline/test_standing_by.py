"""Of several processes that run one strategy, one decides; the others neither read nor compute."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from typing_extensions import override

from tests.conftest import Resize
from tests.contract.making import assert_conserved, group, opened, rollout
from tests.handles import Experiment, ReadSession, Transaction
from tests.pipeline import deciding
from tests.pipeline.test_waits import spoken
from tests.pipeline.watching import Killed, Watcher, killed_at
from tests.raw_store import rows, take_lease, this_host
from trinity_buffer import StrategyConsumer, run_strategy, verify
from trinity_buffer.errors import LeaseLostError, StoreBusyError
from trinity_buffer.events import now_us
from trinity_buffer.experience import Experience
from trinity_buffer.inspector import compare_sets, leases
from trinity_buffer.inspector.source import now
from trinity_buffer.pipeline.annotate.grouping import UnitReader
from trinity_buffer.pipeline.coordination.lease import Held, StrategyLease, is_dead
from trinity_buffer.pipeline.coordination.waiting import is_paused, start_of, task_group
from trinity_buffer.store import leases as store_leases

NAME = deciding.NAME
OTHER = os.getppid()
"""A process that lives, and is not ours."""

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    Watcher.seen.clear()
    monkeypatch.setenv("TRINITY_BUFFER_WAIT_REPORT_S", "0.02")


def owner(start: str | None = None) -> str:
    return f"{this_host()}:{OTHER}:{start_of(OTHER) if start is None else start}:abcd"


async def held_by(experiment: Experiment, who: str) -> None:
    """Let ``who`` hold the lease of the strategy, whoever held it."""
    await take_lease(experiment, NAME, who, ttl_s=60)


async def let_go(experiment: Experiment, who: str) -> None:
    """Let ``who`` give it back, and tell."""
    await experiment.database.write(store_leases.release, experiment.key, NAME, owner=who)


async def holder(experiment: Experiment) -> str:
    held = await rows(experiment, "lease")
    return next((row["owner"] for row in held if row["consumer"] == NAME), "")


async def until(experiment: Experiment, holds: Callable[[], Awaitable[bool]]) -> None:
    """Return once ``holds`` does."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            state = await experiment.database.changes.state()
            if await holds():
                return
            await experiment.database.changes.changed(state, 0.1)


async def is_decided_by(experiment: Experiment, pid: int) -> bool:
    return (await holder(experiment)).startswith(f"{this_host()}:{pid}:")


async def stands_by(experiment: Experiment, pid: int, decider: int) -> bool:
    """Return whether process ``pid`` says that ``decider`` decides."""
    here = await rows(experiment, "presence")
    told = next((row["waiting_for"] for row in here if row["pid"] == pid), None)
    return f"strategy {NAME!r} stands by: pid {decider} on host" in (told or "")


async def num_decided(experiment: Experiment) -> int:
    sets = await rows(experiment, "consumer")
    return next((row["calls"] for row in sets if row["name"] == NAME), 0)


async def joined(process: Any) -> int | None:
    await anyio.to_thread.run_sync(process.join, PATIENCE_S)
    code: int | None = process.exitcode
    return code


async def write_groups(experiment: Experiment, first: int, number: int) -> None:
    """Record whole groups, each in two events, beside one that stays incomplete."""
    writer = experiment.writer("e0")
    for run in range(2):
        tasks = range(first, first + number)
        await writer.write([rollout(task=t, run=run, reward=t * run / 7) for t in tasks])


async def assert_decided_as_by_one(experiment: Experiment, groups: int) -> None:
    """What they decided is what one process decides, each row once."""
    await run_strategy(experiment, deciding.Pausing, name="alone")
    found = await compare_sets(now(experiment), NAME, "alone", limit=0)
    assert (found.both, found.equal) == (2 * groups, 2 * groups)
    await assert_conserved(experiment)
    assert (await verify(experiment)).problems == ()


@pytest.mark.long
async def test_a_killed_process_is_followed_by_one_that_stood_by(
    store_url: str, tmp_path: Path
) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        first = deciding.started(store_url, tmp_path / "first", crash_at="inside-annotate:3")
        await until(experiment, lambda: is_decided_by(experiment, first.pid))
        second = deciding.started(store_url, tmp_path / "second")
        await until(experiment, lambda: stands_by(experiment, second.pid, first.pid))
        await write_groups(experiment, 0, 6)
        assert await joined(first) == -signal.SIGKILL
        assert await num_decided(experiment) >= 2
        await until(experiment, lambda: is_decided_by(experiment, second.pid))
        await experiment.finish("enough")
        assert await joined(second) == 0
        assert (tmp_path / "second").read_text() == "8"  # two groups were committed before
        assert await holder(experiment) == ""
        await assert_decided_as_by_one(experiment, 6)


@pytest.mark.long
async def test_a_paused_process_loses_the_lease_and_stands_by_when_it_wakes(
    store_url: str, tmp_path: Path
) -> None:
    async with opened(store_url, rollouts_per_group=2, lease_ttl_s=3.0) as experiment:
        first = deciding.started(store_url, tmp_path / "first", pause_at=3)
        await until(experiment, lambda: is_decided_by(experiment, first.pid))
        second = deciding.started(store_url, tmp_path / "second")
        await until(experiment, lambda: stands_by(experiment, second.pid, first.pid))
        await write_groups(experiment, 0, 6)

        async def all_is_decided() -> bool:
            return await num_decided(experiment) == 6

        await until(experiment, all_is_decided)
        assert is_paused(first.pid)
        os.kill(first.pid, signal.SIGCONT)
        await until(experiment, lambda: stands_by(experiment, first.pid, second.pid))
        await write_groups(experiment, 6, 1)
        await experiment.finish("enough")
        assert [await joined(first), await joined(second)] == [0, 0]
        told = [(tmp_path / name).read_text() for name in ("first", "second")]
        assert told == ["4", "10"]
        await assert_decided_as_by_one(experiment, 7)


@pytest.mark.long
async def test_an_interrupted_process_gives_the_lease_back(sqlite_url: str) -> None:
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        command = [sys.executable, "-m", "trinity_buffer", "annotate", "--store", sqlite_url]
        command += ["--strategy", "grpo", "--name", NAME, "--follow"]
        async with await anyio.open_process(command, stdout=None, stderr=None) as process:
            await until(experiment, lambda: is_decided_by(experiment, process.pid))
            process.send_signal(signal.SIGINT)
            with anyio.fail_after(PATIENCE_S):
                await process.wait()
        assert await holder(experiment) == ""


async def test_a_process_that_is_interrupted_twice_leaves_nothing_behind(sqlite_url: str) -> None:
    async with opened(sqlite_url) as experiment:
        await experiment.writer("e0").write(group())
        for turns in range(9):  # of the event loop, between the two
            task = asyncio.create_task(run_strategy(experiment, "grpo", follow=True))
            await anyio.sleep(0.1)
            task.cancel()
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            task.cancel()
            await asyncio.wait([task])
            await anyio.sleep(0.05)  # what was shielded goes on without its task
            here = [row["role"] for row in await rows(experiment, "presence")]
            assert "strategy" not in here, turns
            assert await rows(experiment, "lease") == [], turns


async def test_a_process_that_stands_by_reads_nothing_and_says_who_decides(
    store_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, usual = list[int](), UnitReader.read

    def noted(self: UnitReader, s: ReadSession) -> bool:
        read.append(1)
        return usual(self, s)

    monkeypatch.setattr(UnitReader, "read", noted)
    async with opened(store_url, rollouts_per_group=2) as experiment, opened(store_url) as other:
        await held_by(other, owner())
        await other.writer("e0").write(group(runs=2))
        follow = partial(run_strategy, experiment, Watcher, name=NAME, follow=True)
        words = f"strategy {NAME!r} stands by: pid {OTHER} on host"
        with anyio.fail_after(PATIENCE_S):
            async with spoken(caplog, follow, words):
                assert await stands_by(other, os.getpid(), OTHER)
                assert (read, Watcher.seen) == ([], [])
                await let_go(other, owner())
                await other.finish("enough")
                await until(other, lambda: is_decided_by(other, os.getpid()))

                async def is_gone() -> bool:
                    return await holder(other) == ""

                await until(other, is_gone)
        assert len(Watcher.seen) == 1
        await assert_conserved(other)


async def test_the_lease_of_a_process_that_is_gone_is_taken_at_once(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await held_by(experiment, owner(start="1"))
        await experiment.writer("e0").write(group(runs=2))
        with anyio.fail_after(20):
            report = await run_strategy(experiment, Watcher, name=NAME)
        assert report.annotated == 2


async def test_what_is_decided_under_another_name_is_not_waited_for(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await held_by(experiment, owner())
        await experiment.writer("e0").write(group(runs=2))
        with anyio.fail_after(20):
            report = await run_strategy(experiment, Watcher, name="another")
        assert report.annotated == 2


@pytest.mark.long
async def test_a_run_that_ends_with_what_is_stored_waits_until_the_other_has_decided_it(
    store_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    resize: Resize,
) -> None:
    ended, left, usual = list[int](), list[bool](), UnitReader.is_left

    async def noted(self: UnitReader, up_to: int) -> bool:
        left.append(await usual(self, up_to))
        return left[-1]

    async def once() -> None:
        report = await run_strategy(experiment, Watcher, name=NAME)
        ended.append(report.annotated)

    async def has_looked() -> bool:
        return left == [True]

    async def has_ended() -> bool:
        return ended == [0]

    monkeypatch.setattr(UnitReader, "is_left", noted)
    resize(experiences_per_commit=1)
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await write_groups(experiment, 0, 2)
        with killed_at("after-annotate", 1, monkeypatch), pytest.raises(Killed):
            await run_strategy(experiment, Watcher, name=NAME)
        await held_by(experiment, owner())  # who has seen all, and decided one group of two
        async with spoken(caplog, once, "stands by"):
            await until(experiment, has_looked)
            assert ended == []
            decider = StrategyConsumer(experiment, Watcher, name=NAME, speaks=False)  # no lease
            await decider.run()
            await until(experiment, has_ended)
        assert await holder(experiment) == owner()


def without_numbers() -> list[Experience]:
    """Return a group whose rows are all refused."""
    refused = group(task="refused", runs=2)
    for experience in refused:
        assert experience.logprobs is not None
        experience.logprobs = experience.logprobs * torch.nan
    return refused


@pytest.mark.parametrize(
    ("left", "waiting"), [([rollout(task="incomplete")], 1), (without_numbers(), 0)]
)
async def test_a_run_that_ends_with_what_is_stored_ends_beside_one_that_has_nothing_to_do(
    store_url: str, left: list[Experience], waiting: int
) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(runs=2))
        await run_strategy(experiment, Watcher, name=NAME)
        await held_by(experiment, owner())
        await experiment.writer("e0", on_invalid="quarantine").write(left)
        with anyio.fail_after(20):
            report = await run_strategy(experiment, Watcher, name=NAME)
        assert (report.annotated, report.waiting, report.waiting_groups) == (0, waiting, waiting)
        assert await holder(experiment) == owner()


async def test_two_of_one_process_decide_one_after_the_other(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    reports = list[int]()

    async def run(*, follow: bool) -> None:
        report = await run_strategy(experiment, Resting, name=NAME, follow=follow)
        reports.append(report.annotated)

    class Resting(Watcher):
        """Lets another run of its name begin while it computes."""

        @override
        async def add(self, experiences: list[Experience], step: int) -> Any:
            if not self.seen:
                tasks.start_soon(partial(run, follow=True))
                await until(experiment, lambda: stands_by(experiment, os.getpid(), os.getpid()))
            return await super().add(experiences, step)

    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(runs=2))
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                await run(follow=False)
                await experiment.writer("e0").write(group(task="later", runs=2))
                await experiment.finish("enough")
        assert reports == [2, 2]
        assert "took over" not in caplog.text
        assert await holder(experiment) == ""


async def test_a_run_that_could_not_give_its_lease_back_stands_in_nobodys_way(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object, **__: object) -> None:
        raise StoreBusyError

    async with opened(store_url, rollouts_per_group=2, lease_ttl_s=600.0) as experiment:
        with monkeypatch.context() as patch:
            patch.setattr(store_leases, "release", busy)
            await run_strategy(experiment, Watcher, name=NAME)
        await experiment.writer("e0").write(group(runs=2))
        with anyio.fail_after(20):
            assert (await run_strategy(experiment, Watcher, name=NAME)).annotated == 2


async def test_a_consumer_that_runs_again_takes_its_lease_again(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    held = list[bool]()

    class Looking(Watcher):
        @override
        async def add(self, experiences: list[Experience], step: int) -> Any:
            held.append(not is_dead(await holder(experiment)))
            return await super().add(experiences, step)

    async with opened(store_url, rollouts_per_group=2) as experiment:
        consumer = StrategyConsumer(experiment, Looking, name=NAME)
        for task in range(2):
            await experiment.writer("e0").write(group(task=task, runs=2))
            await consumer.run()
    assert held == [True, True]
    assert "took over" not in caplog.text


async def test_who_lost_a_lease_to_another_waits_twice_as_long_for_it(store_url: str) -> None:
    ttl_s = 0.2
    async with opened(store_url, lease_ttl_s=ttl_s) as experiment:
        lease = StrategyLease(experiment.database, experiment.key, NAME, 0.2)
        assert await lease.ask()
        await held_by(experiment, owner())
        with pytest.raises(LeaseLostError, match=f"pid {OTHER} on host .* took over"):
            await experiment.database.write(lease.standing)
        lease.invalidate(LeaseLostError())
        began = time.monotonic()
        with anyio.fail_after(20):
            while not await lease.ask():
                await anyio.sleep(0.001)
        assert time.monotonic() - began >= 2 * ttl_s


async def test_who_comes_too_late_for_a_lease_waits_no_longer_for_it(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(StrategyLease):
        """Sees that the lease is free, and another takes it."""

        times = 0

        @override
        def take(self, tx: Transaction, seen: Held) -> bool:
            self.times += 1
            if self.times == 1:
                take = partial(store_leases.acquire, owner=owner(), ttl_us=0)
                take(tx, *self.of, now_us=now_us())
            return super().take(tx, seen)

    async with opened(store_url) as experiment:
        lease = Late(experiment.database, experiment.key, NAME, 0.2)
        with anyio.fail_after(20):
            while not await lease.ask():
                await anyio.sleep(0.01)
        assert "was not heard of for 0.2 s" in caplog.text


@pytest.mark.parametrize(
    ("ends", "ttl_s", "why"),
    [
        ("gives", 9.0, "decides no more"),
        ("dies", 9.0, "is gone"),
        ("rests", 0.2, "heard of for 0.4"),
    ],
)
async def test_who_loses_the_lease_and_who_takes_it_over_says_so(
    store_url: str, ends: str, ttl_s: float, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, rollouts_per_group=2, lease_ttl_s=ttl_s) as experiment:

        class Losing(Watcher):
            """Computes for so long that another takes the lease."""

            @override
            async def add(self, experiences: list[Experience], step: int) -> Any:
                if not self.seen:
                    await held_by(experiment, owner())
                return await super().add(experiences, step)

        async def decide() -> None:
            assert (await run_strategy(experiment, Losing, name=NAME)).annotated == 2
            decided.set()

        decided = anyio.Event()
        await experiment.writer("e0").write(group(runs=2))
        words = "took over" if ends == "rests" else "stands by"
        with anyio.fail_after(PATIENCE_S):
            async with spoken(caplog, decide, f"pid {OTHER} on host", words):
                assert "decides now" not in caplog.text
                if ends == "gives":
                    await let_go(experiment, owner())
                elif ends == "dies":
                    await held_by(experiment, owner(start="1"))
                await decided.wait()
        (lost,) = [each for each in caplog.messages if "took over" in each]
        assert "computed again. We lost the lease because" in lost
        assert f"for longer than lease_ttl_s={ttl_s:g}: if `add` takes so long, raise that" in lost
        (taken,) = [each for each in caplog.messages if "decides now" in each]
        assert f"strategy {NAME!r} decides now: pid {OTHER} on host" in taken
        assert why in taken
        assert len(Watcher.seen) == 2


async def test_a_lease_is_renewed_until_another_has_taken_it(store_url: str) -> None:
    async with opened(store_url, lease_ttl_s=0.2) as experiment:
        lease = StrategyLease(experiment.database, experiment.key, NAME, 0.2)
        assert await lease.ask()
        first = await experiment.database.read(store_leases.holder, experiment.key, NAME)

        async def is_renewed() -> bool:
            return (
                await experiment.database.read(store_leases.holder, experiment.key, NAME) != first
            )

        async def is_lost() -> bool:
            return not lease.is_held

        async with task_group(lease.keep):
            await until(experiment, is_renewed)
            await held_by(experiment, owner())
            await until(experiment, is_lost)
        assert await holder(experiment) == owner()


async def test_the_leases_name_the_process_that_decides(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await run_strategy(experiment, Watcher, name=NAME)
        assert await leases(now(experiment)) == []
        await held_by(experiment, owner())
        (held,) = await leases(now(experiment))
        assert (held.kind, held.trainer, held.state) == ("strategy", NAME, "held")
        assert (held.owner, held.leased_step) == (owner(), None)
