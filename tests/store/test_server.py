"""What a server must be, and what it may be set to."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from threading import Barrier, Event, Semaphore

import anyio
import anyio.to_thread
import psycopg
import pytest
from sqlalchemy.exc import DBAPIError

from tests.contract.making import group, kinds, opened
from tests.handles import Transaction
from tests.postgres import PostgresServer
from trinity_buffer import open_store, run_strategy, verify
from trinity_buffer.errors import (
    InvalidArgumentError,
    ReadOnlyStoreError,
    StoreBusyError,
    StoreError,
    UnsafeStoreError,
)
from trinity_buffer.store import log, postgres, sqlite, transaction


@pytest.fixture
def own(postgres_server: PostgresServer) -> Iterator[str]:
    """Name of a database whose settings may be changed."""
    postgres_server.create_database("own")
    yield "own"
    postgres_server.drop_database("own")


@pytest.mark.parametrize("level", ["serializable", "repeatable read", "read uncommitted"])
async def test_a_database_may_have_any_isolation_level_by_default(
    postgres_server: PostgresServer, own: str, level: str
) -> None:
    for what in (f"DATABASE {own}", "ROLE postgres"):
        postgres_server.execute(f"ALTER {what} SET default_transaction_isolation = '{level}'")
    url = postgres_server.url(own)
    try:
        async with (
            opened(url, rollouts_per_group=4) as one,
            opened(url) as two,
            anyio.create_task_group() as tasks,
        ):
            for task in range(12):
                actor = (one, two)[task % 2].writer(f"e{task}")
                tasks.start_soon(actor.write, group(task=task))
            for experiment in (one, two):
                tasks.start_soon(run_strategy, experiment, "grpo")
        async with opened(url) as one:
            await run_strategy(one, "grpo")
            report = await verify(one)
            assert report.problems == ()
    finally:
        postgres_server.execute("ALTER ROLE postgres RESET default_transaction_isolation")


async def test_a_database_may_read_backslashes_as_it_likes(
    postgres_server: PostgresServer, own: str
) -> None:
    postgres_server.execute(f"ALTER DATABASE {own} SET standard_conforming_strings = off")
    async with opened(postgres_server.url(own), rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())
        await experiment.writer("e0").write(group())  # whose digests are compared
        assert [e.damaged async for e in experiment.read()] == [None] * 4


@pytest.mark.parametrize(
    ("said", "used"),
    [("off", "on"), ("local", "local"), ("remote_write", "remote_write"), ("on", "on")],
)
@pytest.mark.parametrize("where", ["DATABASE own", "ROLE postgres"])
async def test_a_commit_waits_for_the_disk_whatever_the_default_is(
    postgres_server: PostgresServer, own: str, where: str, said: str, used: str
) -> None:
    postgres_server.execute(f"ALTER {where} SET synchronous_commit = '{said}'")
    try:
        async with open_store(postgres_server.url(own)) as store:
            rows = await store.database.read(lambda tx: tx.fetch_all("SHOW synchronous_commit", ()))
            assert rows == [(used,)]
    finally:
        postgres_server.execute("ALTER ROLE postgres RESET synchronous_commit")


@pytest.mark.long
async def test_after_a_restart_one_answer_fails_at_most() -> None:
    """The loop is blocked meanwhile, so that nobody sees the connections end before their use."""
    with PostgresServer(durable=False) as server:
        async with open_store(server.create_database("own")) as store:
            experiment = await store.experiment("run", config={})
            read, key = experiment.database.read, experiment.key
            await asyncio.gather(*(read(log.head, key) for _ in range(40)))
            server.stop()
            server.start()
            failed = 0
            for _ in range(14):
                try:
                    await read(log.head, key)
                except StoreError:
                    failed += 1
            assert failed <= 1


@pytest.mark.long
async def test_what_was_acknowledged_survives_a_crash_of_a_server_that_would_not_wait() -> None:
    with PostgresServer() as server:
        url = server.create_database("own")
        async with open_store(url) as store:
            await store.experiment("before", config={})
        server.execute("ALTER DATABASE own SET synchronous_commit = off")
        server.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        server.stop()
        server.start()
        with suppress(Exception):  # the connections that are closed are gone
            async with open_store(url) as store:
                await store.experiment("acknowledged", config={})
                server.kill9()
        server.start()
        async with open_store(url) as store:
            assert await store.experiments() == ["before", "acknowledged"]


async def test_a_database_that_cannot_store_every_text_is_refused(
    postgres_server: PostgresServer,
) -> None:
    how = "ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    postgres_server.execute(f"CREATE DATABASE latin {how}")
    try:
        with pytest.raises(UnsafeStoreError, match=r"as LATIN1.*ENCODING 'UTF8'"):
            await open_store(postgres_server.url("latin")).__aenter__()
        assert "event" not in postgres_server.execute(r"\dt", database="latin")
    finally:
        postgres_server.drop_database("latin")


LOCKS = ["LOCK TABLE event", "SELECT pg_advisory_xact_lock(7, 1)"]


@pytest.mark.parametrize("lock", LOCKS)
async def test_nobody_waits_for_ever_for_a_lock_that_somebody_holds(
    postgres_store_url: str, monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 300)
    async with opened(postgres_store_url) as experiment:
        writer = experiment.writer("e0")
        with psycopg.connect(postgres_store_url) as other:
            other.execute(lock)
            with anyio.fail_after(20), pytest.raises(StoreBusyError, match="held the database for"):
                await writer.write(group())
        assert (await writer.write(group())).written == 4


async def test_a_lock_timeout_that_somebody_has_chosen_stays(
    postgres_server: PostgresServer, own: str
) -> None:
    postgres_server.execute(f"ALTER DATABASE {own} SET lock_timeout = '2min'")
    async with open_store(postgres_server.url(own)) as store:
        assert await store.database.read(lambda tx: tx.fetch_all("SHOW lock_timeout", ())) == [
            ("2min",)
        ]


@pytest.mark.long
async def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "CONNECT_TIMEOUT_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://postgres@127.0.0.1:{silent.getsockname()[1]}/any"
        with anyio.fail_after(20), pytest.raises(StoreError, match="it does not answer"):
            await open_store(url).__aenter__()


def test_a_process_that_was_forked_is_told_apart_from_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_parent = postgres.application_name()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert postgres.application_name() != of_parent


async def test_no_more_connections_are_opened_than_were_promised(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one waits for its turn."""
    monkeypatch.setattr(postgres, "KEPT_CONNECTIONS", 2)
    monkeypatch.setattr(postgres, "MORE_CONNECTIONS", 1)
    inside, full, one_too_many, done = Semaphore(0), Barrier(4), Event(), Event()

    def stay(tx: Transaction) -> int:
        if inside.acquire(blocking=False):
            one_too_many.set()
        else:
            full.wait(20)
        done.wait(20)
        return len(tx.fetch_all("SELECT 1", ()))

    async with open_store(postgres_url) as store, anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(store.database.read, stay)
        await anyio.to_thread.run_sync(full.wait, 20)
        inside.release()  # for the fourth one
        assert not await anyio.to_thread.run_sync(one_too_many.wait, 0.3)
        done.set()
    assert one_too_many.is_set()


async def test_a_process_with_a_thousand_files_open_goes_on_writing(postgres_url: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        async with opened(postgres_url) as experiment:
            await experiment.writer("e0").write(group())
            assert (await experiment.writer("e0").write(group(task=1))).written == 4
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_connection_that_ends_while_it_is_made_is_told_as_broken(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = "SELECT pg_terminate_backend(pg_backend_pid()), $1::text"
    monkeypatch.setattr(postgres, "SETTINGS", ends)
    with pytest.raises(StoreError, match="connection"):
        async with open_store(postgres_url):
            pass


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("LockNotAvailable", StoreBusyError, "another process held the database"),
        ("DiskFull", StoreError, "the disk is full; nothing"),
        ("ReadOnlySqlTransaction", ReadOnlyStoreError, "cannot be written"),
        ("NumericValueOutOfRange", InvalidArgumentError, "larger than a store can hold"),
    ],
)
def test_what_a_server_says_in_another_language_is_understood(
    said: str, kind: type[Exception], words: str
) -> None:
    error = getattr(psycopg.errors, said)("FEHLER:  das geht nicht")
    with pytest.raises(kind, match=words), transaction.foreign_errors("store"):
        raise DBAPIError("FEHLER:  das geht nicht", None, error)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_every_text_is_stored_and_read_whatever_encoding_a_client_asks_for(
    postgres_store_url: str, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", encoding)
    async with opened(postgres_store_url) as experiment:
        await experiment.writer("e0").write(group(task="日本"))
        assert {e.eid.task async for e in experiment.read()} == {"日本"}


async def test_who_reads_the_log_to_its_end_asks_for_no_news(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    """A hot standby, which can be read as any server, refuses LISTEN."""
    async with opened(postgres_url) as experiment:
        await experiment.writer("e0").write(group())
        assert "ExperiencesRecorded" in await kinds(experiment)
        asked = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        assert postgres_server.execute(asked) == "0"
