"""Who is there stays known while it works, and on whose machine it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from typing_extensions import override

from tests.contract.making import group, living, opened
from tests.handles import Experiment
from tests.raw_store import PresenceRow, now_us, rows, sql
from trinity_buffer import run_strategy
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.experience import Experience
from trinity_buffer.explorer.explore import ExploreOptions, SamplingExplorer, explore
from trinity_buffer.identity import Key
from trinity_buffer.pipeline.coordination import waiting
from trinity_buffer.pipeline.coordination.lease import is_dead, owner_name
from trinity_buffer.pipeline.coordination.waiting import describe_process, has_ended, is_here
from trinity_buffer.store import leases

LONG_AGO = 1


async def age(experiment: Experiment) -> None:
    """Let everybody have been seen last long ago."""
    await experiment.database.write(sql(f"UPDATE presence SET last_seen = {LONG_AGO}"))


async def seen(experiment: Experiment) -> dict[str, int]:
    """Return when each role was seen last."""
    return {row["role"]: row["last_seen"] for row in await rows(experiment, "presence")}


async def seen_again(experiment: Experiment, role: str) -> None:
    """Return once somebody in this role is there, and says so once more."""
    changes = experiment.database.changes
    for aged in (False, True):
        if aged:
            await age(experiment)
        with anyio.fail_after(20):
            while True:
                state = await changes.state()
                if (await seen(experiment)).get(role, LONG_AGO) > LONG_AGO:
                    break
                await changes.changed(state)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be said every 50 ms, and from the first moment on."""
    monkeypatch.setattr(waiting, "FIRST_AFTER_S", 0.0)
    monkeypatch.setattr(waiting, "SEEN_EVERY_S", 0.05)


# -- while it works


async def test_a_write_says_that_its_explorer_is_there_in_its_own_transaction(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store_url) as experiment:
        with monkeypatch.context() as patch:
            patch.setattr(waiting, "SEEN_EVERY_S", 0.0)
            await experiment.writer("e0").plan("b", list(range(2)), 4)
        for task, is_said in enumerate((True, False)):
            await age(experiment)
            before, _ = await experiment.database.changes.state()
            await experiment.writer("e0").write(group(task=task))
            after, _ = await experiment.database.changes.state()
            assert after - before == 1
            assert ((await seen(experiment))["explorer"] > LONG_AGO) is is_said


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("ttl_s", [0.4, 600.0])  # often renewed, and hardly ever
@pytest.mark.parametrize("role", ["trainer", "rank 1"])
async def test_a_rank_in_a_long_step_says_that_it_is_there(
    store_url: str, role: str, ttl_s: float
) -> None:
    options = {"strategy": "grpo", "world_size": 2, "groups_per_step": 2, "lease_ttl_s": ttl_s}

    async with opened(store_url, rollouts_per_group=2) as experiment:
        for task in range(8):
            await experiment.writer("e0").write(group(task=task, runs=2))
        await run_strategy(experiment, "grpo")

        async def rank(number: int, has_a_step: anyio.Event) -> None:
            async with experiment.train_stream(**options, rank=number) as stream:
                await anext(stream)
                has_a_step.set()
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            begun = anyio.Event(), anyio.Event()
            for number in range(2):
                tasks.start_soon(rank, number, begun[number])
            for step in begun:
                await step.wait()
            await seen_again(experiment, role)
            tasks.cancel_scope.cancel()
        assert role not in await seen(experiment), "it has ended"


class Thinks(AddStrategy):
    """A strategy that never comes to an end."""

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Think."""
        await anyio.sleep_forever()
        return 0, {}


async def annotates(experiment: Experiment) -> None:
    await experiment.writer("e0").write(group(runs=2))
    await run_strategy(experiment, Thinks, name="thinks", rollouts_per_group=2)


async def explores(experiment: Experiment) -> None:
    async def rollout(task: Any, model: Any) -> list[Experience]:
        await anyio.sleep_forever()
        return []

    await explore(experiment, actor="e0", tasks=["a"], rollout=rollout, model=None)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(("role", "work"), [("strategy", annotates), ("explorer", explores)])
async def test_who_is_in_one_long_call_says_that_it_is_there(
    store_url: str, role: str, work: Callable[[Experiment], Any]
) -> None:
    async with opened(store_url) as experiment, anyio.create_task_group() as tasks:
        tasks.start_soon(work, experiment)
        await seen_again(experiment, role)
        tasks.cancel_scope.cancel()


# -- two of one name


async def ends(experiment: Experiment) -> None:
    async def rollout(task: Any, model: Any) -> list[Experience]:
        return []

    await explore(experiment, actor="e0", tasks=["a"], rollout=rollout, model=None)


class Policy:
    """What the demo samples from."""

    def load(self, uri: str) -> Policy:
        return self

    def rollout(
        self, pairs: Sequence[tuple[Key, int]], *, batch: Key, policy_version: int
    ) -> list[Experience]:
        return []


async def ends_as_the_demo(experiment: Experiment) -> None:
    options = ExploreOptions(max_batches=1)
    await SamplingExplorer(experiment, Policy(), "e0", options).run()


@pytest.mark.parametrize("work", [ends, ends_as_the_demo])
async def test_only_another_explorer_that_lives_is_a_namesake(
    sqlite_url: str, work: Callable[[Experiment], Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(sqlite_url) as experiment:
        async with living(experiment, "e1"):
            await work(experiment)
        async with living(experiment, "e0") as pid:
            await work(experiment)
        told = f"another process explores as 'e0' too (pid {pid} on host "
        assert [r.levelname for r in caplog.records if told in r.message] == ["WARNING"]
        caplog.clear()
        await work(experiment)  # a crash and a start under the same name
        assert "another process" not in caplog.text
        left = await rows(experiment, "presence")
        assert os.getpid() not in [row["pid"] for row in left], "it has ended"


# -- on whose machine it is


def ended() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def seen_now(host: str, pid: int) -> PresenceRow:
    return PresenceRow("trainer", "trainer", host, pid, now_us(), now_us(), None)


def container(folder: Path) -> Path:
    """Return what stands for /proc in a container of this boot: its process numbers are its own."""
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/pid").touch()
    boot = folder / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text(Path("/proc/sys/kernel/random/boot_id").read_text())
    return folder


def test_a_container_of_the_same_name_is_another_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(waiting, "PROC", container(tmp_path))
        there, its_lease = seen_now(waiting.this_host(), ended()), owner_name()
        assert has_ended(there), "in the container itself"
        assert not is_dead(its_lease)
    assert is_here(there)
    assert not has_ended(there)
    assert not is_dead(its_lease.replace(f":{os.getpid()}:", f":{there.pid}:"))
    long_ago = there.last_seen - int(2 * waiting.UNSEEN_S * 1e6)
    assert not is_here(replace(there, last_seen=long_ago))


def test_a_process_is_there_though_its_row_was_begun_before_it_or_before_the_clock_was_set() -> (
    None
):
    an_hour = 3_600_000_000
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        row = seen_now(waiting.this_host(), process.pid)
        # One of a container that was started again has the number, and so the row, of the one
        # before it. A clock that is set forward moves the start of every process with it.
        assert is_here(replace(row, started_at=row.started_at - an_hour))
        before = row.last_seen - an_hour
        assert not is_here(replace(row, started_at=before, last_seen=before)), "only its number"


def test_a_host_is_shown_by_its_name_alone() -> None:
    name = socket.gethostname()
    assert waiting.this_host().startswith(f"{name}#")
    assert describe_process(seen_now(waiting.this_host(), 7)).startswith(
        f"pid 7 on host {name}, seen"
    )
    assert leases.describe_owner(owner_name()) == f"pid {os.getpid()} on host {name}"


def test_who_was_stored_under_a_name_alone_is_of_the_machine_of_that_name() -> None:
    gone, name = ended(), socket.gethostname()
    assert has_ended(seen_now(name, gone))
    assert is_dead(f"{name}:{gone}:1:old")
    assert is_here(seen_now(name, os.getpid()))


@pytest.mark.parametrize("proc", ["/proc", "/nowhere"])
def test_who_lives_is_known_with_and_without_proc(
    monkeypatch: pytest.MonkeyPatch, proc: str
) -> None:
    monkeypatch.setattr(waiting, "PROC", Path(proc))
    gone, host, mine = ended(), waiting.this_host(), owner_name()
    assert is_here(seen_now(host, os.getpid()))
    assert not has_ended(seen_now(host, os.getpid()))
    assert not is_here(seen_now(host, gone))
    assert has_ended(seen_now(host, gone))
    assert not is_dead(mine)
    assert is_dead(mine.replace(f":{os.getpid()}:", f":{gone}:"))
    assert is_here(seen_now(host, 1)), "nobody may send a signal to it"
