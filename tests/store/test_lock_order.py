"""Transactions on a server that want the locks of two experiments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import psycopg

from tests.raw_store import new_event
from trinity_buffer import open_store
from trinity_buffer.events import StreamEnded
from trinity_buffer.pipeline.coordination.lease import StrategyLease, hold_lease

LOCK = "SELECT pg_advisory_lock(7, %s)"
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """Yield a connection past the store."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as server:
        yield server


async def until_waiting(server: psycopg.AsyncConnection, number: int) -> None:
    """Return once so many transactions wait for a lock."""
    with anyio.fail_after(10):
        while await (await server.execute(WAITING)).fetchone() != (number,):
            pass


async def test_trainers_that_mix_in_each_other_take_their_locks_in_one_order(
    postgres_store_url: str,
) -> None:
    event = new_event(StreamEnded(consumer="t", assembly=1, step=1))
    async with connected(postgres_store_url) as server, open_store(postgres_store_url) as store:
        one, other = [await store.experiment(name, config={}) for name in ("one", "other")]
        async with (
            hold_lease(store.database, one.key, "t") as first,
            hold_lease(store.database, other.key, "t") as second,
        ):
            for key in (one.key, other.key):
                await server.execute(LOCK, (key,))
            async with anyio.create_task_group() as tasks:
                for lease, of in ((first, other.key), (second, one.key)):
                    tasks.start_soon(
                        lambda lease, of: store.database.write(
                            lease.append, [event], experiment=of
                        ),
                        lease,
                        of,
                    )
                await until_waiting(server, 2)
                await server.execute(
                    "SELECT pg_advisory_unlock(7, %s), pg_advisory_unlock(7, %s)",
                    (one.key, other.key),
                )
        for experiment in (one, other):
            assert [e.kind async for e in experiment.events()][-1] == "StreamEnded"


async def test_a_lease_that_was_cancelled_as_it_was_taken_is_given_back(
    postgres_store_url: str,
) -> None:
    async with connected(postgres_store_url) as server, open_store(postgres_store_url) as store:
        experiment = await store.experiment("run", config={})
        lease = StrategyLease(store.database, experiment.key, "grpo")
        await server.execute(LOCK, (experiment.key,))
        asking = asyncio.ensure_future(lease.ask())
        await until_waiting(server, 1)
        asking.cancel()  # its transaction goes on
        with suppress(asyncio.CancelledError):
            await asking
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lease.release)
            await until_waiting(server, 2)
            await server.execute("SELECT pg_advisory_unlock(7, %s)", (experiment.key,))
        left = await server.execute("SELECT count(*) FROM lease")
        assert await left.fetchone() == (0,)
