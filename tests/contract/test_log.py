"""The log: one order, each event seen once by every reader, nothing in it ever changed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tests.conftest import Resize
from tests.contract.making import dawdling, group, kinds, opened, rollout
from tests.handles import Experiment, Transaction
from tests.raw_store import append, appending, contents, rows, sql
from trinity_buffer import open_store
from trinity_buffer.errors import StoreError
from trinity_buffer.events import StreamEnded
from trinity_buffer.store.segments import new_key


async def note(experiment: Experiment, writer: int, number: int) -> int:
    """Append one event of no consequence; return its position."""
    (position,) = await notes(experiment, writer, [number])
    return position


async def notes(experiment: Experiment, writer: int, numbers: Sequence[int]) -> list[int]:
    """Append an event for each number, in one transaction; return their positions."""
    some = [StreamEnded(consumer="t", assembly=writer, step=number) for number in numbers]
    return await append(experiment, *some, actor=f"w{writer}")


async def test_positions_have_no_gaps_and_events_say_who_and_what(store_url: str) -> None:
    async with opened(store_url, extra="red") as experiment:
        await experiment.writer("e0").write(group())
        await experiment.finish("enough", actor="me")
        events = [event async for event in experiment.events()]
    assert [(e.position, e.kind, e.actor) for e in events] == [
        (1, "ExperimentCreated", "user"),
        (2, "ExperiencesRecorded", "e0"),
        (3, "ExperimentFinished", "me"),
    ]
    assert events[0].body == {"config": {"schema": "experience", "extra": "red"}}
    assert events[2].body == {"reason": "enough"}
    assert events[0].recorded_at <= events[1].recorded_at <= events[2].recorded_at


@pytest.mark.parametrize("page", [1, 2, 3, 256])
async def test_pages_cut_nothing_and_repeat_nothing(
    store_url: str, page: int, resize: Resize
) -> None:
    resize(events_per_page=page)
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        for task in range(5):
            await writer.write(group(task=task))
            await writer.seal(task, 0)
        everything = [event.position async for event in experiment.events()]
        assert everything == list(range(1, 12))
        assert [e.position async for e in experiment.events(after=4)] == everything[4:]
        sealed = [e.position async for e in experiment.events(kinds=["BatchSealed"])]
        assert sealed == [3, 5, 7, 9, 11]
        assert [e async for e in experiment.events(after=99)] == []


async def test_experiments_have_each_an_order_of_their_own(store_url: str) -> None:
    async with open_store(store_url) as store:
        one = await store.experiment("one", config={})
        two = await store.experiment("two", config={})
        await one.writer("e").write(group())
        await two.writer("e").write([rollout(reward=0.75)])
        assert await kinds(one) == await kinds(two) == ["ExperimentCreated", "ExperiencesRecorded"]
        assert [e.reward async for e in two.read()] == [0.75]
        assert await store.experiments() == ["one", "two"]


async def test_a_follower_hears_of_every_writer_and_ends_with_the_experiment(
    store_url: str,
) -> None:
    heard: list[int] = []
    async with opened(store_url) as experiment, opened(store_url) as other:

        async def follow() -> None:
            async for event in experiment.events(follow=True):
                heard.append(event.position)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow)
                for number in range(10):
                    await note((experiment, other)[number % 2], 0, number)
                await other.finish("enough")
    assert heard == list(range(1, 13))


async def race(url: str, writers: int, per_writer: int, readers: int, at_once: int = 1) -> None:
    """Let writers, each with connections of its own, race readers that follow; compare.

    A transaction of a writer appends one event, the next one two, up to ``at_once``.
    """
    heard: list[list[tuple[int, int, int]]] = [[] for _ in range(readers)]
    told: dict[tuple[int, int], int] = {}

    async def write(number: int) -> None:
        async with opened(url) as experiment:
            turn, size = 0, 1
            while turn < per_writer:
                turns = range(turn, min(turn + size, per_writer))
                positions = await notes(experiment, number, turns)
                told.update(zip(((number, one) for one in turns), positions, strict=True))
                turn, size = turns.stop, size % at_once + 1

    async def follow(into: list[tuple[int, int, int]]) -> None:
        async with opened(url) as experiment:
            async for event in experiment.events(follow=True, kinds=["StreamEnded"]):
                into.append((event.position, event.body["assembly"], event.body["step"]))

    async with opened(url) as experiment, anyio.create_task_group() as tasks:
        for into in heard:
            tasks.start_soon(follow, into)
        async with anyio.create_task_group() as writing:
            for number in range(writers):
                writing.start_soon(write, number)
        await experiment.finish("enough")
    assert len(told) == writers * per_writer
    expected = sorted((position, *who) for who, position in told.items())
    assert [position for position, *_ in expected] == list(range(2, len(told) + 2))
    for into in heard:
        assert into == expected


@pytest.mark.long
async def test_eight_writers_and_three_readers_agree_on_one_order(store_url: str) -> None:
    await race(store_url, writers=8, per_writer=60, readers=3)


@pytest.mark.long
async def test_two_thousand_events_are_seen_once_by_each_reader(store_url: str) -> None:
    await race(store_url, writers=8, per_writer=250, readers=3, at_once=9)


async def test_a_slow_writer_hides_nothing_from_a_reader_that_goes_on(store_url: str) -> None:
    heard: list[tuple[int, int]] = []
    enough = anyio.Event()
    has_position = anyio.Event()

    async def follow(experiment: Experiment) -> None:
        async for event in experiment.events(follow=True, kinds=["StreamEnded"]):
            heard.append((event.position, event.body["assembly"]))

    async def write_slowly(experiment: Experiment) -> None:
        """Begin first, take the first position, commit after everybody had time to pass by."""
        early = appending(
            experiment.key, StreamEnded(consumer="t", assembly=0, step=0), actor="slow"
        )

        async def wait() -> None:
            has_position.set()
            with anyio.move_on_after(0.5):
                await enough.wait()

        dawdle = dawdling(wait)

        def record(tx: Transaction) -> None:
            blobs = experiment.database.segments
            blobs.attach(tx, blobs.put(new_key(), {"light": [b"early"]}))
            early(tx)
            dawdle(tx)

        await experiment.database.write(record)

    async def write_quickly(experiment: Experiment) -> None:
        await has_position.wait()
        for number in range(5):
            await note(experiment, 1, number)
        enough.set()

    async with opened(store_url) as one, opened(store_url) as two, opened(store_url) as three:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow, one)
                async with anyio.create_task_group() as writing:
                    writing.start_soon(write_slowly, two)
                    writing.start_soon(write_quickly, three)
                await one.finish("enough")
    assert heard == [(2, 0), *((position, 1) for position in range(3, 8))]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE event SET kind = 'Other'",
        "UPDATE event SET position = position + 1000",
        "DELETE FROM event",
        "DELETE FROM event WHERE position = 2",
        "UPDATE segment SET data = data",
        "DELETE FROM segment",
        "UPDATE experiment SET name = 'other'",
        "DELETE FROM experiment",
    ],
)
async def test_what_is_recorded_is_neither_changed_nor_deleted(
    store_url: str, statement: str
) -> None:
    async with opened(store_url) as experiment:
        await experiment.writer("e0").write(group())
        before = await contents(store_url)
        with pytest.raises((StoreError, DBAPIError), match=r"forbidden|only"):
            await experiment.database.write(sql(statement))
        assert await contents(store_url) == before


async def test_positions_and_kinds_are_checked_by_the_database(store_url: str) -> None:
    async with opened(store_url) as experiment:
        row: dict[str, Any] = {
            "experiment": experiment.key,
            "position": 0,
            "kind": "x",
            "actor": "",
            "recorded_at": 0,
            "body": b"",
            "head": bytes(32),
        }
        insert = f"INSERT INTO event ({', '.join(row)}) VALUES (:{', :'.join(row)})"
        places = ({"position": 0}, {"position": 9, "kind": ""}, {"position": 1})
        for wrong in (*places, {"position": 9, "head": None}):
            new = sql(insert, **row | wrong)
            with pytest.raises(StoreError):
                await experiment.database.write(new)


async def test_opening_with_another_configuration_is_recorded_once(store_url: str) -> None:
    async with open_store(store_url) as store:
        first = await store.experiment(
            "run", config={"seed": 1, "extra": [1, 2], "group_timeout_s": None}
        )
        await store.experiment("run", config={"seed": 1, "extra": (1, 2)})
        await store.experiment("run")
        assert await kinds(first) == ["ExperimentCreated"]
        again = await store.experiment(
            "run", config={"seed": 2, "loss": {"args": {"x": 1.5}}}, actor="me"
        )
        (changed,) = [e async for e in again.events(kinds=["ConfigurationChanged"])]
    assert changed.actor == "me"
    assert changed.body["changes"] == {"seed": [1, 2], "loss": [None, {"args": {"x": 1.5}}]}
    own = {"seed": 2, "extra": [1, 2], "group_timeout_s": None, "loss": {"args": {"x": 1.5}}}
    assert changed.body["config"] == again.config == {"schema": "experience", **own}


async def test_two_who_create_one_experiment_open_the_same(store_url: str) -> None:
    async with open_store(store_url) as one, open_store(store_url) as two:
        async with anyio.create_task_group() as tasks:
            for store in (one, two) * 4:
                tasks.start_soon(lambda s=store: s.experiment("run", config={"seed": 1}))  # type: ignore[misc]
        found = await one.experiment("run")
        assert await kinds(found) == ["ExperimentCreated"]
        assert len(await rows(one, "experiment")) == 1


async def test_a_new_store_may_be_opened_by_many_at_once(store_url: str) -> None:
    async def create(number: int) -> None:
        async with opened(store_url) as experiment:
            await experiment.writer(f"e{number}").write([rollout(task=number)])

    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(create, number)
    async with opened(store_url) as experiment:
        assert len([e async for e in experiment.read()]) == 6


async def test_reads_filter_by_what_is_asked(store_url: str) -> None:
    async with opened(store_url) as experiment:
        some = [
            rollout(batch, task, run, reward=run / 4, version=run)
            for batch in ("a", "b")
            for task in (1, 2)
            for run in range(4)
        ]
        await experiment.writer("e0").write(some)

        async def uids(**wanted: Any) -> list[str]:
            return [e.eid.rid async for e in experiment.read(**wanted)]

        assert await uids(batch="a", task=2) == [f"a/2/{run}" for run in range(4)]
        assert await uids(policy_version=3, batch="b") == ["b/1/3", "b/2/3"]
        assert await uids(reward_min=0.5, reward_max=0.5) == ["a/1/2", "a/2/2", "b/1/2", "b/2/2"]
        assert await uids(run=0, task="1") == ["a/1/0", "b/1/0"]
        assert await uids(batch="c") == []


async def test_the_newest_policy_is_the_one_published_last(store_url: str) -> None:
    async with opened(store_url) as experiment:
        assert await experiment.newest_policy() is None
        await experiment.publish_policy(3, "three", digest="abc")
        await experiment.publish_policy(3, "three again")
        found = await experiment.newest_policy()
        assert found is not None
        assert (found.version, found.uri, found.digest, found.position) == (3, "three again", "", 3)


@pytest.mark.parametrize("name", ["experiment", "event", "segment"])
async def test_postgresql_refuses_to_truncate_the_truth(postgres_url: str, name: str) -> None:
    async with opened(postgres_url) as experiment:
        truncate = partial(Transaction.execute, statement=text(f"TRUNCATE {name}"))
        with pytest.raises(StoreError, match=f"{name}: TRUNCATE is forbidden"):
            await experiment.database.write(truncate)


async def test_an_event_without_a_head_is_refused_with_the_version_to_install(
    store_url: str,
) -> None:
    """As a process writes them that opened the store before it was migrated."""
    old = sql(
        "INSERT INTO event (experiment, position, kind, actor, recorded_at, body) "
        "VALUES (1, 2, 'PolicyPublished', 'old', 0, '')"
    )
    async with opened(store_url) as experiment:
        with pytest.raises(StoreError, match="pip install --upgrade trinity-buffer"):
            await experiment.database.write(old)
