"""Transactions on a server that end in the middle, or that want the locks of two experiments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import asyncpg
from sqlalchemy import make_url

from tests.contract.making import opened, rows
from trinity_buffer.events import StreamEnded
from trinity_buffer.pipeline.events import new_event
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.streaming.trainer_lease import hold_lease
from trinity_buffer.store.tables import policy
from trinity_buffer.store.transaction import Transaction, lock_experiment

LOCK = "SELECT pg_advisory_lock(7, $1)"
UNLOCK = "SELECT pg_advisory_unlock(7, $1)"
HELD = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Yield a connection past the store."""
    parsed = make_url(url)
    server = await asyncpg.connect(
        host=str(parsed.query["host"]), user=parsed.username, database=parsed.database
    )
    try:
        yield server
    finally:
        await server.close()


async def until_waiting(server: asyncpg.Connection, number: int) -> None:
    """Return once so many transactions wait for a lock."""
    with anyio.fail_after(10):
        while await server.fetchval(WAITING) != number:
            pass


async def test_a_write_that_is_cancelled_again_and_again_leaves_nothing_behind(
    postgres_store_url: str,
) -> None:
    async with connected(postgres_store_url) as server, opened(postgres_store_url) as experiment:
        database, key = experiment.database, experiment.key

        def write(tx: Transaction) -> None:
            tx.rows("INSERT INTO policy VALUES ($1, 1, 7, 'weights', '')", (key,))
            lock_experiment(tx, key)

        await server.execute(LOCK, key)
        task = asyncio.create_task(database.write(write))
        await until_waiting(server, 1)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        with suppress(asyncio.CancelledError):
            await task
        await server.execute(UNLOCK, key)
        with anyio.fail_after(10):
            while await server.fetchval(HELD):
                pass
        assert await rows(database, policy) == []


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
                await server.execute(LOCK, key)
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
                    "SELECT pg_advisory_unlock(7, $1), pg_advisory_unlock(7, $2)",
                    one.key,
                    other.key,
                )
        for experiment in (one, other):
            assert [e.kind async for e in experiment.events()][-1] == "StreamEnded"
