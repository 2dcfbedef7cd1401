"""verl's trainer, agent loop, replay buffer and TransferQueue around the store, on CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import no_engines
import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from no_engines import PROMPTS, RUNS, Trainer, configured
from ray.util import list_named_actors
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from verl.workers.config import ActorConfig

import trinity_buffer as tb
from trinity_buffer import verify
from trinity_buffer.algorithm.policy_loss_fn import POLICY_LOSS_FN
from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.integrations.verl import StoreCheckpointCallback, StoreReplayBuffer
from trinity_buffer.pipeline.verify.verify import VerifyReport

STEPS = 20
EXAMPLE = Path(__file__).with_name("example.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    context = ray.init(num_cpus=3, include_dashboard=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def one_queue(cluster: str) -> Iterator[Any]:
    tq.init()
    yield tq
    tq.close()


@pytest.fixture
def queue(one_queue: Any) -> Iterator[None]:
    """TransferQueue, empty; making one takes longer than a test."""
    yield
    for partition, keys in (one_queue.kv_list() or {}).items():
        if keys:
            one_queue.kv_clear(keys=list(keys), partition_id=partition)


def made(place: Path, *extra: dict[str, Any]) -> Trainer:
    return Trainer(configured(f"sqlite:///{place}/run.db", place / "job"), *extra)


def trained(trainer: Trainer) -> list[str]:
    """Take one step, as `fit` does; return the keys of its trajectories."""
    batch = trainer.sampled()
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    trainer.global_steps += 1
    return list(batch.keys)


def told(place: Path) -> tuple[int, VerifyReport]:
    """Return the last committed step, and what `verify` says of the store."""

    async def look() -> tuple[int, VerifyReport]:
        async with tb.open_store(f"sqlite:///{place}/run.db", read_only=True) as store:
            experiment = await store.experiment("run")
            return await experiment.committed_step(), await verify(experiment)

    return anyio.run(look)


# First of all: its trainers have queues of their own, of which a cluster holds one at a time.
def test_killed_and_resumed_each_group_is_trained_once(cluster: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    command = [sys.executable, str(EXAMPLE), url, str(tmp_path / "job"), str(STEPS)]
    lines: list[list[str]] = []
    # After odd steps, which save nothing: a kill while verl writes which checkpoint is its newest
    # leaves that file empty, and verl itself does not begin again.
    for kill_after in (7, 5, None):
        while list_named_actors(all_namespaces=True):  # the queue dies with who was killed
            time.sleep(0.05)
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"RAY_ADDRESS": cluster}
        )
        assert child.stdout is not None
        steps = 0
        for line in child.stdout:
            if line.startswith("step "):
                lines.append(line.split())
                steps += 1
            if steps == kill_after:
                os.kill(child.pid, signal.SIGKILL)
                break
        child.wait()
        child.stdout.close()
    assert child.returncode == 0
    rows_of: dict[int, list[str]] = {}
    for _, number, *keys in lines:  # what comes again is what came
        assert rows_of.setdefault(int(number), keys) == keys
    assert sorted(rows_of) == list(range(1, STEPS + 1))
    own = [key for keys in rows_of.values() for key in keys]
    assert len(own) == len(set(own)) == STEPS * PROMPTS * RUNS
    committed, report = told(tmp_path)
    assert committed == STEPS
    assert report.ok, report.problems
    (counts,) = report.trainers
    assert (counts.committed, counts.rejected, counts.holds) == (len(own), {}, True)
    with tb.open_replay_stream(url, experiment="run") as replay:
        rows = [row for step in replay for row in step.manifest.experiences]
    assert len(rows) == len(set(rows)) == len(own)


def test_twenty_samples_have_the_advantages_and_the_loss_of_the_store(
    queue: None, tmp_path: Path
) -> None:
    trainer = made(tmp_path)
    assert type(trainer.replay_buffer) is StoreReplayBuffer
    assert type(trainer.checkpoint_callback) is StoreCheckpointCallback
    expected = []
    for _ in range(STEPS):
        batch = trainer.sampled()
        assert len(batch.keys) == PROMPTS * RUNS
        expected.append(loss_of_verl(tq.kv_batch_get(batch.keys, batch.partition_id)))
        tq.kv_clear(keys=batch.keys, partition_id="train")
        trainer.global_steps += 1
    trainer.replay_buffer.close()
    ours = POLICY_LOSS_FN.get("ppo")(clip_range=0.2, loss_agg_mode="token-mean")
    url = f"sqlite:///{tmp_path}/run.db"
    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", groups_per_step=PROMPTS, consumer="second"
    ) as stream:
        for step, loss in zip(stream, expected, strict=True):
            (batch,) = step.microbatches
            kept = {name: batch[name] for name in ("old_logprob", "action_mask", "advantages")}
            shifted = batch["old_logprob"] + 0.1 * batch["action_mask"]
            found, _ = ours(shifted, layout=batch.layout, **kept)
            assert float(found) == pytest.approx(loss, rel=1e-5, abs=1e-6)


def loss_of_verl(data: Any) -> float:
    """Return verl's loss of what its actor would be given, with its own advantages."""
    names = ("rm_scores", "response_mask", "rollout_log_probs")
    rewards, mask, old = (padded(data[name]) for name in names)
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, mask, index=np.array(list(data["uid"]), dtype=object)
    )
    config = ActorConfig(strategy="fsdp", rollout_n=RUNS, ppo_micro_batch_size_per_gpu=1)
    loss, _ = compute_policy_loss_vanilla(
        old, old + 0.1, advantages, mask, loss_agg_mode="token-mean", config=config
    )
    return float(loss)


def padded(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.unbind()), batch_first=True).float()


def test_a_checkpoint_that_nobody_committed_is_gone_on_from(queue: None, tmp_path: Path) -> None:
    trainer = made(tmp_path)
    first = trained(trainer), trained(trainer)
    trainer.global_steps -= 1  # verl saves before it counts on
    trainer.checkpoint_callback.on_save = lambda **_: None  # killed just before
    trainer._save_checkpoint()
    trainer.replay_buffer.close()
    assert told(tmp_path)[0] == 0
    again = made(tmp_path)
    third = trained(again)
    assert set(third).isdisjoint({*first[0], *first[1]})
    again.global_steps -= 1
    again._save_checkpoint()
    again.replay_buffer.close()
    assert told(tmp_path)[0] == 3


def test_an_older_checkpoint_is_served_again_what_came_after_it(
    queue: None, tmp_path: Path
) -> None:
    trainer = made(tmp_path)
    steps = []
    for number in (1, 2, 3):
        steps.append(trained(trainer))
        trainer.global_steps = number
        trainer._save_checkpoint()
        trainer.global_steps = number + 1
    trainer.replay_buffer.close()
    assert told(tmp_path)[0] == 3
    (tmp_path / "job" / "latest_checkpointed_iteration.txt").write_text("1")
    again = made(tmp_path)
    assert again.global_steps == 2
    assert [trained(again), trained(again)] == steps[1:]
    again.replay_buffer.close()
    assert told(tmp_path)[0] == 1


def test_a_failed_session_leaves_a_smaller_group(queue: None, tmp_path: Path) -> None:
    trainer = made(tmp_path, {"failing": 1})
    batch = trainer.sampled()
    trainer.replay_buffer.close()
    rows = Counter(key.split("_")[0] for key in batch.keys)
    assert sorted(rows.values()) == [RUNS - 1, RUNS]
    assert {*tq.kv_list()["train"]} == {*batch.keys}


def test_a_prompt_that_leaves_nothing_is_made_up_for(queue: None, tmp_path: Path) -> None:
    trainer = made(tmp_path, {"failing": RUNS}, {}, {"failing": RUNS})
    first, second = trained(trainer), trained(trainer)
    trainer.replay_buffer.close()
    assert len(first) == len(second) == PROMPTS * RUNS
    report = told(tmp_path)[1]
    assert report.ok, report.problems
    assert report.experiences == 4 * RUNS
    assert trainer.train_dataloader.state_dict() == {"next": 6}


def test_a_group_that_the_strategy_rejects_is_made_up_for(queue: None, tmp_path: Path) -> None:
    config = configured(f"sqlite:///{tmp_path}/run.db", tmp_path, strategy="reward_variance")
    trainer = Trainer(config, {"reward": 0.5})
    assert len(trained(trainer)) == PROMPTS * RUNS
    assert not (tq.kv_list() or {}).get("train")  # what is not sampled has left it, too
    trainer.replay_buffer.close()
    report = told(tmp_path)[1]
    assert report.ok, report.problems
    assert report.experiences == 2 * PROMPTS * RUNS
    (counts,) = report.trainers
    assert (counts.leased, counts.ready) == (PROMPTS * RUNS, RUNS)


def test_every_field_comes_back_as_verl_gave_it(
    queue: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(tmp_path)
    pixels = torch.rand(2, 3)
    modal = {"pixel_values": pixels}
    monkeypatch.setattr(trainer.sessions, "_compute_multi_modal_inputs", lambda *_: {**modal})
    positions = lambda ids, *_: 1 + torch.arange(ids.shape[1])[None]  # noqa: E731
    monkeypatch.setattr(trainer.sessions, "_compute_position_ids", positions)
    trainer.prepare_step()
    listed = tq.kv_list()["train"]
    keys = sorted(key for key in listed if "_" in key)
    before = tq.kv_batch_get(keys, "train")
    batch, _ = trainer.replay_buffer.sample(1, "train", PROMPTS)
    trainer.replay_buffer.close()
    assert sorted(batch.keys) == keys
    assert batch.tags == [listed[key] for key in batch.keys]
    after = tq.kv_batch_get(keys, "train")
    assert set(before.keys()) == set(after.keys()) > {"dummy_tensor", "raw_prompt", "extra_info"}
    for name in before.keys():  # noqa: SIM118 - a TensorDict
        one, other = before.get(name), after.get(name)
        assert type(one) is type(other), name
        if isinstance(one, torch.Tensor):
            pairs = zip(one.unbind(), other.unbind(), strict=True)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs), name
        elif name == "multi_modal_inputs":
            assert all(torch.equal(one["pixel_values"], pixels) for one in other.tolist())
        else:
            assert one.tolist() == other.tolist(), name


def test_what_cannot_be_stored_is_refused_by_name(queue: None, tmp_path: Path) -> None:
    trainer = made(tmp_path, {"tool": Path("here")})
    with pytest.raises(InvalidExperienceError, match=r"extra_info.*tool.* is a pathlib\.PosixPath"):
        trainer.sampled()
    trainer.replay_buffer.close()


def test_a_trajectory_without_a_reward_is_refused(
    queue: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = no_engines.drawn(0)
    silent = scored.model_copy(update={"reward_score": None})
    monkeypatch.setattr(no_engines, "drawn", lambda _: silent)
    trainer = made(tmp_path)
    with pytest.raises(InvalidArgumentError, match="has no rm_scores"):
        trainer.sampled()
    trainer.replay_buffer.close()


def test_only_the_synchronous_trainer_is_served(tmp_path: Path) -> None:
    config = configured(f"sqlite:///{tmp_path}/run.db", tmp_path, mode="colocate_async")
    with pytest.raises(InvalidArgumentError, match="trainer_mode='colocate_async'"):
        Trainer(config)
