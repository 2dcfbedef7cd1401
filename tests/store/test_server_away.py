"""A server that goes away for a while ends nothing, and nothing is lost or written twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import anyio
import psycopg
import pytest
from sqlalchemy import URL
from typing_extensions import override

from tests.contract.making import group, kinds, opened
from tests.handles import Experiment
from tests.postgres import PostgresServer
from tests.raw_store import sql
from tests.store.wire import wired
from trinity_buffer import open_store, run_strategy, verify
from trinity_buffer.errors import InvalidArgumentError, StoreReplacedError, StoreUnavailableError
from trinity_buffer.store import log, notify, postgres, sqlite
from trinity_buffer.store.url import parse_url

COMMIT = b"COMMIT\0"
"""How a transaction ends on the wire; it begins with an isolation level that reads alike."""


class Own:
    """A server of a test's own, started and stopped beside the event loop."""

    def __init__(self, server: PostgresServer, thread: ThreadPoolExecutor) -> None:
        self.server = server
        self._thread = thread

    async def does(self, what: Callable[[], Any]) -> None:
        """Call ``what`` in the thread that started the server, which lives as long as it does."""
        await asyncio.get_running_loop().run_in_executor(self._thread, what)

    async def restarts(self) -> None:
        def restart() -> None:  # as a whole: the next one may be due before this one is done
            self.server.stop()
            self.server.start()

        await self.does(restart)


class Said(logging.Handler):
    """Hears once of a warning with these words.

    Attributes:
        event: is set then.
    """

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words
        self.event = anyio.Event()
        logging.getLogger(postgres.__name__).addHandler(self)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.event.set()
            logging.getLogger(postgres.__name__).removeHandler(self)


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[Own]:
    """A server that is not durable, unless the test has another one for parameter."""
    with ThreadPoolExecutor(1) as thread:
        server = PostgresServer(durable=getattr(request, "param", False))
        thread.submit(server.start).result()
        yield Own(server, thread)
        thread.submit(server.close).result()


@pytest.mark.parametrize("how", ["loses", "cuts"])
async def test_a_commit_whose_answer_was_lost_is_looked_for_and_not_sent_again_blindly(
    postgres_store_url: str, how: str
) -> None:
    async with wired(postgres_store_url) as (url, wire), opened(url) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group(task=0))
        setattr(wire, how, COMMIT)
        receipt = await writer.write(group(task=1))
        assert wire.cut == 1
        assert (receipt.written, receipt.duplicates) == (4, 0)
        setattr(wire, how, COMMIT)
        await writer.seal("b", 8)
        setattr(wire, how, COMMIT)
        await experiment.finish("done")
        assert wire.cut == 3
        found = await kinds(experiment)
        assert found.count("ExperiencesRecorded") == 2
        assert found[-2:] == ["BatchSealed", "ExperimentFinished"]


@pytest.mark.parametrize("how", ["loses", "cuts"])
async def test_a_trainer_takes_its_lease_and_commits_over_a_bad_line(
    postgres_store_url: str, how: str
) -> None:
    async with wired(postgres_store_url) as (url, wire), opened(url) as experiment:
        await experiment.writer("e0").write(group(task=0) + group(task=1))
        await experiment.finish("done")
        setattr(wire, how, COMMIT)
        await run_strategy(experiment, "grpo", rollouts_per_group=4)
        setattr(wire, how, COMMIT)
        options = {"strategy": "grpo", "consumer": "t", "groups_per_step": 1}
        async with experiment.train_stream(**options, wait_for_lease=False) as stream:
            async for step in stream:
                setattr(wire, how, COMMIT)
                await stream.commit(step)
        assert wire.cut >= 4
        assert await experiment.committed_step("t") == 2
        assert (await kinds(experiment)).count("StepsCommitted") == 2
        assert (await verify(experiment)).problems == ()


@pytest.mark.parametrize("how", ["loses", "cuts"])
async def test_an_explorer_takes_over_a_batch_over_a_bad_line(
    postgres_store_url: str, how: str
) -> None:
    async with wired(postgres_store_url) as (url, wire), opened(url) as experiment:
        await experiment.writer("gone").plan("b", [0], 4)
        await experiment.database.write(sql("DELETE FROM presence"))
        setattr(wire, how, COMMIT)
        assert await experiment.writer("e0").take_over() == ["b"]
        assert wire.cut == 1


@pytest.mark.long
async def test_a_restart_of_the_server_ends_neither_explorer_nor_strategy_nor_trainer(
    own: Own,
) -> None:
    restarts, tasks_each = 3, 6
    url = own.server.create_database("run")
    async with opened(url, rollouts_per_group=4) as experiment, anyio.create_task_group() as tasks:
        committed = anyio.Event()

        async def explore() -> None:
            writer = experiment.writer("e0")
            for number in range(restarts):
                await writer.plan(f"b{number}", list(range(tasks_each)), 4)
                tasks.start_soon(own.restarts)
                for task in range(tasks_each):
                    await writer.write(group(f"b{number}", task))
                await writer.seal(f"b{number}", 4 * tasks_each)
            await experiment.finish("done")

        async def train() -> None:
            options = {"strategy": "grpo", "consumer": "t", "groups_per_step": 2, "follow": True}
            async with experiment.train_stream(**options) as stream:
                async for step in stream:
                    await stream.commit(step)
            committed.set()

        tasks.start_soon(explore)
        tasks.start_soon(train)
        await run_strategy(experiment, "grpo", follow=True)
        await committed.wait()
        assert await experiment.committed_step("t") == restarts * tasks_each / 2
        assert (await verify(experiment)).problems == ()


@pytest.mark.long
async def test_a_step_is_committed_though_heartbeats_failed_while_it_was_computed(own: Own) -> None:
    url = own.server.create_database("run")
    async with opened(url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group(task=0))
        options = {"consumer": "t", "groups_per_step": 1, "lease_ttl_s": 2.0}
        async with experiment.train_stream(strategy=None, **options) as stream:
            step = await anext(stream)
            failed = Said("try 3")  # by a heartbeat: nobody else is at work
            await own.does(own.server.kill9)
            with anyio.fail_after(60):
                await failed.event.wait()
            await own.does(own.server.start)
            await stream.commit(step)
        assert await experiment.committed_step("t") == 1


@pytest.mark.long
async def test_a_stream_that_could_not_give_its_lease_back_is_opened_again_at_once(
    own: Own,
) -> None:
    url = own.server.create_database("run")
    async with opened(url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group(task=0))
        options = {"strategy": None, "consumer": "t", "groups_per_step": 1}
        async with experiment.train_stream(**options) as stream:
            await anext(stream)
            await own.does(own.server.kill9)
        await own.does(own.server.start)
        with anyio.fail_after(30):
            async with experiment.train_stream(**options, wait_for_lease=False) as stream:
                await stream.commit(await anext(stream))


async def test_a_server_that_stays_away_is_given_up_after_the_time_that_the_url_says(
    postgres_store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with wired(postgres_store_url) as (url, wire), AsyncExitStack() as stack:
        experiment = await stack.enter_async_context(opened(f"{url}?reconnect_s=0.5"))
        await wire.close()
        with anyio.fail_after(30), pytest.raises(StoreUnavailableError, match="cannot reach"):
            await experiment.writer("e0").write(group())
        assert "try 2" in caplog.text
        caplog.clear()
        with pytest.raises(StoreUnavailableError):  # it has been waited for
            await experiment.database.read(log.head, experiment.key)
        assert "try" not in caplog.text


async def test_who_opens_a_store_hears_at_once_that_its_server_is_not_there() -> None:
    with anyio.fail_after(30), pytest.raises(StoreUnavailableError, match="cannot reach"):
        await open_store("postgresql://postgres@127.0.0.1:1/none").__aenter__()


@pytest.mark.long
async def test_a_peer_that_falls_silent_holds_no_write(
    postgres_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sqlite.BUSY_TIMEOUT_MS / 1000 < postgres.COMMAND_TIMEOUT_S < 45
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 300)
    monkeypatch.setattr(postgres, "COMMAND_TIMEOUT_S", 0.5)
    async with wired(postgres_store_url) as (url, wire), opened(url) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group(task=0))
        wire.silence()
        with anyio.fail_after(30):
            assert (await writer.write(group(task=1))).written == 4
        wire.silence()
        with anyio.fail_after(30):
            assert await experiment.committed_step() == 0


async def test_a_follower_hears_of_news_though_its_line_fell_silent(
    postgres_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "ASKED_EVERY_S", 0.2)
    monkeypatch.setattr(notify, "ANSWERS_WITHIN_S", 0.2)
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 300)
    monkeypatch.setattr(postgres, "COMMAND_TIMEOUT_S", 0.5)
    async with (
        wired(postgres_store_url) as (url, wire),
        opened(url) as follower,
        opened(postgres_store_url) as other,
    ):
        events = follower.events(follow=True)
        with anyio.fail_after(30):
            assert (await anext(events)).kind == "ExperimentCreated"
            async with anyio.create_task_group() as tasks:

                async def write() -> None:
                    await follower.database.changes.state()
                    wire.silence()
                    await other.writer("e0").write(group())

                tasks.start_soon(write)
                assert (await anext(events)).kind == "ExperiencesRecorded"


@pytest.mark.parametrize("how", ["it answers too late", "who waits is cancelled"])
async def test_a_line_that_could_not_listen_is_waited_on_by_nobody(
    postgres_store_url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    is_late = how == "it answers too late"
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 300)
    monkeypatch.setattr(postgres, "COMMAND_TIMEOUT_S", 0.5 if is_late else 40.0)
    async with (
        wired(postgres_store_url) as (url, wire),
        opened(url) as follower,
        opened(postgres_store_url) as other,
    ):
        heard = follower.database.changes
        wire.swallows = b"LISTEN"
        with anyio.move_on_after(30 if is_late else 1):
            state = await heard.state()
        assert not wire.swallows
        state = await heard.state()
        await other.writer("e0").write(group())
        with anyio.fail_after(30):
            await heard.changed(state)


async def _follows(experiment: Experiment) -> None:
    async for _ in experiment.events(follow=True):
        pass


async def _annotates(experiment: Experiment) -> None:
    await run_strategy(experiment, "grpo", follow=True)


async def _trains(experiment: Experiment) -> None:
    options = {"strategy": "grpo", "consumer": "t", "groups_per_step": 1, "follow": True}
    async with experiment.train_stream(**options) as stream:
        async for step in stream:
            await stream.commit(step)


@pytest.mark.long
async def test_where_a_failover_lost_the_tail_everybody_ends_and_names_the_position(
    own: Own,
) -> None:
    url, data = own.server.create_database("run"), own.server.data_dir
    async with opened(url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group(task=0))
    await own.does(own.server.stop)
    await anyio.run_process(["cp", "-a", str(data), str(data.with_name("standby"))])
    await own.does(own.server.start)
    ended: list[str] = []

    async def ends(role: Callable[[Experiment], Awaitable[None]]) -> None:
        async with opened(url) as apart:
            with pytest.raises(StoreReplacedError, match="'run' has lost its event at position"):
                await role(apart)
        ended.append(role.__name__)

    async with opened(url) as experiment, anyio.create_task_group() as tasks:
        await experiment.writer("e0").write(group(task=1))
        for role in (_follows, _annotates, _trains):
            tasks.start_soon(ends, role)
        async for _ in experiment.events(follow=True, kinds=["StepsCommitted"]):
            if await experiment.committed_step("t") == 2:
                break
        await own.does(own.server.stop)
        data.rename(data.with_name("primary"))
        data.with_name("standby").rename(data)
        await own.does(own.server.start)
        with pytest.raises(StoreReplacedError, match=r"at position \d+.* it ends at 2 now"):
            await experiment.writer("e0").write(group(task=2))
    assert sorted(ended) == ["_annotates", "_follows", "_trains"]


@pytest.mark.parametrize("own", [True], indirect=True)  # whose log is one of a standby too
async def test_a_standby_that_takes_the_place_of_its_server_is_waited_for(own: Own) -> None:
    url, tries = own.server.create_database("run"), Said("hot standby mode")
    async with opened(url) as experiment, anyio.create_task_group() as tasks:
        await experiment.writer("e0").write(group(task=0))
        (own.server.data_dir / "standby.signal").touch()
        await own.restarts()

        async def promote() -> None:
            await tries.event.wait()
            await own.does(lambda: own.server.execute("SELECT pg_promote()"))

        tasks.start_soon(promote)
        assert (await experiment.writer("e0").write(group(task=1))).written == 4


async def test_the_first_host_that_is_there_is_taken(postgres_store_url: str) -> None:
    async with wired(postgres_store_url) as (url, _):
        several = url.replace("127.0.0.1", "127.0.0.1:1,127.0.0.1")
        async with opened(several) as experiment:
            await experiment.writer("e0").write(group())
            assert await kinds(experiment) == ["ExperimentCreated", "ExperiencesRecorded"]
            async for event in experiment.events(follow=True):
                if event.position == 2:
                    break


async def test_a_standby_is_asked_for_and_not_found_among_the_hosts(
    postgres_store_url: str,
) -> None:
    async with wired(postgres_store_url) as (url, _):
        for wanted in ("standby", "read-only"):
            with pytest.raises(StoreUnavailableError, match=wanted):
                await open_store(f"{url}?target_session_attrs={wanted}").__aenter__()


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://a:b@one:1,two:2/x", ("one:1", "two:2")),
        ("postgresql://one,two/x?sslmode=require", ("one:5432", "two:5432")),
    ],
)
def test_several_hosts_stand_where_one_would(url: str, hosts: tuple[str, ...]) -> None:
    parsed = parse_url(url)
    assert parsed.query["host"] == hosts
    assert parsed.database == "x"
    assert parse_url(parsed.set(drivername="postgresql").render_as_string()).query == parsed.query


async def test_a_server_that_dies_as_the_last_check_of_it_ends_is_named(
    postgres_store_url: str, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill -9 of another session ends all of them."""
    execute, looking, killed = psycopg.Connection.execute, list[Any](), list[int]()

    def dies(driver: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        done = execute(driver, query, *arguments, **options)
        if "current_setting('trinity_buffer.session'" in query:
            looking.append(driver)
            if driver is not looking[0] and not killed:  # of the two, the first looks last
                killed.append(looking[0].info.backend_pid)
                postgres_server.execute(f"SELECT pg_terminate_backend({killed[0]}, 10000)")
        return done

    monkeypatch.setattr(psycopg.Connection, "execute", dies)
    with pytest.raises(StoreUnavailableError, match="the connection was lost"):
        async with open_store(postgres_store_url):
            pass
    async with open_store(postgres_store_url):
        assert killed


async def test_a_connection_that_breaks_while_it_is_made_is_made_again(
    postgres_server: PostgresServer, postgres_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a server that shuts down in the middle of the first statement."""
    connect, made = postgres.connect, list[psycopg.Connection[Any]]()

    def break_first(url: URL) -> psycopg.Connection[Any]:
        made.append(connect(url))
        if len(made) == 1:
            postgres.cut(made[0])
        return made[-1]

    async with opened(postgres_store_url) as experiment:
        name = postgres_store_url.partition("?")[0].rpartition("/")[2]
        gone = (
            f"SELECT pg_terminate_backend(pid, 9000) FROM pg_stat_activity WHERE datname='{name}'"
        )
        await anyio.to_thread.run_sync(postgres_server.execute, gone)
        monkeypatch.setattr(postgres, "connect", break_first)
        assert await experiment.is_finished() is False
    assert len(made) == 2


async def test_a_server_that_goes_away_in_the_middle_of_tls_does_not_refuse() -> None:
    async def begins(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)  # which asks for TLS
        writer.write(b"S")
        await reader.read(1)
        writer.transport.abort()

    async with await asyncio.start_server(begins, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = parse_url(f"postgresql://postgres@127.0.0.1:{port}/any?sslmode=require")
        with pytest.raises(ConnectionError, match="SSL"):
            await anyio.to_thread.run_sync(postgres.connect, url)


@pytest.mark.parametrize(
    "said", ["reconnect_s=soon", "reconnect_s=-1", "reconnect_s=nan", "target_session_attrs=best"]
)
def test_what_a_url_says_of_reconnecting_is_checked(said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        parse_url(f"postgresql://one/x?{said}")
