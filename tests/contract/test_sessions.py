"""Several transactions with computation between them, which SQLite runs on one trip to a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
from sqlalchemy import func, select

from tests.conftest import Resize
from tests.contract.making import kinds, opened
from tests.handles import Experiment, ReadSession, Session, Transaction
from tests.raw_store import appending, contents
from trinity_buffer import open_store
from trinity_buffer.errors import ReadOnlyStoreError
from trinity_buffer.events import StreamEnded
from trinity_buffer.store import log
from trinity_buffer.store.tables import waiting
from trinity_buffer.store.transaction import TakenKeyError


def noting(experiment: Experiment, step: int) -> Callable[[Transaction], Any]:
    """Return what appends one event of no consequence."""
    return appending(experiment.key, StreamEnded(consumer="t", assembly=1, step=step))


async def head_of(experiment: Experiment) -> int:
    return await experiment.database.read(log.head, experiment.key)


async def test_what_is_written_is_read_by_what_comes_after_it(store_url: str) -> None:
    async with opened(store_url) as experiment:

        def work(s: Session) -> list[int]:
            heads = [s.read(log.head, experiment.key)]
            for step in range(2):
                s.write(noting(experiment, step))
                heads.append(abs(s.read(log.head, experiment.key)))
            return heads

        assert await experiment.database.session(work) == [1, 2, 3]


async def test_each_transaction_stands_for_itself_when_a_later_one_fails(store_url: str) -> None:
    async with opened(store_url) as experiment:

        def fail(tx: Transaction) -> None:
            noting(experiment, 2)(tx)
            raise RuntimeError("as planned")

        def work(s: Session) -> None:
            s.write(noting(experiment, 1))
            s.write(fail)

        with pytest.raises(RuntimeError, match="as planned"):
            await experiment.database.session(work)
        await experiment.database.write(noting(experiment, 3))  # nothing is left open
        assert await kinds(experiment) == ["ExperimentCreated", "StreamEnded", "StreamEnded"]


async def test_who_waits_is_told_of_a_write_and_not_of_a_look(store_url: str) -> None:
    async with opened(store_url) as experiment:
        database = experiment.database

        async def own_commits() -> int:
            return (await database.changes.state())[0]

        def write_and_fail(s: Session) -> None:
            s.write(noting(experiment, 2))
            raise RuntimeError("as planned")

        before = await own_commits()
        await database.session(lambda s: s.read(log.head, experiment.key))
        assert await own_commits() == before
        await database.session(lambda s: s.write(noting(experiment, 1)))
        assert await own_commits() == before + 1
        with pytest.raises(RuntimeError, match="as planned"):
            await database.session(write_and_fail)
        assert await own_commits() == before + 2


@pytest.mark.parametrize("kind", ["session", "read_session"])
async def test_computing_never_happens_on_the_event_loop(store_url: str, kind: str) -> None:
    async with opened(store_url) as experiment:
        here, run = threading.get_ident(), getattr(experiment.database, kind)

        def work(s: ReadSession) -> tuple[int, int]:
            return s.read(lambda _: threading.get_ident()), threading.get_ident()

        reading, computing = await run(work)
    assert computing != here
    if experiment.database.dialect == "sqlite":
        assert reading == computing, "one trip to one thread"


async def test_two_at_once_do_not_get_in_each_others_way(store_url: str) -> None:
    async with opened(store_url) as experiment:
        database = experiment.database

        def work(first: int, s: Session) -> None:
            for step in range(first, first + 8):
                s.write(noting(experiment, step))

        await asyncio.gather(
            *(database.session(partial(work, 8 * n)) for n in range(4)),
            *(database.write(noting(experiment, 100 + n)) for n in range(8)),
        )
        assert await head_of(experiment) == 1 + 4 * 8 + 8


async def test_on_sqlite_a_second_session_begins_when_the_first_is_over(sqlite_url: str) -> None:
    async with opened(sqlite_url) as experiment:
        begun = [threading.Event(), threading.Event()]

        def work(number: int, _: Session) -> bool:
            begun[number].set()
            return begun[1 - number].wait(0.1)

        sessions = (experiment.database.session(partial(work, number)) for number in range(2))
        # The second finds that the first was there; the first has met nobody.
        assert sorted(await asyncio.gather(*sessions)) == [False, True]


async def test_a_session_that_only_reads_keeps_nobody_from_writing(store_url: str) -> None:
    async with opened(store_url) as experiment:
        begun, written = anyio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def wait() -> bool:
            loop.call_soon_threadsafe(begun.set)
            return written.wait(15)

        async def read() -> None:
            assert await experiment.database.read_session(lambda _: wait())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await begun.wait()
            await experiment.database.write(noting(experiment, 1))
            written.set()


async def test_a_function_that_stops_an_iteration_is_an_error_and_no_wait(store_url: str) -> None:
    def stop(_: Transaction) -> None:
        raise StopIteration

    async with opened(store_url) as experiment:
        with anyio.fail_after(15):
            with pytest.raises(RuntimeError, match="StopIteration"):
                await experiment.database.read(stop)
            with pytest.raises(RuntimeError, match="StopIteration"):
                await experiment.database.session(lambda s: s.write(stop))
            assert await head_of(experiment) == 1


async def test_a_read_only_store_refuses_to_write_in_it_too(store_url: str) -> None:
    async with opened(store_url):
        pass
    before = await contents(store_url)
    async with open_store(store_url, read_only=True) as store:
        experiment = await store.experiment("run")
        with pytest.raises(ReadOnlyStoreError):
            await experiment.database.session(lambda s: s.write(noting(experiment, 1)))
    assert await contents(store_url) == before


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 10, 11])
async def test_any_number_of_rows_is_added_each_once(
    store_url: str, number: int, resize: Resize
) -> None:
    resize(rows_per_statement=3, rows_to_copy=4)
    given = [(1, "s", address) for address in range(number)]
    async with opened(store_url) as experiment:
        database = experiment.database
        await database.write(lambda tx: tx.insert_many(waiting, given))
        found = await database.read(lambda tx: list(map(tuple, tx.execute(select(waiting)))))
    assert sorted(found) == given


@pytest.mark.parametrize("number", [2, 80])
async def test_rows_of_which_one_is_taken_are_not_added_at_all(store_url: str, number: int) -> None:
    twice = [(1, "s", address % (number - 1)) for address in range(number)]
    count = select(func.count()).select_from(waiting)
    async with opened(store_url) as experiment:
        database = experiment.database
        with pytest.raises(TakenKeyError, match=r"(?i)unique|duplicate"):
            await database.write(lambda tx: tx.insert_many(waiting, twice))
        assert await database.read(lambda tx: tx.execute(count).scalar_one()) == 0
