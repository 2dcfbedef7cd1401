"""Our rollout worker under TRL's own asynchronous trainer, but for its kernel of the attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import TrainerCallback

import trinity_buffer as tb
from tests.outside.trl.on_cpu import settings, trainer_of
from tests.outside.trl.test_grpo_trainer import GROUPS, RUNS, record
from trinity_buffer import open_store, verify
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import StepsCommitted
from trinity_buffer.integrations.trl_async import StoredRollouts, samples_of
from trinity_buffer.pipeline.verify.verify import VerifyReport

PER_STEP = 4
"""Groups of a step; two micro-batches of 8 rows."""
STEPS = GROUPS // PER_STEP


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recorded") / "run.db"
    anyio.run(record, f"sqlite:///{path}")
    return path.read_bytes()


@pytest.fixture
def url(recorded: bytes, tmp_path: Path) -> str:
    (tmp_path / "run.db").write_bytes(recorded)
    return f"sqlite:///{tmp_path / 'run.db'}"


class Seen(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Notes the steps, and ends after some of them as Ctrl-C does."""

    def __init__(self, most: int = 1000) -> None:
        self.steps: list[int] = []
        self.most = most

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)
        if len(self.steps) == self.most:
            raise KeyboardInterrupt


def train(
    url: str, folder: Path, *, groups: int = PER_STEP, most: int = 1000, **changes: Any
) -> tuple[list[int], list[tuple[int, list[list[float]]]]]:
    """Train to the end of the stream; return the steps, and (group, log-probs) of each sample."""
    handed: list[Any] = []
    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", groups_per_step=groups
    ) as stream:
        args = settings(folder / "out", **changes)
        rollouts, seen = StoredRollouts(stream, args), Seen(most)
        put = rollouts.rollout_buffer.put
        rollouts.rollout_buffer.put = lambda one: (handed.append(one), put(one))[1]  # type: ignore[assignment, method-assign, func-returns-value]
        resume = None if stream.resume is None else str(stream.resume.checkpoint)
        trainer = trainer_of(rollouts, args, folder / "model", seen)
        if most < 1000:
            with pytest.raises(KeyboardInterrupt):
                trainer.train(resume_from_checkpoint=resume)
        else:
            trainer.train(resume_from_checkpoint=resume)
    return seen.steps, [(one.group_id, one.old_log_probs.tolist()) for one in handed]


async def looked_at(url: str) -> tuple[VerifyReport, list[int]]:
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment("run")
        facts = [event.fact async for event in experiment.events(kinds=["StepsCommitted"])]
        last = [fact.steps[-1] for fact in facts if isinstance(fact, StepsCommitted)]
        return await verify(experiment), last


def test_each_group_is_trained_once_and_the_training_ends_with_the_stream(
    url: str, tmp_path: Path
) -> None:
    steps, handed = train(url, tmp_path)
    assert steps == list(range(1, STEPS + 1))
    assert len(handed) == GROUPS * RUNS
    assert len({group for group, _ in handed}) == GROUPS
    report, commits = anyio.run(looked_at, url)
    assert commits == [2, 4, 6, 8, 10]
    assert (report.ok, report.trainers[-1].committed) == (True, GROUPS * RUNS)
    with pytest.raises(InvalidArgumentError, match="nothing is left to train on"):
        train(url, tmp_path)


def test_what_was_not_saved_is_handed_out_again(url: str, tmp_path: Path) -> None:
    assert train(url, tmp_path, most=5)[0] == [1, 2, 3, 4, 5]
    assert anyio.run(looked_at, url)[1] == [2, 4]
    assert train(url, tmp_path)[0] == [5, 6, 7, 8, 9, 10]
    report, commits = anyio.run(looked_at, url)
    assert commits == [2, 4, 6, 8, 10]
    assert (report.ok, report.trainers[-1].committed) == (True, GROUPS * RUNS)


def test_a_last_step_with_fewer_rows_is_trained_too(url: str, tmp_path: Path) -> None:
    """Of 24 rows, in three micro-batches; the last step has 16."""
    steps, handed = train(url, tmp_path, groups=6, gradient_accumulation_steps=3, save_steps=1)
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert sum(group >= 0 for group, _ in handed) == GROUPS * RUNS
    assert sum(group < 0 for group, _ in handed) == 8
    report, _ = anyio.run(looked_at, url)
    assert (report.ok, report.trainers[-1].committed) == (True, GROUPS * RUNS)


def test_samples_are_the_rows_of_the_step(url: str) -> None:
    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", groups_per_step=PER_STEP
    ) as stream:
        step = next(stream)
        samples = list(samples_of(step, version=3))
    found = torch.tensor([float(one.advantage) for one in samples])
    wanted = [
        batch["advantages"][row][batch["action_mask"][row]][0]
        for batch in step.microbatches
        for row in range(len(batch["input_ids"]))
    ]
    assert torch.equal(found, torch.stack(wanted))
    for sample in samples:
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert not sample.completion_mask[0]
        assert sample.model_version == 3


def test_settings_that_the_store_cannot_serve_are_refused(url: str, tmp_path: Path) -> None:
    for changes, told in (
        ({"token_budget": 512}, "token_budget=0"),
        ({"max_steps": -1}, "max_steps: give it"),
    ):
        with pytest.raises(InvalidArgumentError, match=told):
            StoredRollouts(None, settings(tmp_path, **changes))
    with pytest.raises(InvalidArgumentError, match="20 rows, TRL's steps have 16"):
        train(url, tmp_path, groups=5)
