"""A DataLoader over the stream: each step once, in this process and through a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch.utils.data import DataLoader

import trinity_buffer as tb
from tests.handles import SyncTrainStream, TrainStep
from trinity_buffer.errors import InvalidArgumentError, StoreError, TrinityBufferError
from trinity_buffer.events import StepsCommitted
from trinity_buffer.integrations.torch_data import StepDataset

GROUPS, RUNS = 6, 2


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return a store of six groups, annotated."""
    found = f"sqlite:///{tmp_path}/run.db"

    async def record() -> None:
        async with tb.open_store(found) as store:
            experiment = await store.experiment("run", config={"rollouts_per_group": RUNS})
            rows = [
                tb.Experience(
                    eid=tb.EID("b0", task, run, 0),
                    tokens=torch.arange(5 + task),
                    prompt_length=2,
                    logprobs=torch.full((3 + task,), -1.0),
                    reward=float(run),
                )
                for task in range(GROUPS)
                for run in range(RUNS)
            ]
            await experiment.writer(actor="explorer-0").write(rows)
            await tb.run_strategy(experiment, "grpo")

    anyio.run(record)
    return found


def dataset(url: str, **options: Any) -> StepDataset:
    return StepDataset(url, experiment="run", strategy="grpo", lease_ttl_s=2, **options)


def loaded(steps: StepDataset, workers: int) -> Iterator[TrainStep]:
    return iter(DataLoader(steps, batch_size=None, num_workers=workers))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_steps_that_were_not_committed_come_again_and_no_others(url: str, workers: int) -> None:
    steps = dataset(url)
    reader = loaded(steps, workers)
    first = next(reader)
    second = next(reader)
    steps.commit(first)
    assert steps.state_dict() == {"step": 1}
    del reader
    again = [(step.step, step.manifest.experiences) for step in loaded(dataset(url), workers)]
    assert again[0] == (2, second.manifest.experiences)
    assert [step for step, _ in again] == [2, 3, 4, 5, 6]
    rows = [row for _, chosen in again for row in chosen]
    assert len(set(rows)) == len(rows) == (GROUPS - 1) * RUNS


@pytest.mark.long
def test_a_worker_hands_over_the_tensors_and_commits_the_last_step(url: str) -> None:
    with tb.open_train_stream(url, experiment="run", strategy="grpo") as stream:
        expected = [step.microbatches[0]["input_ids"] for step in stream]
    steps = dataset(url)
    for step, ids in zip(loaded(steps, workers=1), expected, strict=True):
        assert torch.equal(step.microbatches[0]["input_ids"], ids)
        batch = step.microbatches[0]
        assert batch["old_logprob"] is batch["rollout_logprob"]
        steps.commit(step)
    assert steps.state_dict() == {"step": GROUPS}
    assert list(loaded(dataset(url), workers=0)) == []


LEFT_OPEN = """
import sys
import trinity_buffer as tb
from torch.utils.data import DataLoader
from trinity_buffer.integrations.torch_data import StepDataset

steps = StepDataset(sys.argv[1], experiment="run", strategy="grpo")
reader = iter(DataLoader(steps, batch_size=None))
print(next(reader).step)
"""


def test_a_process_ends_whose_loop_is_not_through(url: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LEFT_OPEN, url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")


def test_a_pass_that_begins_ends_the_one_before(url: str) -> None:
    """An error in a notebook keeps the iterator of the loop that it left."""
    steps = dataset(url, wait_for_lease=False)
    left = loaded(steps, workers=0)
    assert next(left).step == 1
    reader = loaded(steps, workers=0)
    steps.commit(next(reader))
    assert list(left) == []
    steps.commit(next(reader))
    assert steps.state_dict() == {"step": 2}


@pytest.mark.parametrize("workers", [0, 1])
def test_explorers_get_the_weights_of_what_is_committed(
    url: str, tmp_path: Path, workers: int
) -> None:
    steps = dataset(url)
    reader = loaded(steps, workers)
    steps.commit(next(reader), checkpoint(tmp_path, 1))
    steps.commit(next(reader), checkpoint(tmp_path, 2), policy=False)
    steps.commit(next(reader), saved := checkpoint(tmp_path, 3))
    del reader
    assert published(url) == [(1, str(tmp_path / "step-1")), (3, str(saved))]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_commit_records_the_settings_of_the_process_that_trains(url: str, workers: int) -> None:
    before, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    steps = dataset(url)
    try:
        reader = loaded(steps, workers)
        step = next(reader)
        torch.set_num_threads(before + 1)  # a worker has one
        torch.set_float32_matmul_precision("medium")
        steps.commit(step)
        del reader
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(precision)
    with tb.open_train_stream(url, experiment="run", strategy="grpo") as stream:
        assert stream.resume is not None
        environment = stream.resume.environment
    assert (environment["threads"], environment["matmul_precision"]) == (before + 1, "medium")


def published(url: str) -> list[tuple[int, str]]:
    """Return the policies that explorers are offered: version and place."""

    async def look() -> list[tuple[int, str]]:
        async with tb.open_store(url) as store:
            events = (await store.experiment("run")).events(kinds=["PolicyPublished"])
            return [(e.body["version"], e.body["uri"]) async for e in events]

    return anyio.run(look)


def test_a_state_leads_back_to_where_its_checkpoint_was_made(url: str, tmp_path: Path) -> None:
    steps = dataset(url)
    reader = loaded(steps, workers=0)
    states = []
    for number in (1, 2, 3):
        steps.commit(next(reader), checkpoint(tmp_path, number))
        states.append(steps.state_dict())
    del reader
    back = dataset(url)
    back.load_state_dict(states[1])
    assert next(loaded(back, workers=0)).step == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_before_the_first_commit_is_that_of_the_weights(
    url: str, tmp_path: Path, workers: int
) -> None:
    states = [dataset(url).state_dict()]
    for number in (1, 2):
        steps = dataset(url)
        reader = loaded(steps, workers)
        step = next(reader)
        states.append(steps.state_dict())
        steps.commit(step, checkpoint(tmp_path, number))
        del reader
    assert states == [{"step": None}, {"step": 0}, {"step": 1}]
    back = dataset(url)
    back.load_state_dict(states[-1])
    assert next(loaded(back, workers=0)).step == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_only_the_first_pass_goes_back_to_a_state(url: str, tmp_path: Path, workers: int) -> None:
    """A later pass would supersede what was committed since, and train it again."""
    steps = dataset(url)
    reader = loaded(steps, workers=0)
    steps.commit(next(reader), checkpoint(tmp_path, 1))
    state = steps.state_dict()
    steps.commit(next(reader), checkpoint(tmp_path, 2))
    del reader
    back = dataset(url)
    back.load_state_dict(state)
    for number in (2, 3):
        reader = loaded(back, workers)
        step = next(reader)
        assert step.step == number
        back.commit(step, checkpoint(tmp_path, 10 + number))
        del reader


def test_a_worker_that_stays_begins_its_next_pass_after_the_last_commit(
    url: str, tmp_path: Path
) -> None:
    steps = dataset(url, wait_for_lease=False)
    loader = DataLoader(steps, batch_size=None, num_workers=1, persistent_workers=True)
    first = list(islice(loader, 3))
    for number in (0, 1):
        steps.commit(first[number], checkpoint(tmp_path, number))
    states = [steps.state_dict()]
    again = []
    for step in loader:
        again.append(step.step)
        steps.commit(step, checkpoint(tmp_path, step.step))
    assert again == [3, 4, 5, 6]
    assert list(loader) == []
    steps.load_state_dict(states[0])
    assert [step.step for step in loader] == [3, 4, 5, 6]
    steps.commit(step, checkpoint(tmp_path, 7))  # behind the loop
    assert steps.state_dict() == {"step": 6}


def checkpoint(folder: Path, number: int) -> Path:
    """Return a folder with other weights for each number."""
    made = folder / f"step-{number}"
    made.mkdir()
    (made / "weights").write_text(str(number))
    return made


def test_a_commit_that_no_process_can_make_says_so(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = dataset(url)
    step = next(loaded(steps, workers=0))
    monkeypatch.setattr("trinity_buffer.integrations.torch_data.COMMIT_S", 0.01)
    with pytest.raises(StoreError, match="commit while the loader is being read"):
        steps.commit(step)


def committed(url: str) -> tuple[int, list[str | None]]:
    """Return the last committed step, and the names of the checkpoints of all commits."""

    async def asked() -> tuple[int, list[str | None]]:
        async with tb.open_store(url) as store:
            experiment = await store.experiment("run")
            facts = [one.fact async for one in experiment.events(kinds=("StepsCommitted",))]
            paths = [one.checkpoint for one in facts if isinstance(one, StepsCommitted)]
            return await experiment.committed_step("trainer"), [p and Path(p).name for p in paths]

    return anyio.run(asked)


def test_a_commit_that_came_too_late_answers_no_other(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = dataset(url)
    reader: Any = loaded(steps, workers=1)
    first, second = next(reader), next(reader)
    worker = reader._workers[0].pid
    os.kill(worker, signal.SIGSTOP)
    os.waitpid(worker, os.WUNTRACED)  # until then some of its threads may go on
    with monkeypatch.context() as context:
        context.setattr("trinity_buffer.integrations.torch_data.COMMIT_S", 0.1)
        with pytest.raises(StoreError, match="the same step again"):
            steps.commit(first, checkpoint(tmp_path, 1))
    os.kill(worker, signal.SIGCONT)
    with pytest.raises(StoreError, match="not-there"):
        steps.commit(second, tmp_path / "not-there")
    assert committed(url) == (0, [])
    steps.commit(first, tmp_path / "step-1")
    steps.commit(second, checkpoint(tmp_path, 2))
    assert committed(url) == (2, ["step-1", "step-2"])


@pytest.mark.long
def test_a_commit_that_was_stored_after_its_time_is_done_when_asked_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any, **named: Any) -> None:
        time.sleep(1.0)
        usual(*args, **named)

    usual = SyncTrainStream.commit
    monkeypatch.setattr(SyncTrainStream, "commit", slow)  # of the worker, which is forked
    steps = dataset(url)
    reader = loaded(steps, workers=1)
    first, second = next(reader), next(reader)
    with monkeypatch.context() as context:
        context.setattr("trinity_buffer.integrations.torch_data.COMMIT_S", 0.3)
        with pytest.raises(StoreError, match="the same step again"):
            steps.commit(first, checkpoint(tmp_path, 1))
    steps.commit(first, tmp_path / "step-1")
    with pytest.raises(StoreError, match="not-there"):
        steps.commit(second, tmp_path / "not-there")
    assert committed(url) == (1, ["step-1"])
    assert steps.state_dict() == {"step": 1}


def test_a_new_worker_does_not_do_what_a_dead_one_was_asked(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = dataset(url)
    reader: Any = loaded(steps, workers=1)
    first = next(reader)
    worker = reader._workers[0]
    worker.kill()
    worker.join()
    with monkeypatch.context() as context:
        context.setattr("trinity_buffer.integrations.torch_data.COMMIT_S", 0.1)
        with pytest.raises(StoreError, match="no worker answered"):
            steps.commit(first, checkpoint(tmp_path, 10))
    with suppress(RuntimeError):  # of the loader, whose worker was killed
        del reader
    again = loaded(steps, workers=1)
    first, second = next(again), next(again)
    steps.commit(first, checkpoint(tmp_path, 1))
    with pytest.raises(StoreError, match="not-there"):
        steps.commit(second, tmp_path / "not-there")
    assert committed(url) == (1, ["step-1"])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_checkpoint_that_comes_after_a_later_one_is_refused(
    url: str, tmp_path: Path, workers: int
) -> None:
    steps = dataset(url)
    reader = loaded(steps, workers)
    first, second = next(reader), next(reader)
    steps.commit(second, saved := checkpoint(tmp_path, 2))
    steps.commit(second, saved)
    with pytest.raises(TrinityBufferError, match="committed already"):
        steps.commit(first, checkpoint(tmp_path, 1))
    steps.commit(first)
    assert steps.state_dict() == {"step": 2}
    assert committed(url) == (2, ["step-2"])


def test_a_worker_keeps_no_tensors_of_the_steps_that_it_handed_out(url: str) -> None:
    def files() -> int:
        return len(list(Path(f"/proc/{reader._workers[0].pid}/fd").iterdir()))

    reader: Any = loaded(dataset(url), workers=1)
    next(reader)
    before = files()
    for _ in range(GROUPS - 1):
        next(reader)
    assert files() < before + GROUPS


def test_a_state_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="state_dict"):
        dataset(url).load_state_dict({"epoch": 1})


@pytest.mark.long
@pytest.mark.parametrize("how", ["spawn", "forkserver"])
@pytest.mark.parametrize("stays", [False, True])
def test_a_worker_may_be_a_process_of_its_own_making(
    url: str, tmp_path: Path, how: str, *, stays: bool
) -> None:
    """A process that has used a GPU cannot be forked."""
    steps = dataset(url)
    loader: Any = DataLoader(
        steps, batch_size=None, num_workers=1, multiprocessing_context=how, persistent_workers=stays
    )
    reader = iter(loader)
    steps.commit(next(reader), checkpoint(tmp_path, 1))
    steps.commit(next(reader), checkpoint(tmp_path, 2))
    del reader
    seen = []
    for step in loader:
        seen.append(step.step)
        steps.commit(step)
    assert seen == [3, 4, 5, 6]
