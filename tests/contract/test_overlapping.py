"""A call is prepared while the commit of the one before is under way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import anyio.to_thread
import pytest
from typing_extensions import override

from tests.conftest import Resize
from tests.contract.making import group, opened
from tests.handles import Experiment
from tests.raw_store import count, dbapi2
from trinity_buffer.errors import InvalidExperienceError, StoreBusyError
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.write.batch import PreparedWrite, WriteCall
from trinity_buffer.pipeline.write.writer import GroupCommit
from trinity_buffer.store import sqlite

ROWS = 4


class Watched(WriteCall):
    """A call that tells when it is prepared."""

    def __init__(self, experiment: Experiment, task: int) -> None:
        given = group(task=task, runs=ROWS)
        segments = experiment.database.segments
        super().__init__(given, experiment.key, "e0", "experience", "raise", segments)
        self.prepared = Event()

    @override
    def prepare(self, others: Sequence[WriteCall] = ()) -> list[PreparedWrite]:
        found = super().prepare(others)
        self.prepared.set()
        return found

    async def is_prepared(self) -> None:
        assert await anyio.to_thread.run_sync(self.prepared.wait, 10)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keep everybody else from writing."""
    holder = dbapi2.connect(str(file), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        holder.execute("ROLLBACK")
        holder.close()


async def test_what_waits_is_prepared_beside_the_commit_before_it(
    tmp_path: Path, resize: Resize
) -> None:
    resize(rows_prepared_ahead=ROWS)
    async with opened(str(tmp_path / "run.db")) as experiment, anyio.create_task_group() as tasks:
        commits = GroupCommit(experiment.database)
        calls = [Watched(experiment, task) for task in range(3)]

        async def submit(number: int) -> None:
            await commits.submit(calls[number])

        with locked(tmp_path / "run.db"):
            tasks.start_soon(submit, 0)
            await calls[0].is_prepared()
            tasks.start_soon(submit, 1)
            await calls[1].is_prepared()
            tasks.start_soon(submit, 2)
            await anyio.wait_all_tasks_blocked()
            assert not any(call.answered.is_set() for call in calls)
    positions = [call.place.position for call in calls]
    assert positions == sorted(set(positions))


async def test_calls_that_come_together_take_two_turns(store_url: str, resize: Resize) -> None:
    resize(rows_prepared_ahead=2 * ROWS)
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        positions: list[int] = []

        async def write(task: int) -> None:
            for turn in range(3):
                given = group(task=f"{turn}-{task}", runs=ROWS)
                positions.append((await writer.write(given)).position)

        async with anyio.create_task_group() as tasks:
            for task in range(4):
                tasks.start_soon(write, task)
        assert await count(experiment, "experience") == 12 * ROWS
    each = [positions.count(position) for position in sorted(set(positions))]
    assert each == [2] * 6


async def test_who_was_prepared_ahead_hears_that_the_store_is_busy_and_is_not_written(
    tmp_path: Path, resize: Resize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 500)
    resize(rows_prepared_ahead=ROWS)
    async with opened(str(tmp_path / "run.db")) as experiment:
        commits = GroupCommit(experiment.database)
        calls = [Watched(experiment, task) for task in range(2)]

        async def refused(number: int) -> None:
            with pytest.raises(StoreBusyError):
                await commits.submit(calls[number])

        with locked(tmp_path / "run.db"):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(refused, 0)
                await calls[0].is_prepared()
                tasks.start_soon(refused, 1)
            await calls[1].is_prepared()
        await commits.drain()
        assert await count(experiment, "experience") == 0
        assert (await experiment.writer("e0").write(group())).written == 4


async def test_a_call_that_is_wrong_hears_of_that_from_a_busy_store_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 300)
    heard: dict[int, Exception] = {}
    async with opened(str(tmp_path / "run.db")) as experiment:
        writer = experiment.writer("e0")
        wrong = group(task=1)
        wrong[2].reward = math.nan

        async def write(number: int, given: list[Experience]) -> None:
            try:
                await writer.write(given)
            except (StoreBusyError, InvalidExperienceError) as error:
                heard[number] = error

        with locked(tmp_path / "run.db"):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write, 0, group(task=0))
                tasks.start_soon(write, 1, wrong)
                tasks.start_soon(write, 2, group(task=2))
    assert [type(heard[number]) for number in range(3)] == [
        StoreBusyError,
        InvalidExperienceError,
        StoreBusyError,
    ]
    assert heard[0] is not heard[2]
    assert heard[0].__cause__ is heard[2].__cause__


async def test_calls_that_are_looked_at_one_by_one_wait_for_a_busy_store_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = list[str]()
    async with opened(str(tmp_path / "run.db")) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group(task=0))
        write = experiment.database.session

        async def busy(work: Any, *, writes: bool = True) -> Any:
            if not writes:
                return await write(work, writes=False)
            turns.append("write")
            if len(turns) > 1:
                raise StoreBusyError("another process holds the database")
            return await write(work)  # finds that something is stored

        monkeypatch.setattr(experiment.database, "session", busy)

        async def repeated(task: int) -> None:
            if task == 0:
                assert (await writer.write(group(task=0))).duplicates == 4
                return
            with pytest.raises(StoreBusyError):
                await writer.write(group(task=task))

        async with anyio.create_task_group() as tasks:
            for task in range(4):
                tasks.start_soon(repeated, task)
    assert turns == ["write"] * 2  # all together, then the first that is new: no more
