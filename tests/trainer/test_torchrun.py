"""`torchrun ... trinity-buffer train`: one trainer of several ranks, which may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import trinity_buffer as tb
from tests.cli.test_option_matrix import SMALL, words_of
from tests.crash.forking import as_module, said_by
from tests.planted_faults.scenes import nothing_is_wrong
from tests.trainer.data import policy, recorded, rollouts
from tests.warm_python import process_of
from trinity_buffer import open_store, run_strategy, verify
from trinity_buffer.algorithm import build
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import StepsCommitted

ROOT = Path(__file__).parents[2]
STEPS = 4
RANKS = {**SMALL, "max_steps": STEPS, "groups_per_batch": 2 * STEPS, "evaluation.every_steps": 2}
"""A run of which each step has two groups: one for each rank."""

LIMIT_S = 100


def torchrun(python: str, url: str, checkpoints: Path, *words: str) -> subprocess.Popen[str]:
    """Start two ranks of ``trinity-buffer train``."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", *words, "-m", "trinity_buffer", "train", "--store", url]
    command += ["--checkpoints", str(checkpoints), "--keep-checkpoints", "all"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leave no process behind."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its ranks, whose sessions are their own
        process.communicate()


def made(url: str, folder: Path) -> None:
    """Record and annotate what the ranks train on."""
    for words in (
        ["explore", "--store", url, "--actor", "e0", "--batches", "1", *words_of(RANKS)],
        ["annotate", "--store", url],
    ):
        (said,) = said_by(as_module, [["trinity_buffer", *words]], folder)
        assert said.startswith("0: "), said


async def commits(url: str) -> list[StepsCommitted]:
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment("run")
        kinds = ("StepsCommitted",)
        facts = [event.fact async for event in experiment.events(kinds=kinds)]
    return [fact for fact in facts if isinstance(fact, StepsCommitted)]


async def verified(url: str, checkpoint: Path) -> None:
    async with open_store(url) as store:
        nothing_is_wrong(await verify(await store.experiment("run"), checkpoint=checkpoint))


def last(checkpoints: Path) -> Path:
    return max(checkpoints.glob("step-*"))


@pytest.mark.long
def test_each_process_of_torchrun_trains_its_part(
    warm_python: str, store_url: str, tmp_path: Path
) -> None:
    made(store_url, tmp_path)
    process = torchrun(warm_python, store_url, tmp_path)
    with ended(process):
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, said
    assert said.count("trains run as trainer, 2 ranks: begins") == 1
    found = anyio.run(commits, store_url)
    assert [fact.steps for fact in found] == [[1], [2], [3], [4]]
    assert [fact.rows_by_rank for fact in found] == [[[4, 4]]] * STEPS
    assert [("accuracy" in fact.metrics) for fact in found] == [False, True, False, True]
    anyio.run(verified, store_url, last(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_no_data(
    warm_python: str, store_url: str, tmp_path: Path, rank: int
) -> None:
    """torchrun starts all ranks again, and they go on from the last commit."""
    made(store_url, tmp_path)
    process = torchrun(warm_python, store_url, tmp_path, "--max-restarts", "1")

    async def kill_after_the_first_commit() -> None:
        async with open_store(store_url, read_only=True) as store:
            experiment = await store.experiment("run")
            async for _ in experiment.events(follow=True, kinds=("StepsCommitted",)):
                break
        ranks = ranks_of(process_of(process.pid))
        (program,) = [pid for pid, of in ranks.items() if of == rank]
        os.kill(process_of(program), signal.SIGKILL)

    with ended(process):
        anyio.run(kill_after_the_first_commit)
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, said
    found = anyio.run(commits, store_url)
    assert [step for fact in found for step in fact.steps] == [1, 2, 3, 4]
    assert [fact.rows_by_rank for fact in found] == [[[4, 4]]] * STEPS
    anyio.run(verified, store_url, last(tmp_path))


def ranks_of(parent: int) -> dict[int, int]:
    """Return process number -> rank of the children of a process."""
    found: dict[int, int] = {}
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks = [word.removeprefix(b"RANK=") for word in told if word.startswith(b"RANK=")]
        found |= {int(pid): int(rank) for rank in ranks}
    return found


@pytest.mark.long
def test_ranks_that_cannot_meet_are_refused(warm_python: str, tmp_path: Path) -> None:
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "1", "PYTHONPATH": str(ROOT)}
    url = f"sqlite:///{tmp_path / 'run.db'}"
    anyio.run(filled, url)
    command = [warm_python, "-m", "trinity_buffer", "train", "--store", url]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 2
    assert "WORLD_SIZE=2 without MASTER_ADDR, MASTER_PORT: start several ranks" in done.stderr


async def filled(url: str) -> None:
    async with open_store(url) as store:
        await run_strategy(await recorded(store, "run", "experience", rollouts()), "grpo")


OPTIONS: dict[str, Any] = {"experiment": "run", "strategy": "grpo"}


def test_a_stream_that_was_not_told_its_rank_is_refused_among_several(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    anyio.run(filled, sqlite_url)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(InvalidArgumentError, match=r"rank 1 of 2 .*give rank=1, world_size=2"),
        tb.open_train_stream(sqlite_url, **OPTIONS),
    ):
        pass
    with tb.open_train_stream(sqlite_url, **OPTIONS, rank=0, world_size=1) as stream:
        assert next(stream).rows
    monkeypatch.setenv("WORLD_SIZE", "1")
    with tb.open_train_stream(sqlite_url, **OPTIONS) as stream:
        assert next(stream).rows


def test_a_trainer_whose_gradients_would_be_of_a_part_is_refused(
    sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(filled, sqlite_url)

    def train(rank: int) -> None:
        with tb.open_train_stream(sqlite_url, **OPTIONS, rank=rank, world_size=2) as stream:
            settings = tb.TrainerSettings(checkpoints=tmp_path)
            tb.Trainer(stream, policy(), build("grpo"), settings)

    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(train, rank) for rank in range(2)]
        for rank, found in enumerate(ranks):
            error = found.exception(LIMIT_S)
            assert isinstance(error, InvalidArgumentError)
            told = "rank 0 of 1 in torch.distributed, and its stream was opened as"
            assert f"{told} rank {rank} of 2" in str(error)
