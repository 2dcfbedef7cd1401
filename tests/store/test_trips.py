"""Each answer that a server is waited for costs more than what it is asked: they are counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from msgspec import structs
from sqlalchemy import make_url

from tests.contract.making import group, opened
from tests.handles import Transaction
from tests.postgres import PostgresServer
from tests.raw_store import new_event, rows
from trinity_buffer import run_strategy, verify
from trinity_buffer.errors import StoreUnavailableError
from trinity_buffer.events import BatchLeased, StepsCommitted, kind_of
from trinity_buffer.pipeline.coordination.lease import hold_lease
from trinity_buffer.pipeline.train.options import register
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.tables import policy
from trinity_buffer.store.transaction import Statement, TakenKeyError, one_statement

SOCKET = ".s.PGSQL.5432"
READY, GIVE_ROWS, REFUSAL = b"Z", b"G", b"E"
"""What the server says when it has answered, waits for the rows of a COPY, or refuses."""


class Wire:
    """Stands between a store and its server, and counts how often the server was waited for."""

    def __init__(self) -> None:
        self.trips: Counter[str] = Counter()
        self.counting = ""
        self.asked = bytearray()
        self.refused: anyio.Event | None = None
        self.asked_again = anyio.Event()

    @contextmanager
    def count(self, what: str) -> Iterator[None]:
        """Count what happens meanwhile under the name ``what``."""
        self.counting = what
        yield
        self.counting = ""

    @asynccontextmanager
    async def between(self, url: str, folder: Path) -> AsyncIterator[str]:
        """Yield the URL that leads over this to ``url``."""
        parsed = make_url(url)
        carrying = list[asyncio.Task[None]]()

        async def carry(to_us: asyncio.StreamReader, from_us: asyncio.StreamWriter) -> None:
            carrying.extend(filter(None, [asyncio.current_task()]))
            path = f"{parsed.query['host']}/{SOCKET}"
            to_store, from_store = await asyncio.open_unix_connection(path)
            there = asyncio.create_task(self._pass_on(to_us, from_store))
            await self._listen(to_store, from_us)
            await there

        server = await asyncio.start_unix_server(carry, folder / SOCKET)
        try:
            yield parsed.set(query={"host": str(folder)}).render_as_string(hide_password=False)
        finally:
            server.close()
            await asyncio.gather(*carrying)

    async def _pass_on(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while some := await source.read(1 << 16):
            self.asked += some
            to.write(some)
            if self.refused is not None and self.refused.is_set():
                self.asked_again.set()
        self.asked_again.set()
        to.close()

    async def _listen(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while head := await source.read(1):
            size = await source.readexactly(4)
            rest = await source.readexactly(int.from_bytes(size) - 4)
            self.trips[self.counting] += head in (READY, GIVE_ROWS)
            to.write(head + size + rest)
            if head == REFUSAL and self.refused is not None:
                self.refused.set()
        if self.refused is not None:  # the end of the socket comes later than it could
            await self.asked_again.wait()
        to.close()


@pytest.fixture
async def wire(postgres_store_url: str, tmp_path: Path) -> AsyncIterator[tuple[Wire, str]]:
    """A wire and the URL of an empty store behind it."""
    found = Wire()
    async with found.between(postgres_store_url, tmp_path) as url:
        yield found, url


async def test_a_write_a_lease_and_a_commit_wait_for_the_server_as_seldom_as_they_can(
    wire: tuple[Wire, str],
) -> None:
    counted, url = wire
    async with opened(url, rollouts_per_group=8) as experiment:
        writer = experiment.writer("e0")
        for task in range(2):  # statements are prepared at first
            with counted.count(f"write {task}"):
                await writer.write(group(task=task, runs=8))
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(
            strategy="grpo", consumer="t", groups_per_step=1
        ) as stream:
            async for step in stream:
                await stream.commit(step)
        await register(experiment, "other", "grpo")
        facts = [event.fact async for event in experiment.events(after=0)]
        async with hold_lease(experiment.database, experiment.key, "other") as lease:
            for fact in facts:
                if isinstance(fact, BatchLeased | StepsCommitted):
                    same = new_event(structs.replace(fact, consumer="other", token=lease.token))
                    kind = kind_of(same.fact)
                    with counted.count(kind):
                        counted.trips[kind] = 0
                        await experiment.database.write(lease.append, [same])
        assert (await verify(experiment)).problems == ()
    most = {"write 1": 5, "BatchLeased": 5, "StepsCommitted": 2}
    assert {what: counted.trips[what] for what in most} == most


async def test_a_function_of_one_statement_needs_no_transaction_around_it(
    wire: tuple[Wire, str],
) -> None:
    counted, url = wire
    async with opened(url) as experiment:
        database = experiment.database
        key = experiment.key
        await experiment.writer("e0").write(group(task=0))
        for number in range(2):  # statements are prepared at first
            with counted.count(f"read {number}"):
                assert len(await database.read(log.read_at, key, [1, 2])) == 2
                assert await experiment.is_finished() is False
                assert await database.read(writer_queries.consumer_row, key, "t") is None

        @one_statement
        def two(tx: Transaction) -> None:
            tx.fetch_all("SELECT 1", ())
            tx.fetch_all("SELECT 2", ())

        with pytest.raises(RuntimeError, match="`one_statement` executed a second one"):
            await database.read(two)
        assert await database.read(log.head, key) == 2
    assert counted.trips["read 1"] == 3


async def test_no_type_of_an_argument_is_looked_up_in_the_catalogue(wire: tuple[Wire, str]) -> None:
    """It takes the server longer than what is asked, on each connection that is new."""
    counted, url = wire
    async with opened(url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").plan("b0", [0, "1"], 4)
        await experiment.writer("e0").write(group(task=0))
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            async for step in stream:
                await stream.commit(step)
        found = [event.fact async for event in experiment.events(after=0)]
    assert any(isinstance(fact, StepsCommitted) for fact in found)
    assert counted.asked.count(b"INSERT INTO counter") > 0
    assert counted.asked.count(b"pg_catalog.pg_type") == 0


async def test_changes_of_one_row_are_made_in_order(store_url: str) -> None:
    more = Statement("UPDATE consumer SET calls = calls + 1 WHERE experiment = :of AND name = :by")
    async with opened(store_url) as experiment:
        await register(experiment, "t", "grpo")

        def change(tx: Transaction) -> None:
            for _ in range(3):
                more.execute_later(tx, of=experiment.key, by="t")

        await experiment.database.write(change)
        (row,) = await rows(experiment, "consumer")
    assert row["calls"] == 3


async def test_what_was_kept_and_cannot_be_is_told_by_the_commit(store_url: str) -> None:
    async with opened(store_url) as experiment:
        taken = (experiment.key, 1, 7, "weights", "")
        await experiment.database.write(lambda tx: tx.insert_many(policy, [taken]))
        with pytest.raises(TakenKeyError):
            await experiment.database.write(lambda tx: tx.insert_many(policy, [taken]))
        assert len(await rows(experiment, "policy")) == 1


async def test_a_connection_that_is_lost_is_told_of_once_at_most(
    postgres_server: PostgresServer, postgres_store_url: str
) -> None:
    end_all = (
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    async with opened(f"{postgres_store_url}&reconnect_s=0") as experiment:
        database = experiment.database
        with pytest.raises(StoreUnavailableError):
            await database.write(lambda tx: tx.fetch_all(end_all.replace("<>", "="), ()))
        await experiment.writer("e0").write(group(task=0))
        postgres_server.execute(end_all, database=make_url(postgres_store_url).database or "")
        for _ in range(10):  # the end of an idle connection is heard
            await anyio.lowlevel.checkpoint()
        await database.write(lambda tx: tx.fetch_all("SELECT 1", ()))
        await experiment.writer("e0").write(group(task=1))
        assert (await verify(experiment)).experiences == 8


async def test_on_a_connection_that_is_ended_and_not_yet_closed_nothing_is_asked(
    wire: tuple[Wire, str], postgres_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """So it is for a moment: the last word of the server comes before the end of the socket."""
    counted, url = wire
    refused = anyio.Event()

    async def hear() -> None:
        await refused.wait()
        for _ in range(10):  # it is on its way to the driver
            await anyio.lowlevel.checkpoint()

    loop = asyncio.get_running_loop()

    def go_on(tx: Transaction) -> None:
        (own,) = tx.fetch_all("SELECT pg_backend_pid()", ())
        if refused.is_set():  # it is run once more, over another one
            return
        counted.refused = refused
        postgres_server.execute(f"SELECT pg_terminate_backend({own[0]}, 10000)")
        asyncio.run_coroutine_threadsafe(hear(), loop).result()
        tx.fetch_all("SELECT 1", ())

    async with opened(url) as experiment:
        await experiment.database.write(go_on)
        assert "the connection was lost" in caplog.text
        await experiment.writer("e0").write(group(task=0))
        assert (await verify(experiment)).experiences == 4
