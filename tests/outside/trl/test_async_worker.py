"""Our rollout worker under TRL's own queue, batcher and collator; its training step wants a GPU."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from transformers import TrainerControl, TrainerState
from trl.experimental.async_grpo.async_grpo_trainer import (
    DataCollatorForRollout,
    FixedCountBatcher,
    RolloutQueueDataset,
    RolloutWorkerProtocol,
)

import trinity_buffer as tb
from tests.outside.trl.test_grpo_trainer import GROUPS, RUNS, record
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.integrations.trl_async import StoredRollouts
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.verifying.verify import verify

PER_STEP = 4
"""Groups of a step; two micro-batches of 8 rows."""


def settings(folder: Path, **changes: Any) -> Any:
    plain = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "world_size": 1,
        "token_budget": 0,
        "output_dir": str(folder),
    }
    return SimpleNamespace(**plain | changes)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recorded") / "run.db"
    anyio.run(record, f"sqlite:///{path}")
    return path.read_bytes()


@pytest.fixture
def url(recorded: bytes, tmp_path: Path) -> str:
    (tmp_path / "run.db").write_bytes(recorded)
    return f"sqlite:///{tmp_path / 'run.db'}"


def stream_of(url: str) -> Any:
    return tb.open_train_stream(url, experiment="run", strategy="grpo", groups_per_step=PER_STEP)


def train(stream: Any, folder: Path, most: int = 1000) -> list[dict[str, Any]]:
    """Do what the trainer does with a worker, but for the forward pass; return its batches.

    Every second step is saved. Like accelerate's dispatcher, it holds the next batch already.
    """
    args, control = settings(folder), TrainerControl()
    worker: Any = StoredRollouts(stream, args)
    protocol: RolloutWorkerProtocol = worker
    version, metrics = [0], defaultdict(list)
    dataset = RolloutQueueDataset(
        protocol.rollout_buffer,
        lambda: version[0],
        protocol.check_health,
        60.0,
        metrics,
        max_staleness=0,
        poll_interval_s=0.1,
    )
    collate = DataCollatorForRollout(0, 1)
    batches = (collate([rows]) for rows in FixedCountBatcher(dataset, 1, 8))
    state = TrainerState(global_step=0 if stream.resume is None else stream.resume.step)
    protocol.start()
    seen, ahead = [], next(batches)
    for _ in range(most):
        for _ in range(args.gradient_accumulation_steps):
            seen.append(ahead)
            ahead = next(batches)
        state.global_step += 1
        worker.on_step_end(args, state, control)
        version[0] += 1
        protocol.update_model_version(version[0])
        if control.should_save or state.global_step % 2 == 0:
            checkpoint = folder / f"checkpoint-{state.global_step}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "weights").write_bytes(b"w")
            worker.on_save(args, state, control)
            control.should_save = False
        if control.should_training_stop:
            break
    protocol.stop()
    assert not metrics["sample/dropped_stale_total"]
    return seen


def terms(batches: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return (old log-prob, advantage) of each trained token."""
    pairs = [
        pair
        for batch in batches
        for pair in zip(
            batch["old_log_probs"].flatten().tolist(),
            batch["advantages"].flatten().tolist(),
            strict=True,
        )
    ]
    return sorted(pairs)


def expected(url: str) -> list[tuple[float, float]]:
    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", groups_per_step=PER_STEP, consumer="other"
    ) as stream:
        found = []
        for step in stream:
            for batch in step.microbatches:
                mask = batch["action_mask"]
                pairs = torch.stack([batch["old_logprob"][mask], batch["advantages"][mask]], -1)
                found += [(a, b) for a, b in pairs.tolist()]
            stream.commit(step)
    return sorted(found)


def test_each_group_is_trained_once_and_the_training_ends_with_the_stream(
    url: str, tmp_path: Path
) -> None:
    with stream_of(url) as stream:
        batches = train(stream, tmp_path / "trl")
    assert len(batches) == 2 * GROUPS // PER_STEP
    assert terms(batches) == expected(url)
    assert (tmp_path / "trl" / f"checkpoint-{GROUPS // PER_STEP}").is_dir()
    report = anyio.run(verified, url)
    assert (report.ok, report.trainers[-1].committed) == (True, GROUPS * RUNS)


async def verified(url: str) -> Any:
    async with open_store(url, read_only=True) as store:
        return await verify(await store.experiment("run"))


def test_what_was_not_saved_is_handed_out_again(url: str, tmp_path: Path) -> None:
    with stream_of(url) as stream:
        first = train(stream, tmp_path / "trl", most=5)  # the last saved one is step 4
    with stream_of(url) as stream:
        assert stream.resume is not None
        assert (stream.resume.step, stream.resume.checkpoint) == (4, tmp_path / "trl/checkpoint-4")
        second = train(stream, tmp_path / "trl")
    assert terms(first[:8] + second) == expected(url)


def test_steps_of_other_sizes_are_filled_up_or_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="token_budget=0"):
        StoredRollouts(None, settings(tmp_path, token_budget=512))  # type: ignore[arg-type]
    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", groups_per_step=3
    ) as stream:  # 12 rows of 16
        batches = train(stream, tmp_path / "few")
    assert terms(batches) == expected(url)
    with (
        tb.open_train_stream(
            url, experiment="run", strategy="grpo", groups_per_step=5, consumer="many"
        ) as stream,
        pytest.raises(InvalidArgumentError, match="20 rows, TRL's steps have 16"),
    ):
        train(stream, tmp_path / "many")
