"""Checks of what explorers and strategies rely on: guarantees 1, 2, 3, 5, 7, 9, 10.

Each ends quietly on a sound package, and fails when its fault is in. A check takes the URL of an
empty store and an empty folder.
"""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from typing_extensions import override

from tests.contract.making import dawdling
from tests.crash import points
from tests.crash.forking import CONTEXT
from tests.handles import Experiment, Transaction
from tests.pipeline.planting import unguarded
from tests.planted_faults.dying import write_and_die
from tests.planted_faults.scenes import BLOCKED_S, RUNS, nothing_is_wrong, opened, write_groups
from tests.raw_store import append, appending, sql, take_lease
from tests.sample_run import rollout
from trinity_buffer import StrategyConsumer, run_strategy, verify
from trinity_buffer.algorithm import GRPOAddStrategy
from trinity_buffer.errors import ConflictingExperienceError, InvalidExperienceError
from trinity_buffer.events import PolicyPublished
from trinity_buffer.experience import Experience

# 1 -----------------------------------------------------------------------------------------------


async def acknowledged_is_durable(url: str, folder: Path) -> None:
    await _die(url, folder, "")


async def _die(url: str, folder: Path, fault: str) -> None:
    """Let a process write, note the receipt, and be killed; what it noted must be stored."""
    async with opened(url):
        pass
    noted = folder / "e0.ack"
    process = CONTEXT.Process(target=write_and_die, args=(url, str(noted), fault))
    process.start()
    await anyio.to_thread.run_sync(process.join)
    assert process.exitcode == -signal.SIGKILL
    assert noted.read_text()
    async with opened(url) as experiment:
        nothing_is_wrong(await verify(experiment, acknowledged=noted))


async def acknowledged_is_durable_though_told_too_early(url: str, folder: Path) -> None:
    """The fault is in the process that dies, so that this check brings it along."""
    await _die(url, folder, "acknowledge before the commit")


# 2 -----------------------------------------------------------------------------------------------


async def writing_twice_is_writing_once(url: str, folder: Path) -> None:
    async with opened(url) as experiment:
        writer = experiment.writer("e0")
        assert (await writer.write([rollout("b0", 0, 0, 1.0)])).written == 1
        assert (await writer.write([rollout("b0", 0, 0, 1.0)])).duplicates == 1
        with pytest.raises(ConflictingExperienceError):
            await writer.write([rollout("b0", 0, 0, 0.0)])
        report = await verify(experiment)
    nothing_is_wrong(report)
    assert report.experiences == 1


# 3 -----------------------------------------------------------------------------------------------


class CrashError(Exception):
    """Stands for the end of the process: nothing of it runs any more."""


async def a_crash_before_the_commit_decides_nothing(url: str, folder: Path) -> None:
    def crash(point: str) -> None:
        if point == "before-annotate":
            raise CrashError

    async with opened(url) as experiment:
        await write_groups(experiment, 2)
        with pytest.MonkeyPatch.context() as patch:
            points.install(crash, patch.setattr)
            with pytest.raises(CrashError):
                await run_strategy(experiment, "grpo")
        report = await run_strategy(experiment, "grpo")
        assert (report.annotated, report.waiting) == (2 * RUNS, 0)
        nothing_is_wrong(await verify(experiment))


class Overtaken(GRPOAddStrategy):
    """Lets another consumer of its name decide everything, while it computes."""

    others: ClassVar[list[Experiment]] = []

    @override
    async def add(self, exps: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        if self.others:
            other = StrategyConsumer(self.others.pop(), Overtaken, name="grpo", speaks=False)
            await other.run()  # it asks for no lease
        return await super().add(exps, step)


async def two_of_a_name_decide_once(url: str, folder: Path) -> None:
    async with opened(url) as experiment:
        await write_groups(experiment, 1)
        Overtaken.others[:] = [experiment]
        report = await run_strategy(experiment, Overtaken, name="grpo")
        nothing_is_wrong(await verify(experiment))
    assert report.annotated == 0


class Superseded(GRPOAddStrategy):
    """Loses its lease to another process, which lets it go again, while it computes once."""

    experiments: ClassVar[list[Experiment]] = []
    num_computed: ClassVar[int] = 0

    @override
    async def add(self, exps: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        Superseded.num_computed += 1
        if self.experiments:
            experiment = self.experiments.pop()
            await take_lease(experiment, "grpo", "another", ttl_s=1e-6)
            await experiment.database.write(sql("DELETE FROM lease WHERE owner = 'another'"))
        return await super().add(exps, step)


async def who_lost_its_lease_commits_nothing(url: str, folder: Path) -> None:
    async with opened(url) as experiment:
        await write_groups(experiment, 1)
        Superseded.experiments[:], Superseded.num_computed = [experiment], 0
        report = await run_strategy(experiment, Superseded, name="grpo")
        nothing_is_wrong(await verify(experiment))
    assert (report.annotated, Superseded.num_computed) == (RUNS, 2)


# 5 -----------------------------------------------------------------------------------------------


async def everything_adds_up(url: str, folder: Path) -> None:
    async with opened(url) as experiment:
        await write_groups(experiment, 2)
        await run_strategy(experiment, ["reward_variance", "grpo"], name="varied")
        async with experiment.train_stream(strategy="varied") as stream:
            async for step in stream:
                await stream.commit(step)
        nothing_is_wrong(await verify(experiment))


async def what_a_filter_drops_is_told(url: str, folder: Path) -> None:
    async with opened(url) as experiment:
        await write_groups(experiment, 1, equal=True)
        await run_strategy(experiment, ["reward_variance", "grpo"], name="varied")
        report = await verify(experiment)
    nothing_is_wrong(report)
    assert sum(report.strategies[0].rejected.values()) == RUNS


# 7 -----------------------------------------------------------------------------------------------


async def a_slow_writer_hides_nothing(url: str, folder: Path) -> None:
    """One transaction takes its position early and commits late; a reader follows meanwhile."""
    holding, release, second_is_through = anyio.Event(), anyio.Event(), anyio.Event()
    seen: list[int] = []
    async with opened(url) as slow, opened(url) as quick, opened(url) as reading:
        published = PolicyPublished(number=1, uri="", digest="")

        async def write_slowly() -> None:

            async def wait() -> None:
                holding.set()
                await release.wait()

            publish, dawdle = appending(slow.key, published, actor="slow"), dawdling(wait)

            def publish_slowly(tx: Transaction) -> None:
                publish(tx)
                dawdle(tx)

            await slow.database.write(publish_slowly)

        async def write_quickly() -> None:
            await holding.wait()
            await append(quick, published, actor="quick")
            second_is_through.set()

        async def read() -> None:
            async for found in reading.events(follow=True):
                seen.append(found.position)
                if found.actor == "quick" and not release.is_set():
                    release.set()

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(write_slowly)
            group.start_soon(write_quickly)
            with anyio.move_on_after(BLOCKED_S):
                await second_is_through.wait()
            with anyio.move_on_after(BLOCKED_S):
                await release.wait()
            release.set()
            await second_is_through.wait()
            await slow.finish("both are through")
        stored = [found.position async for found in reading.events()]
    assert seen == stored


# 9 -----------------------------------------------------------------------------------------------


async def bad_input_is_refused_whole(url: str, folder: Path) -> None:
    async with opened(url) as experiment:
        bad = [rollout("b0", 0, 0, 1.0), rollout("b0", 0, 1, math.nan)]
        with pytest.raises(InvalidExperienceError, match="reward"):
            await experiment.writer("e0").write(bad)
        report = await verify(experiment)
    nothing_is_wrong(report)
    assert report.experiences == 0


async def what_is_damaged_is_rejected_and_the_rest_is_trained(url: str, folder: Path) -> None:
    async with opened(url) as experiment:
        await write_groups(experiment, 3)
        await run_strategy(experiment, "grpo")
        (first, *_) = [event async for event in experiment.events(kinds=("ExperiencesRecorded",))]

    def change(tx: Transaction) -> None:
        key = first.body["segment"]
        ((data,),) = sql(
            "SELECT data FROM segment WHERE key = :key AND family = 'tokens'", key=key
        )(tx)
        damaged = data[:-1] + bytes([data[-1] ^ 1])
        change = "UPDATE segment SET data = :data WHERE key = :key AND family = 'tokens'"
        sql(change, key=key, data=damaged)(tx)

    await unguarded(url, change)
    async with opened(url) as experiment:
        rows = 0
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            async for step in stream:
                rows += len(step.manifest.experiences)
                await stream.commit(step)
        (trainer,) = (await verify(experiment)).trainers
    assert (rows, trainer.rejected) == (2 * RUNS, {"damaged": RUNS})
    assert trainer.holds


# 10 ----------------------------------------------------------------------------------------------


async def who_is_ahead_waits(url: str, folder: Path) -> None:
    async with opened(url, max_queued_groups=1, groups_per_step=1) as experiment:
        await write_groups(experiment, 1)
        planned = False
        with anyio.move_on_after(BLOCKED_S):
            planned = await experiment.writer("e0").plan("b1", [0], RUNS)
        assert not planned


async def rejected_groups_hold_back_nobody(url: str, folder: Path) -> None:
    limits = {"max_queued_groups": 1, "groups_per_step": 1}
    async with opened(url, strategy="varied", **limits) as experiment:
        await run_strategy(experiment, ["reward_variance", "grpo"], name="varied")
        await write_groups(experiment, 1, equal=True)
        async with experiment.train_stream(strategy="varied") as stream:
            await run_strategy(experiment, ["reward_variance", "grpo"], name="varied")
            assert [step async for step in stream] == []
        planned = False
        with anyio.move_on_after(10 * BLOCKED_S):
            planned = await experiment.writer("e0").plan("b1", [0], RUNS)
        assert planned
