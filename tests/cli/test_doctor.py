"""What is stuck, since when, and what would move it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cli.calling import Cli
from tests.conftest import Resize
from tests.contract.making import group, living, opened, rollout
from tests.raw_store import note_presence, now_us, sql, take_lease, this_host
from tests.sample_run import record_sample_run
from trinity_buffer import open_store, run_strategy
from trinity_buffer.store.connection import open_database


def bury(url: str) -> None:
    """Let everybody who is present be a process that has ended."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    async def write() -> None:
        async with open_database(url) as database:
            await database.write(sql("UPDATE presence SET pid = :pid", pid=gone.pid))

    anyio.run(write)


def stuck(cli: Cli, url: str) -> list[dict[str, Any]]:
    """Return what `doctor` finds."""
    told = cli("doctor", "--store", url, "--json")
    (found,) = told.json
    assert told.code == (1 if found["stuck"] else 0)
    return list(found["stuck"])


def test_a_run_whose_processes_are_gone_says_who_would_move_it(
    cli: Cli, store_url: str, tmp_path: Path
) -> None:
    sample = anyio.run(record_sample_run, store_url, tmp_path / "run")
    assert "no process trains as 'trainer'" in cli("doctor", "--store", sample.url).out
    bury(store_url)
    found = {one["what"]: one for one in stuck(cli, store_url)}
    lack = found["1 group of batch b1 lacks 3 runs, no seal"]
    assert lack["remedy"].startswith("start explorer 'e0' again")
    assert lack["since"] > 1.7e9
    handed = found[
        "no process trains as 'trainer': 1 step handed out and not committed, from step 3 on"
    ]
    assert "start trainer 'trainer' again (`trinity-buffer train --follow`)" in handed["remedy"]
    assert found["no process trains as 'trainer': 4 rows of set 'grpo' ready"]["since"] > 1.7e9
    told = cli("doctor", "--store", store_url)
    assert "no process is running" in told.out
    assert "stuck: experiment sort: 1 group of batch b1 lacks 3 runs, no seal, since 20" in told.out


def test_the_remedy_for_a_trainer_of_another_name_starts_that_one(
    cli: Cli, new_sqlite_url: str
) -> None:
    async def write() -> None:
        async with opened(new_sqlite_url, rollouts_per_group=4) as experiment:
            await experiment.writer("e0").write(group())
            await run_strategy(experiment, "grpo")
            for name in ("trainer", "my own"):
                async with experiment.train_stream(strategy="grpo", consumer=name):
                    pass

    anyio.run(write)
    remedies = {one["what"]: one["remedy"] for one in stuck(cli, new_sqlite_url)}
    command = "`trinity-buffer train --follow"
    (own,) = (told for what, told in remedies.items() if "trains as 'my own'" in what)
    assert own == f"start trainer 'my own' again ({command} --set 'trainer=my own'`)"
    (first,) = (told for what, told in remedies.items() if "trains as 'trainer'" in what)
    assert first == f"start trainer 'trainer' again ({command}`)"


def test_another_explorer_brings_nothing_of_one_that_is_gone(cli: Cli, new_sqlite_url: str) -> None:
    async def main() -> list[dict[str, Any]]:
        async with opened(new_sqlite_url) as experiment:
            await experiment.writer("e0").plan("b", [0], 2)
            await anyio.to_thread.run_sync(bury, new_sqlite_url)
            async with living(experiment, "e1"):
                return await anyio.to_thread.run_sync(stuck, cli, new_sqlite_url)

    (found,) = anyio.run(main)
    assert found["what"] == "1 group of batch b lacks 2 runs, no seal"
    assert found["remedy"] == (
        "start explorer 'e0' again, or another one with --take-over, which generates what is "
        "missing; or seal the batch as it is "
        "(`trinity-buffer seal b`)"
    )


def test_a_trainer_that_publishes_no_weights_is_named(
    cli: Cli, new_sqlite_url: str, tmp_path: Path
) -> None:
    async def train(steps: int, *, publishes: bool) -> None:
        async with opened(new_sqlite_url, max_staleness=1, rollouts_per_group=4) as experiment:
            for step in range(steps):
                batch = f"{publishes}{step}"
                await experiment.writer("e0").write(group(batch=batch))
                await run_strategy(experiment, "grpo")
                async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
                    (weights := tmp_path / batch).write_text("w")
                    await stream.commit(await anext(stream), weights, None if publishes else False)

    anyio.run(partial(train, 2, publishes=False))
    (found,) = stuck(cli, new_sqlite_url)
    assert found["what"] == (
        "trainer 'trainer' has committed step 2, and the newest published weights are those of "
        "version 0, so that max_staleness=1 cannot hold; the newest rollout was made with version 0"
    )
    assert found["since"] > 1.7e9
    assert found["remedy"].startswith("commit(step, checkpoint=PATH) publishes the checkpoint")
    anyio.run(partial(train, 1, publishes=True))
    assert stuck(cli, new_sqlite_url) == []


def test_a_trainer_that_waits_for_a_set_is_stuck_since_it_began(
    cli: Cli, new_sqlite_url: str
) -> None:
    began = 1_800_000_000_000_000

    async def write() -> None:
        async with opened(new_sqlite_url) as experiment:
            await note_presence(
                *(experiment, "trainer", "t", os.getpid()),
                started_at=began,
                waiting_for="trainer 't' waits: no set",
            )

    anyio.run(write)
    assert stuck(cli, new_sqlite_url) == [
        {
            "experiment": "run",
            "what": "trainer 't' waits: no set",
            "since": began / 1e6,
            "remedy": "annotate a set of this name, or start the trainer on one that is there",
        }
    ]


async def _written(url: str, *, annotated: bool) -> None:
    async with opened(url, rollouts_per_group=4) as experiment:
        if annotated:
            await run_strategy(
                experiment, "grpo", {"epsilon": 0.1}, name="my set", on_incomplete_group="reject"
            )
        await experiment.writer("e0").write(group())


@pytest.mark.parametrize(
    ("annotated", "what"),
    [
        (False, "4 experiences recorded, and no annotation set"),
        (True, "no process annotates set 'my set': 4 experiences unseen"),
    ],
)
def test_what_nobody_annotates_is_stuck(
    cli: Cli, store_url: str, annotated: bool, what: str
) -> None:
    anyio.run(lambda: _written(store_url, annotated=annotated))
    (found,) = stuck(cli, store_url)
    assert found["what"] == what
    named = ("--name", "my set") if annotated else ()
    assert shlex.join(("trinity-buffer", "annotate", *named)) in found["remedy"]
    assert cli("annotate", "--store", store_url, *named).code == 0
    assert stuck(cli, store_url) == []


async def _finished(url: str) -> None:
    async with opened(url) as experiment:
        await experiment.writer("e0").plan("b", [0], 2)
        await experiment.finish("enough")


def test_nothing_is_stuck_in_what_is_finished(cli: Cli, store_url: str) -> None:
    anyio.run(_finished, store_url)
    told = cli("doctor", "--store", store_url)
    assert (told.code, told.out.splitlines()[-1]) == (0, "nothing is stuck")


async def _silent(url: str, role: str, ago_s: int, *, lease_s: int | None, pid: int) -> None:
    """Let a process that lives be seen last so long ago; a lease ends in ``lease_s``."""
    async with opened(url) as experiment:
        await note_presence(experiment, role, "p", pid, silent_s=ago_s, started_at=now_us())
        if lease_s is not None:
            await take_lease(experiment, "p", f"{this_host()}:{pid}:0:x", ttl_s=lease_s)


@contextmanager
def process(*, paused: bool) -> Iterator[int]:
    """Yield the number of another process that lives, and is paused or not."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        if paused:
            other.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield other.pid
        finally:
            other.kill()


@pytest.mark.parametrize(
    ("role", "ago_s", "lease_s", "paused", "is_stuck"),
    [
        ("trainer", 126, -99, False, True),
        ("trainer", 40, -5, False, True),  # its lease tells sooner
        ("trainer", 40, 20, False, False),  # in a long step, of which its lease says the rest
        ("trainer", 10, -1, False, False),  # heard of since
        ("strategy", 126, None, False, True),
        ("strategy", 110, None, False, False),
        ("strategy", 40, -5, False, True),  # it decides, or would: its lease tells sooner
        ("rank 1", 126, None, False, True),
        ("explorer", 126, None, False, False),  # a writer, which says it as it writes
        ("explorer", 126, None, True, True),
    ],
)
def test_a_process_that_is_paused_or_hangs_is_stuck(
    cli: Cli,
    new_sqlite_url: str,
    role: str,
    ago_s: int,
    lease_s: int | None,
    paused: bool,
    is_stuck: bool,
) -> None:
    with process(paused=paused) as pid:
        anyio.run(lambda: _silent(new_sqlite_url, role, ago_s, lease_s=lease_s, pid=pid))
        found = stuck(cli, new_sqlite_url)
        assert len(found) == is_stuck
        if is_stuck:
            what = rf"{role} 'p' has not been seen for \d+ s: pid {pid} on host [^#]+"
            assert re.fullmatch(what, found[0]["what"])
            assert time.time() - found[0]["since"] >= ago_s
            assert f"`kill -CONT {pid}`" in found[0]["remedy"]


def test_nobody_is_stuck_who_is_silent_in_what_is_finished(cli: Cli, new_sqlite_url: str) -> None:
    anyio.run(_finished, new_sqlite_url)
    with process(paused=True) as pid:
        anyio.run(lambda: _silent(new_sqlite_url, "trainer", 126, lease_s=-99, pid=pid))
        assert stuck(cli, new_sqlite_url) == []


@contextmanager
def reading(url: str) -> Iterator[int]:
    """Hold an old state in another process; yield its number."""
    command = [sys.executable, "-c", HOLD, url.removeprefix("sqlite:///")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        yield reader.pid
        reader.communicate("\n")


async def _with_an_expert(url: str) -> None:
    async with open_store(url) as store:
        expert = await store.experiment("expert", config={"schema": "sft"})
        await expert.writer("expert").write([rollout("s", version=None)])
        await store.experiment("run", config={"expert_experiment": "expert"})


def test_what_an_expert_recorded_waits_for_no_strategy(cli: Cli, store_url: str) -> None:
    anyio.run(_with_an_expert, store_url)
    assert stuck(cli, store_url) == []


async def _with_turns(url: str, *, finished: bool) -> None:
    async with open_store(url) as store:
        agent = await store.experiment("agent", config={})
        turns = await store.experiment("agent.turns", config={})
        made = [rollout(run=run, step=step) for run in range(3) for step in range(2)]
        await turns.writer("r0").write(made)
        await agent.writer("r0").write([rollout(run=1)])
        if finished:
            await agent.finish("enough")


def test_turns_wait_for_a_reward_and_for_no_strategy(cli: Cli, store_url: str) -> None:
    anyio.run(lambda: _with_turns(store_url, finished=False))
    of_agent, found = stuck(cli, store_url)
    assert of_agent["what"] == "1 experience recorded, and no annotation set"
    assert (found["experiment"], found["since"] > 1.7e9) == ("agent.turns", True)
    assert found["what"] == "2 rollouts of 'agent' without a reward"
    assert "POST /v1/rollouts/TASK/RUN/reward" in found["remedy"]
    anyio.run(lambda: _with_turns(store_url, finished=True))
    assert stuck(cli, store_url) == []


async def _grown(
    url: str, cli: Cli, log: pytest.LogCaptureFixture
) -> tuple[int, list[str], list[str]]:
    """Return a reader, and what `doctor` and `stats` print while it holds an old state."""
    async with opened(url) as experiment:
        with reading(url) as pid, anyio.fail_after(30):
            runs = count()
            while "write-ahead log has" not in log.text:  # said now and then, between commits
                await experiment.writer("e0").write([rollout(run=next(runs), length=4000)])
            doctor = await anyio.to_thread.run_sync(cli, "doctor", "--store", url)
            stats = await anyio.to_thread.run_sync(cli, "stats", "--store", url)
    return pid, doctor.out.splitlines(), stats.out.splitlines()


HOLD = """
import sys
from pysqlite3 import dbapi2
reader = dbapi2.connect(sys.argv[1])
reader.execute("BEGIN")
reader.execute("SELECT count(*) FROM event").fetchone()
print("holds", flush=True)
sys.stdin.readline()
"""


def test_a_log_that_a_reader_lets_grow_is_said_and_names_the_reader(
    cli: Cli, new_sqlite_url: str, resize: Resize, caplog: pytest.LogCaptureFixture
) -> None:
    resize(wal_pages_limit=16, wal_pages_per_checkpoint=1)
    pid, doctor, stats = anyio.run(_grown, new_sqlite_url, cli, caplog)
    assert any("write-ahead log has" in line and f"{pid}" in line for line in doctor), doctor
    assert any("write-ahead log has" in line for line in stats), stats
