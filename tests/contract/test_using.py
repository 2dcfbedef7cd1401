"""A store is used where it was opened, while it is open and its files are there."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from pysqlite3 import dbapi2

from tests.contract.making import group, opened
from tests.handles import Experiment
from trinity_buffer import open_store, open_train_stream, run_strategy, verify
from trinity_buffer.errors import StoreBusyError, StoreReplacedError, StoreUseError
from trinity_buffer.store import sqlite


def removed(path: Path) -> None:
    path.unlink()


def replaced_by_a_copy(path: Path) -> None:
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    copy.replace(path)


def folder_moved(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def log_removed(path: Path) -> None:
    Path(f"{path}-wal").unlink()


def log_index_removed(path: Path) -> None:
    Path(f"{path}-shm").unlink()


TAKEN = [removed, replaced_by_a_copy, folder_moved, log_removed, log_index_removed]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs" / "a.db"


@pytest.mark.parametrize("durability", ["normal", "full"])
@pytest.mark.parametrize("taken", TAKEN)
async def test_nothing_is_acknowledged_into_a_file_that_is_gone(
    file: Path, taken: Callable[[Path], None], durability: str
) -> None:
    async with open_store(str(file), durability=durability) as store:  # type: ignore[arg-type]
        experiment = await store.experiment("run", config={})
        writer = experiment.writer("e0")
        await writer.write(group(task=1))
        taken(file)
        for task in (1, 2, 2):  # what is there already, and what is tried again
            with pytest.raises(StoreReplacedError, match="while this process had it open"):
                await writer.write(group(task=task))
        with pytest.raises(StoreReplacedError):
            await writer.plan("b2", [1], 4)
        with pytest.raises(StoreReplacedError):
            await writer.seal("b", 8)


@pytest.mark.parametrize("taken", TAKEN)
async def test_no_lease_or_commit_goes_into_a_file_that_is_gone(
    file: Path, taken: Callable[[Path], None]
) -> None:
    async with opened(str(file), rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write([*group(task=1), *group(task=2)])
        await run_strategy(experiment, "grpo")

        async def train() -> None:
            async with experiment.train_stream(strategy="grpo") as stream:
                step = await anext(stream)
                if not gone:
                    taken(file)
                    gone.append(file)
                await stream.commit(step)

        gone: list[Path] = []
        for _ in range(2):
            with pytest.raises(StoreReplacedError):
                await train()


async def test_nothing_is_acknowledged_behind_a_backup_that_is_restored_into_the_file(
    file: Path,
) -> None:
    """As by ``.restore`` of the shell of SQLite, which leaves the file and its log in place."""
    backup = file.with_name("backup.db")
    async with opened(str(file), rollouts_per_group=4) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group(task=1))
        with closing(dbapi2.connect(str(file))) as own, closing(dbapi2.connect(str(backup))) as old:
            own.backup(old)
            receipt = await writer.write(group(task=2))
            await run_strategy(experiment, "grpo")
            old.backup(own)
        lost = rf"'run' has lost its event at position \d+.* it ends at {receipt.position - 1} now"
        for _ in range(2):
            with pytest.raises(StoreReplacedError, match=lost):
                await writer.write(group(task=3))
            with pytest.raises(StoreReplacedError, match=lost):
                await run_strategy(experiment, "grpo")
    async with opened(str(file)) as experiment:
        assert (await experiment.writer("e0").write(group(task=3))).written == 4


async def test_a_backup_that_is_older_than_its_experiment_names_no_other_one(file: Path) -> None:
    backup = file.with_name("backup.db")
    async with open_store(str(file)) as store:
        with closing(dbapi2.connect(str(file))) as own, closing(dbapi2.connect(str(backup))) as old:
            own.backup(old)
            experiment = await store.experiment("run", config={})
            old.backup(own)
        with pytest.raises(StoreReplacedError, match="log of experiment 1 has lost its event at"):
            await experiment.writer("e0").write(group())


async def test_a_link_that_leads_elsewhere_is_another_file(file: Path) -> None:
    link = file.with_name("link.db")
    link.symlink_to(file)
    async with opened(str(link)) as experiment:
        await experiment.writer("e0").write(group(task=1))
        link.unlink()
        link.symlink_to(file.with_name("b.db"))
        with pytest.raises(StoreReplacedError, match=r"link\.db was removed"):
            await experiment.writer("e0").write(group(task=2))


async def test_a_process_that_changes_its_folder_stays_in_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    async with opened("sqlite:///other/a.db") as experiment:
        await experiment.writer("e0").write(group("elsewhere"))
    async with opened("sqlite:///a.db") as experiment:
        monkeypatch.chdir(tmp_path / "other")

        async def batches() -> set[object]:
            return {one.eid.batch async for one in experiment.read()}

        await experiment.writer("e0").write(group("here"))
        # at once: each reads through a connection of its own, and some are new ones
        assert await asyncio.gather(*(batches() for _ in range(4))) == [{"here"}] * 4
        await asyncio.gather(*(experiment.writer("e0").write(group("here", t)) for t in (1, 2)))
        assert (await verify(experiment)).ok
    async with opened("sqlite:///a.db") as experiment:
        assert {one.eid.batch async for one in experiment.read()} == {"elsewhere"}


async def test_a_store_after_its_end_says_that_it_is_closed(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo") as stream:
            step = await anext(stream)
    writer = experiment.writer("e0")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: writer.write(group(task=2)),
        lambda: writer.plan("b2", [1], 4),
        lambda: writer.seal("b", 4),
        lambda: writer.missing("b"),
        lambda: experiment.finish("enough"),
        lambda: experiment.newest_policy(),
        lambda: run_strategy(experiment, "grpo", name="other"),
        lambda: anext(experiment.events()),
        lambda: anext(experiment.read()),
        lambda: stream.commit(step),
        lambda: experiment.train_stream(strategy="grpo").__aenter__(),
    ]
    for call in calls:
        with pytest.raises(StoreUseError, match="is closed"):
            await call()


async def test_who_waits_for_news_hears_that_the_store_is_closed(store_url: str) -> None:
    heard: list[str] = []

    async def follow(experiment: Experiment) -> None:
        try:
            async for event in experiment.events(follow=True):
                heard.append(event.kind)
        except StoreUseError as error:
            heard.append(str(error))

    async with anyio.create_task_group() as tasks, opened(store_url) as experiment:
        tasks.start_soon(follow, experiment)
        while not heard:
            await anyio.sleep(0.001)
        await anyio.wait_all_tasks_blocked()
    assert "is closed" in heard[-1]


def test_a_stream_after_its_end_says_that_it_is_closed(store_url: str) -> None:
    async def prepare() -> None:
        async with opened(store_url, rollouts_per_group=4) as experiment:
            await experiment.writer("e0").write(group())
            await run_strategy(experiment, "grpo")

    anyio.run(prepare)
    with open_train_stream(store_url, experiment="run", strategy="grpo") as stream:
        step = next(stream)
    calls: list[Callable[[], object]] = [
        lambda: stream.commit(step),
        stream.columns,
        lambda: stream.finish("enough"),
    ]
    for call in calls:
        with pytest.raises(StoreUseError, match="is closed"):
            call()


async def test_another_event_loop_is_refused_by_name(store_url: str) -> None:
    said: list[str] = []

    def elsewhere(experiment: Experiment) -> None:
        for call in (
            lambda: experiment.writer("e0").write(group()),
            experiment.newest_policy,
            lambda: anext(experiment.events(follow=True)),
        ):
            with pytest.raises(StoreUseError, match="opened in another event loop") as caught:
                asyncio.run(call())  # type: ignore[arg-type]
            said.append(str(caught.value))

    async with opened(store_url) as experiment:
        await anyio.to_thread.run_sync(elsewhere, experiment)
        await experiment.writer("e0").write(group())
    assert len(said) == 3


def test_without_an_event_loop_of_asyncio_a_store_is_not_opened(new_sqlite_url: str) -> None:
    with pytest.raises(StoreUseError, match="needs an event loop of asyncio"):
        open_store(new_sqlite_url).__aenter__().send(None)
    assert not Path(new_sqlite_url.removeprefix("sqlite:///")).exists()


FORK = """
import asyncio, os, sys, anyio
import trinity_buffer as tb
from tests.contract.making import group
from trinity_buffer.errors import StoreUseError

def child_says(what):
    pid = os.fork()
    if pid == 0:
        try:
            what()
        except StoreUseError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)

async def main():
    async with tb.open_store(sys.argv[1]) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 4})
        writer = experiment.writer("e0")
        await writer.write(group())
        child_says(lambda: asyncio.run(writer.write(group(task=1))))
        child_says(lambda: asyncio.run(experiment.newest_policy()))
        await writer.write(group(task=2))
        await tb.run_strategy(experiment, "grpo")

anyio.run(main)
with tb.open_train_stream(sys.argv[1], experiment="run", strategy="grpo") as stream:
    step = next(stream)
    child_says(lambda: next(stream))
    child_says(lambda: stream.commit(step))
    if os.fork() == 0:
        sys.exit("the child leaves")  # through the end of the block
    os.wait()
    stream.commit(step)
print("done")
"""


@pytest.mark.long
def test_a_forked_child_is_told_to_open_the_store_anew(store_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, store_url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *said, last = done.stdout.splitlines()
    assert last == "done", done.stderr
    assert len(said) == 4
    assert all("forked into" in line and "start the child with spawn" in line for line in said)
    assert done.stderr.strip() == "the child leaves"


FORK_AND_OPEN = """
import asyncio, os, sys
import trinity_buffer as tb
from trinity_buffer.errors import StoreUseError

async def opened(then=lambda: None, **how):
    async with tb.open_store(sys.argv[1], **how):
        then()

def child_opens(**how):
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(opened(**how))
            print("opened", flush=True)
        except StoreUseError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)

child_opens()
for how in ({}, {"read_only": True}):
    asyncio.run(opened(lambda: child_opens(**how)))
child_opens()
"""


@pytest.mark.long
def test_a_child_opens_no_file_that_was_open_when_it_was_forked(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_AND_OPEN, str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    first, *refused, last = done.stdout.splitlines()
    assert first == last == "opened", done.stderr
    assert len(refused) == 2
    assert all("was open in process" in line and "could be lost" in line for line in refused)


@pytest.mark.long
async def test_a_write_waits_for_a_stopped_holder_of_the_lock_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 1_000)
    async with opened(str(file)) as experiment:
        holder = dbapi2.connect(str(file), isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        refused: list[str] = []

        async def write(task: int) -> None:
            with pytest.raises(StoreBusyError) as caught:
                await experiment.writer("e0").write(group(task=task))
            refused.append(str(caught.value))

        with anyio.fail_after(5):  # one by one they would wait for nine times as long as one
            async with anyio.create_task_group() as tasks:
                for task in range(8):
                    tasks.start_soon(write, task)
        holder.execute("ROLLBACK")
        holder.close()
        assert len(refused) == 8
        assert (await experiment.writer("e0").write(group())).written == 4
