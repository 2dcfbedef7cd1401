"""Writers of one SQLite file write in the order in which they came, whatever becomes of others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import anyio
import pytest

from tests.crash.forking import CONTEXT
from trinity_buffer import open_store
from trinity_buffer.store import sqlite
from trinity_buffer.store.sqlite import WriterQueue

LIMIT_S = 30.0


def live(store: Path, orders: Connection) -> None:
    """Take turns and give them back, as the test says."""
    sqlite.PATIENCE_S = 60.0
    queue = WriterQueue(store)
    while True:
        what = orders.recv()
        if what == "take":
            queue.acquire()
        elif what == "give back":
            queue.release()
        elif os.fork() == 0:
            orders.poll(None)  # until the test ends
            os._exit(0)
        orders.send(what)


class Other:
    """Another process, which takes turns and gives them back."""

    def __init__(self, store: Path) -> None:
        self.orders, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=live, args=(store, theirs), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def begin(self, what: str) -> None:
        """Tell it to do something."""
        self.orders.send(what)

    def done(self) -> str:
        """Return what it has done."""
        return str(self.orders.recv())

    def do(self, what: str) -> None:
        """Have it do something."""
        self.begin(what)
        assert self.done() == what

    def stop(self) -> None:
        """Stop all of its threads."""
        os.kill(self.pid, signal.SIGSTOP)
        threads = list(Path(f"/proc/{self.pid}/task").glob("*/stat"))
        until(lambda: all(" T " in thread.read_text().rpartition(")")[2] for thread in threads))

    def go_on(self) -> None:
        """Let all of its threads go on."""
        os.kill(self.pid, signal.SIGCONT)

    def wait_in_line(self) -> None:
        """Have it wait for the turn that somebody else has."""
        self.begin("take")
        until(lambda: waits(self.pid))


def until(happened: Callable[[], bool]) -> None:
    """Return once something has happened."""
    end = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def waits(pid: int) -> bool:
    """Return whether a process waits for a lock of the kernel."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {pid} " in line for line in lines)


def stands_in(store: Path, pid: int) -> bool:
    """Return whether a process stands in the line of a store."""
    file = f":{store.with_name('run.db-wal').stat().st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return any(f" {pid} " in line and file in line for line in lines)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The path of a store, of which there is only the log."""
    (tmp_path / "run.db-wal").touch()
    return tmp_path / "run.db"


@contextmanager
def others(store: Path, number: int) -> Iterator[list[Other]]:
    """Yield so many processes."""
    every = [Other(store) for _ in range(number)]
    try:
        yield every
    finally:
        for other in every:
            other.process.kill()
            other.process.join()
            other.orders.close()


@pytest.fixture
def mine(store: Path) -> Iterator[WriterQueue]:
    """The turns of this process."""
    own = WriterQueue(store)
    yield own
    own.close()


def taken(mine: WriterQueue) -> Thread:
    """Return a thread that takes a turn, and waits for it by now."""
    thread = Thread(target=mine.acquire, daemon=True)
    thread.start()
    until(lambda: waits(os.getpid()))
    return thread


def test_turns_come_in_the_order_of_asking(store: Path) -> None:
    with others(store, 3) as (first, second, third):
        first.do("take")
        second.wait_in_line()
        third.wait_in_line()
        first.do("give back")
        assert second.done() == "take"
        until(lambda: waits(third.pid))  # it is next now
        first.wait_in_line()
        second.do("give back")
        assert third.done() == "take"
        third.do("give back")
        assert first.done() == "take"


def test_who_is_killed_in_the_line_calls_nobody_too_early(store: Path) -> None:
    with others(store, 5) as (first, second, killed, fourth, fifth):
        first.do("take")
        for other in (second, killed, fourth, fifth):
            other.wait_in_line()
        killed.process.kill()
        killed.process.join()
        until(lambda: all(waits(other.pid) for other in (second, fourth, fifth)))
        first.do("give back")
        assert second.done() == "take"
        until(lambda: all(waits(other.pid) for other in (fourth, fifth)))
        second.do("give back")
        assert fourth.done() == "take"


def test_a_turn_is_not_taken_from_who_is_slow_to_wake(store: Path) -> None:
    with others(store, 2) as (first, second):
        first.do("take")
        second.wait_in_line()
        second.stop()
        first.do("give back")
        first.wait_in_line()
        second.go_on()
        assert second.done() == "take"
        second.do("give back")
        assert first.done() == "take"


@pytest.mark.parametrize("forks", [False, True])
def test_the_turn_of_a_process_that_is_killed_is_over(
    store: Path, mine: WriterQueue, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PATIENCE_S", LIMIT_S)
    with others(store, 1) as (other,):
        other.do("take")
        if forks:
            other.do("fork")
        waiting = taken(mine)
        other.process.kill()
        waiting.join(LIMIT_S / 2)
        assert not waiting.is_alive()


def test_who_got_no_turn_in_time_goes_ahead_and_gives_back_what_comes_late(
    store: Path, mine: WriterQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PATIENCE_S", 0.01)
    with others(store, 2) as (stopped, third):
        stopped.do("take")
        stopped.stop()
        for _ in range(3):
            mine.acquire()
            mine.release()
        assert waits(os.getpid())  # one thread, however often
        stopped.go_on()
        stopped.do("give back")
        third.do("take")


def test_who_is_stopped_in_the_line_costs_the_others_their_patience_once(
    store: Path, mine: WriterQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PATIENCE_S", 0.01)
    with others(store, 2) as (first, stopped):
        first.do("take")
        stopped.wait_in_line()
        stopped.stop()
        first.do("give back")
        mine.acquire()
        mine.release()
        monkeypatch.setattr(sqlite, "PATIENCE_S", LIMIT_S)
        again = Thread(target=mine.acquire, daemon=True)
        again.start()
        again.join(LIMIT_S / 2)
        assert not again.is_alive()


def test_without_a_thread_to_wait_in_one_goes_ahead(
    store: Path, mine: WriterQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with others(store, 1) as (other,):
        other.do("take")
        with monkeypatch.context() as context:
            context.setattr(Thread, "start", too_many)
            mine.acquire()
        mine.release()
        other.do("give back")
        mine.acquire()
        other.wait_in_line()
        mine.release()
        assert other.done() == "take"


def test_what_is_closed_while_it_waits_lets_the_others_pass(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PATIENCE_S", 0.01)
    with others(store, 2) as (first, second):
        first.do("take")
        own = WriterQueue(store)
        own.acquire()
        own.close()
        first.do("give back")
        second.do("take")
        until(lambda: not waits(os.getpid()))


def test_what_is_closed_closes_its_file_once_and_takes_no_turn_any_more(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PATIENCE_S", 0.01)
    with others(store, 1) as (other,):
        other.do("take")
        own = WriterQueue(store)
        own.acquire()
        own.close()
        other.do("give back")
        until(lambda: not waits(os.getpid()))
        with store.open("wb") as somebody_elses:
            own.close()
            os.fstat(somebody_elses.fileno())
        own.acquire()
        other.do("take")


def test_a_turn_is_given_back_whoever_takes_another_meanwhile(
    store: Path, mine: WriterQueue
) -> None:
    with others(store, 2) as (other, later):
        mine.acquire()
        other.wait_in_line()
        mine.acquire()  # the caller of the first write was cancelled, and the write goes on
        mine.release()
        mine.release()
        assert other.done() == "take"
        other.do("give back")
        later.begin("take")
        until(lambda: stands_in(store, later.pid))
        assert not waits(later.pid)


def test_without_a_log_nobody_waits(tmp_path: Path) -> None:
    own = WriterQueue(tmp_path / "run.db")
    own.acquire()
    own.release()
    own.close()
    own.close()


async def test_a_write_waits_for_its_turn_and_gives_it_back(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "PATIENCE_S", LIMIT_S)
    file = Path(sqlite_url.removeprefix("sqlite:///"))
    async with open_store(sqlite_url) as store:
        await store.experiment("run", config={})
        with others(file, 1) as (other,):
            await anyio.to_thread.run_sync(other.do, "take")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(store.experiment, "another", config={}))
                await anyio.to_thread.run_sync(until, lambda: waits(os.getpid()))
                assert "another" not in await store.experiments()  # reading waits for nobody
                await anyio.to_thread.run_sync(other.do, "give back")
            assert "another" in await store.experiments()
            await anyio.to_thread.run_sync(other.do, "take")
