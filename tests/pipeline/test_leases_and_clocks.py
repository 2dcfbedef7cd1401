"""Who owns a lease does not depend on clocks, and who waits is woken when a connection ends."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import anyio
import pytest

from tests.postgres import PostgresServer
from tests.raw_store import PresenceRow
from trinity_buffer import events, open_store
from trinity_buffer.errors import LeaseHeldError
from trinity_buffer.pipeline.coordination import lease
from trinity_buffer.pipeline.coordination.lease import TrainerLease, hold_lease
from trinity_buffer.pipeline.coordination.waiting import has_ended
from trinity_buffer.store.leases import describe_owner, holder

HOUR_US = 3_600_000_000
HOURS_AHEAD, HOURS_BEHIND = 5 * HOUR_US, -5 * HOUR_US


def move_clock(monkeypatch: pytest.MonkeyPatch, offset_us: int) -> None:
    """Let the package read a wall clock that is wrong by ``offset_us``."""
    wrong = SimpleNamespace(time_ns=lambda: time.time_ns() + 1000 * offset_us)
    monkeypatch.setattr(events, "time", wrong)


@pytest.mark.parametrize("offset_us", [HOURS_AHEAD, HOURS_BEHIND])
def test_a_moved_clock_makes_no_process_of_this_machine_a_dead_one(offset_us: int) -> None:
    """The system's clock moves the time of its boot too, by which a process would have begun."""
    began = events.now_us() - offset_us
    mine = PresenceRow("rank 1", "trainer", socket.gethostname(), os.getpid(), began, began, None)
    assert not has_ended(mine)
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert has_ended(replace(mine, pid=gone.pid))
    assert not has_ended(replace(mine, pid=gone.pid, host="elsewhere"))


@pytest.mark.parametrize(
    "offset_us", [HOURS_AHEAD, pytest.param(HOURS_BEHIND, marks=pytest.mark.long)]
)
async def test_a_moved_clock_takes_no_lease_from_one_who_renews_it(
    store_url: str, monkeypatch: pytest.MonkeyPatch, offset_us: int
) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("run", config={})
        async with hold_lease(store.database, experiment.key, "trainer", ttl_s=0.4) as held:
            move_clock(monkeypatch, offset_us)
            other = TrainerLease(store.database, experiment.key, "trainer", ttl_s=0.4)
            # The holder is this very process, and alive; both have the same moved clock from here.
            with anyio.move_on_after(1.5):
                await other.acquire(wait=True)
            assert (other.token, held.lost) == (0, None)


@pytest.mark.parametrize("offset_us", [0, HOURS_AHEAD, HOURS_BEHIND])
async def test_a_silent_holder_is_replaced_whatever_the_clocks_say(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, offset_us: int
) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        silent = TrainerLease(store.database, experiment.key, "trainer", ttl_s=60)
        await silent.acquire(wait=False)
        move_clock(monkeypatch, offset_us)
        other = TrainerLease(store.database, experiment.key, "trainer", ttl_s=0.2)
        with anyio.fail_after(10):
            await other.acquire(wait=True)
        assert other.token == silent.token + 1


async def test_a_holder_whose_lease_another_took_and_gave_back_holds_it_again(
    store_url: str,
) -> None:
    """As one that was stopped meanwhile: it goes on, so nobody may think that it is gone."""
    async with open_store(store_url) as store:
        experiment = await store.experiment("run", config={})
        async with hold_lease(store.database, experiment.key, "trainer", ttl_s=1) as held:
            other = TrainerLease(store.database, experiment.key, "trainer", ttl_s=30)
            seen = await other.database.read(holder, other.experiment, other.consumer)
            assert await store.database.write(other.take, seen)
            await other.release()
            with anyio.fail_after(10):
                while not await held.is_held():
                    await anyio.sleep(0.05)
            third = TrainerLease(store.database, experiment.key, "trainer", ttl_s=30)
            with pytest.raises(LeaseHeldError, match=describe_owner(held.owner)):
                await third.acquire(wait=False)
            assert held.lost is None


async def test_who_does_not_wait_hears_who_is_at_work(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        async with hold_lease(store.database, experiment.key, "trainer") as held:
            other = TrainerLease(store.database, experiment.key, "trainer", ttl_s=30)
            with pytest.raises(LeaseHeldError, match=describe_owner(held.owner)):
                await other.acquire(wait=False)


async def test_the_lease_of_a_dead_process_is_free_at_once(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        host, pid, _, rest = lease.owner_name().rsplit(":", 3)
        owner = f"{host}:{pid}:1:{rest}"  # a process of this id that started long ago
        dead = TrainerLease(store.database, experiment.key, "trainer", 3600, owner)
        await dead.acquire(wait=False)
        assert lease.is_dead(dead.owner)
        async with hold_lease(store.database, experiment.key, "trainer", wait=False) as held:
            assert held.token == dead.token + 1


async def test_who_waits_is_woken_when_the_connection_ends(
    postgres_url: str, postgres_server: PostgresServer
) -> None:
    async with open_store(postgres_url) as store:
        changes = store.database.changes
        state = await changes.state()
        name = postgres_url.partition("?")[0].rpartition("/")[2]

        async def cut() -> None:
            sql = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
            await anyio.to_thread.run_sync(postgres_server.execute, sql)

        async with anyio.create_task_group() as group:
            group.start_soon(cut)
            with anyio.fail_after(10):
                await changes.changed(state)
        assert await changes.state() != state
