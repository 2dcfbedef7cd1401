"""Several transactions with computation between them, which SQLite runs on one trip to a thread."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
from sqlalchemy import func, select

from tests.conftest import Resize
from tests.contract.making import contents, opened
from trinity_buffer.errors import ReadOnlyStoreError
from trinity_buffer.pipeline.background import in_thread
from trinity_buffer.pipeline.events import new_event, now_us
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.store import bulk, log
from trinity_buffer.store.tables import waiting
from trinity_buffer.store.transaction import Transaction


async def head_of(experiment: Experiment) -> int:
    return await experiment.database.read(partial(log.head, experiment_id=experiment.key))


async def note(experiment: Experiment, step: int) -> None:
    event = new_event("StreamEnded", {"assembly": 1, "step": step})

    async def work(tx: Transaction) -> None:
        await log.append(tx, experiment.key, [event], actor="t", now_us=now_us())

    await experiment.database.write(work)


async def test_what_is_written_is_read_by_what_comes_after_it(store_url: str) -> None:
    async with opened(store_url) as experiment:

        async def work() -> list[int]:
            heads = [await head_of(experiment)]
            for step in range(2):
                await note(experiment, step)
                heads.append(await in_thread(abs, await head_of(experiment)))
            return heads

        assert await experiment.database.together(work) == [1, 2, 3]


async def test_each_transaction_stands_for_itself_when_a_later_one_fails(store_url: str) -> None:
    async with opened(store_url) as experiment:

        async def work() -> None:
            await note(experiment, 1)

            async def fail(tx: Transaction) -> None:
                await log.append(
                    tx, experiment.key, [new_event("StreamEnded", {})], actor="t", now_us=now_us()
                )
                raise RuntimeError("as planned")

            await experiment.database.write(fail)

        with pytest.raises(RuntimeError, match="as planned"):
            await experiment.database.together(work)
        await note(experiment, 2)  # nothing is left open
        assert [e.kind async for e in experiment.events()] == [
            "ExperimentCreated",
            "StreamEnded",
            "StreamEnded",
        ]


async def test_who_waits_is_told_of_a_write_and_not_of_a_look(store_url: str) -> None:
    async with opened(store_url) as experiment:
        database = experiment.database

        async def own_commits() -> int:
            return (await database.changes.state())[0]

        before = await own_commits()
        await database.together(partial(head_of, experiment))
        assert await own_commits() == before
        await database.together(partial(note, experiment, 1))
        assert await own_commits() == before + 1


async def test_on_sqlite_it_is_one_trip_to_a_thread_and_elsewhere_none(store_url: str) -> None:
    async with opened(store_url) as experiment:

        async def work() -> set[int]:
            found = {threading.get_ident()}
            await note(experiment, 1)
            return found | {await in_thread(threading.get_ident)}

        here = threading.get_ident()
        threads = await experiment.database.together(work)
    if experiment.database.dialect == "sqlite":
        assert len(threads) == 1
        assert here not in threads
    else:
        assert here in threads


async def test_two_at_once_do_not_get_in_each_others_way(store_url: str) -> None:
    async with opened(store_url) as experiment:

        async def work(first: int) -> None:
            for step in range(first, first + 8):
                await note(experiment, step)

        await asyncio.gather(
            *(experiment.database.together(partial(work, 8 * n)) for n in range(4)),
            *(note(experiment, 100 + n) for n in range(8)),
        )
        assert await head_of(experiment) == 1 + 4 * 8 + 8


async def test_on_sqlite_a_second_trip_begins_when_the_first_is_over(sqlite_url: str) -> None:
    async with opened(sqlite_url) as experiment:
        begun = [threading.Event(), threading.Event()]

        async def work(number: int) -> bool:
            begun[number].set()
            return begun[1 - number].wait(0.1)

        trips = (experiment.database.together(partial(work, number)) for number in range(2))
        # The second finds that the first was there; the first has met nobody.
        assert sorted(await asyncio.gather(*trips)) == [False, True]


async def test_a_read_only_store_refuses_to_write_in_it_too(store_url: str) -> None:
    async with opened(store_url):
        pass
    before = await contents(store_url)
    async with open_store(store_url, read_only=True) as store:
        experiment = await store.experiment("run")
        with pytest.raises(ReadOnlyStoreError):
            await experiment.database.together(partial(note, experiment, 1))
    assert await contents(store_url) == before


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 10, 11])
async def test_any_number_of_rows_is_added_each_once(
    store_url: str, number: int, resize: Resize
) -> None:
    resize(rows_per_statement=3, rows_to_copy=4)
    given = [(1, "s", address) for address in range(number)]
    async with opened(store_url) as experiment:
        database = experiment.database
        await database.write(partial(bulk.add, table=waiting, rows=given))
        async with database.reading() as tx:
            found = [tuple(row) for row in (await tx.execute(select(waiting))).all()]
            count = (await tx.execute(select(func.count()).select_from(waiting))).scalar_one()
    assert sorted(found) == given
    assert count == number


async def test_rows_of_which_one_is_taken_are_not_added_at_all(store_url: str) -> None:
    twice = [(1, "s", address % 70) for address in range(80)]
    async with opened(store_url) as experiment:
        database = experiment.database
        with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
            await database.write(partial(bulk.add, table=waiting, rows=twice))
        async with database.reading() as tx:
            assert (await tx.execute(select(func.count()).select_from(waiting))).scalar_one() == 0
