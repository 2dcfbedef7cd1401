"""Checkpoints that a thread writes beside the training: each commit follows its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file

import trinity_buffer as tb
from tests.trainer.data import policy, prepared
from tests.trainer.gradients import train
from tests.trainer.qwen import qwen3
from tests.whole_stores import digest_of
from trinity_buffer import open_store, verify
from trinity_buffer.algorithm import build
from trinity_buffer.errors import CheckpointError
from trinity_buffer.events import StepsCommitted
from trinity_buffer.trainer import checkpoint, parallel
from trinity_buffer.trainer.checkpoint import PendingCheckpoint
from trinity_buffer.trainer.parallel import write_share


def made(url: str) -> Any:
    algorithm = build("grpo")
    anyio.run(prepared, url, algorithm)
    return algorithm


async def committed(url: str, consumer: str) -> list[tuple[int, str, str]]:
    """Return step, checkpoint and digest of each commit, once `verify` finds nothing wrong."""
    found = []
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment("run")
        async for event in experiment.events(kinds=["StepsCommitted"]):
            fact = event.fact
            assert isinstance(fact, StepsCommitted)
            if fact.consumer == consumer:
                found.append((fact.steps[-1], fact.checkpoint or "", fact.checkpoint_digest or ""))
        report = await verify(experiment, checkpoint=Path(found[-1][1]), consumer=consumer)
    assert report.ok, report
    return found


def test_it_trains_the_same_bits_and_commits_each_step(sqlite_url: str, tmp_path: Path) -> None:
    algorithm = made(sqlite_url)
    settings: dict[str, Any] = {"max_steps": 3, "keep_checkpoints": None}
    beside, reports = train(
        sqlite_url, algorithm, tmp_path / "a", consumer="beside", async_checkpoints=True, **settings
    )
    at_once, _ = train(sqlite_url, algorithm, tmp_path / "b", consumer="at once", **settings)
    assert [report.committed for report in reports] == [False] * 3  # begun, that is
    for name, weight in at_once.policy.state_dict().items():
        assert torch.equal(weight, beside.policy.state_dict()[name]), name
    found, wanted = (anyio.run(committed, sqlite_url, name) for name in ("beside", "at once"))
    assert [step for step, _, _ in found] == [step for step, _, _ in wanted] == [1, 2, 3]
    for (_, folder, digest), (_, other, _) in zip(found, wanted, strict=True):
        assert digest_of(Path(folder)) == digest
        for name in ("policy.safetensors", "optimizer.safetensors"):
            # As they were after that step, however far the training was when they were written.
            kept, expected = load_file(Path(folder) / name), load_file(Path(other) / name)
            assert kept.keys() == expected.keys()
            assert all(torch.equal(kept[key], expected[key]) for key in kept), name


def test_a_model_of_transformers_is_copied_and_replays(sqlite_url: str, tmp_path: Path) -> None:
    made(sqlite_url)

    def trainer_on(stream: Any, folder: Path, *, beside: bool) -> tb.Trainer:
        settings = tb.TrainerSettings(
            checkpoints=folder, async_checkpoints=beside, keep_checkpoints=None
        )
        return tb.Trainer(stream, qwen3(), build("grpo"), settings)

    torch.set_num_threads(1)
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", consumer="t", groups_per_step=2
    ) as stream:
        first = trainer_on(stream, tmp_path / "c", beside=True)
        first.run()
    (*_, (_, folder, _)) = anyio.run(committed, sqlite_url, "t")
    assert sorted(file.name for file in (Path(folder) / "policy").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    with tb.open_replay_stream(sqlite_url, experiment="run", consumer="t") as recorded:
        again = trainer_on(recorded, tmp_path / "d", beside=False)
        again.run()
    for name, weight in first.policy.model.state_dict().items():
        assert torch.equal(weight, again.policy.model.state_dict()[name]), name


def test_the_next_step_is_trained_while_the_disk_is_slow(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, may, begun, finish = (
        made(sqlite_url),
        threading.Event(),
        [],
        PendingCheckpoint.finish,
    )

    def slow(what: PendingCheckpoint) -> dict[Path, str]:
        begun.append(what.folder.name)
        assert may.wait(60)
        return finish(what)

    def trained(step: int) -> dict[str, float]:
        if step == 2:  # trained, while nothing of step 1 is committed
            assert begun == ["step-00000001"]
            assert anyio.run(commits_of, sqlite_url) == []
            may.set()
        return {}

    monkeypatch.setattr(PendingCheckpoint, "finish", slow)
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", consumer="t", groups_per_step=2
    ) as stream:
        settings = tb.TrainerSettings(
            checkpoints=tmp_path / "c", async_checkpoints=True, keep_checkpoints=None
        )
        tb.Trainer(stream, policy(), algorithm, settings).run(measure=trained)
    assert anyio.run(commits_of, sqlite_url) == [1, 2, 3]
    monkeypatch.undo()
    train(sqlite_url, algorithm, tmp_path / "d", max_steps=1, consumer="at once")
    for name in ("policy.safetensors", "optimizer.safetensors"):  # step 1, though 2 was trained
        found, wanted = (load_file(tmp_path / x / "step-00000001" / name) for x in "cd")
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name


async def commits_of(url: str) -> list[int]:
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment("run")
        facts = [event.fact async for event in experiment.events(kinds=["StepsCommitted"])]
    return [fact.steps[-1] for fact in facts if isinstance(fact, StepsCommitted)]


def test_what_cannot_be_written_ends_the_training_and_is_not_committed(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = made(sqlite_url)
    written: list[Path] = []

    def full(folder: Path, *rest: Any) -> list[Path]:
        written.append(folder)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        return write_share(folder, *rest)

    monkeypatch.setattr(parallel, "write_share", full)
    settings: dict[str, Any] = {"consumer": "t", "async_checkpoints": True}
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left on device"):
        train(sqlite_url, algorithm, tmp_path / "c", max_steps=3, **settings)
    assert anyio.run(commits_of, sqlite_url) == [1]
    assert [folder.name for folder in (tmp_path / "c").iterdir()] == ["step-00000001"]
    monkeypatch.undo()
    resumed, _ = train(sqlite_url, algorithm, tmp_path / "c", max_steps=3, **settings)
    assert resumed.state.step == 3
    assert [step for step, _, _ in anyio.run(committed, sqlite_url, "t")] == [1, 2, 3]


def test_a_checkpoint_that_fails_ends_a_wait_for_more_rows(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explorers may wait for the policy that it would have published, and nobody would end."""
    algorithm = made(sqlite_url)

    def full(*_: Any) -> list[Path]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parallel, "write_share", full)
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", groups_per_step=6, follow=True
    ) as stream:
        settings = tb.TrainerSettings(checkpoints=tmp_path / "c", async_checkpoints=True)
        trainer = tb.Trainer(stream, policy(), algorithm, settings)
        with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left on device"):
            trainer.run()  # the one step that there is rows for, and then it waits


def test_ctrl_c_in_the_wait_for_a_checkpoint_leaves_nobody_writing(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, ended = made(sqlite_url), list[list[Path]]()
    presses = iter([KeyboardInterrupt])

    def slow(*args: Any) -> list[Path]:
        time.sleep(0.3)
        files = write_share(*args)
        ended.append(files)
        return files

    def pressed(futures: Any) -> Any:
        for press in presses:
            raise press
        return wait(futures)

    monkeypatch.setattr(parallel, "write_share", slow)
    monkeypatch.setattr(checkpoint, "wait", pressed)
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", consumer="t", groups_per_step=2
    ) as stream:
        settings = tb.TrainerSettings(checkpoints=tmp_path / "c", async_checkpoints=True)
        with pytest.raises(KeyboardInterrupt):
            tb.Trainer(stream, policy(), algorithm, settings).run()
        assert ended  # before the trainer let go of the memory that is written
    assert anyio.run(commits_of, sqlite_url) == [1]


def test_a_trainer_runs_again(sqlite_url: str, tmp_path: Path) -> None:
    algorithm = made(sqlite_url)
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", consumer="t", groups_per_step=2
    ) as stream:
        settings = tb.TrainerSettings(checkpoints=tmp_path / "c", async_checkpoints=True)
        trainer = tb.Trainer(stream, policy(), algorithm, settings)
        trainer.run(lambda report: report.step == 1)
        assert anyio.run(commits_of, sqlite_url) == [1]
        trainer.run()
    assert anyio.run(commits_of, sqlite_url) == [1, 2, 3]


def test_a_folder_that_goes_while_a_thread_writes_is_named(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = made(sqlite_url)

    def removed_before(folder: Path, *rest: Any) -> list[Path]:
        shutil.rmtree(folder)  # as `remove_old` of who took over does
        return write_share(folder, *rest)

    monkeypatch.setattr(parallel, "write_share", removed_before)
    with pytest.raises(CheckpointError, match="step-00000001 was removed while it was written"):
        train(sqlite_url, algorithm, tmp_path / "c", max_steps=1, async_checkpoints=True)


def test_a_checkpoint_for_which_no_thread_began_is_written_once(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, begun, written = made(sqlite_url), list[str](), list[str]()
    start, finish = threading.Thread.start, PendingCheckpoint.finish

    def started(thread: threading.Thread) -> None:
        if thread.name.startswith("checkpoint"):
            begun.append(thread.name)
            if len(begun) == 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    def finished(pending: PendingCheckpoint) -> dict[Path, str]:
        written.append(pending.folder.name)
        return finish(pending)

    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr(PendingCheckpoint, "finish", finished)
    settings: dict[str, Any] = {"max_steps": 3, "keep_checkpoints": None}
    train(sqlite_url, algorithm, tmp_path / "c", async_checkpoints=True, **settings)
    assert written == [f"step-{step:08d}" for step in (1, 2, 3)]
    assert anyio.run(commits_of, sqlite_url) == [1, 2, 3]


AFTER_THE_MAIN_THREAD = """
import sys, threading
from pathlib import Path
import trinity_buffer as tb
from tests.trainer.data import policy
from trinity_buffer.algorithm import build

def train(begun):
    def report(step):
        begun.set()
        threading.main_thread().join()  # after which Python starts no work in pools of threads

    with tb.open_train_stream(
        sys.argv[1], experiment="run", strategy="grpo", consumer="t", groups_per_step=2
    ) as stream:
        beside = sys.argv[3] == "True"
        settings = tb.TrainerSettings(checkpoints=Path(sys.argv[2]), async_checkpoints=beside)
        tb.Trainer(stream, policy(), build("grpo"), settings).run(report)

begun = threading.Event()
threading.Thread(target=train, args=[begun]).start()
begun.wait()
"""


@pytest.mark.long  # a process of its own
@pytest.mark.parametrize("beside", [False, True])
def test_a_trainer_in_a_thread_goes_on_when_the_main_thread_has_ended(
    sqlite_url: str, tmp_path: Path, *, beside: bool
) -> None:
    made(sqlite_url)
    command = [sys.executable, "-c", AFTER_THE_MAIN_THREAD, sqlite_url, str(tmp_path / "c")]
    done = subprocess.run(
        [*command, str(beside)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert anyio.run(commits_of, sqlite_url) == [1, 2, 3], done.stderr
