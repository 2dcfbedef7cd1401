"""A causal language model of transformers, trained from the store by its user's own optimizer."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import anyio
import pytest
import torch
import transformers

import trinity_buffer as tb
from tests.handles import SyncTrainStream
from tests.trainer.data import prepared
from tests.trainer.qwen import qwen2, qwen3
from tests.whole_stores import digest_of
from trinity_buffer.algorithm import Algorithm, build
from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.pipeline.history.replay import ReplayStream
from trinity_buffer.trainer.causal_lm import CausalLM

DROPOUT: dict[str, Any] = {"attention_dropout": 0.1}
"""Draws random numbers in training: a resumed run needs those of the checkpoint, a replay all."""


def algorithm() -> Algorithm:
    return build("grpo", kl_loss_fn="k2")  # compares with a reference


def trainer_on(
    stream: SyncTrainStream | ReplayStream, folder: Path, steps: int | None = None
) -> tb.Trainer:
    model = qwen3(**DROPOUT)
    torch.seed()  # each process begins with other random numbers; the trainer sees to its own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = tb.TrainerSettings(checkpoints=folder, max_steps=steps)
    return tb.Trainer(stream, model, algorithm(), settings, optimizer=optimizer)


def train(
    url: str, folder: Path, consumer: str, steps: int | None = None, **beside: Any
) -> tb.Trainer:
    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", consumer=consumer, groups_per_step=2
    ) as stream:
        trainer = trainer_on(stream, folder, steps)
        trainer.run(**beside)
    return trainer


@pytest.mark.parametrize("beside", ["report", "measure"])
def test_what_is_drawn_beside_the_training_changes_no_weights(
    beside: str, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, algorithm())
    drawn: list[float] = []

    def draw(_: object) -> dict[str, float]:
        drawn.append(float(torch.rand(())))
        return {}

    told: dict[str, Any] = {beside: draw}
    plain = train(sqlite_url, tmp_path / "plain", "plain")
    drawing = train(sqlite_url, tmp_path / "drawing", "drawing", 2, **told)
    drawing = train(sqlite_url, tmp_path / "drawing", "drawing", **told)
    assert len(set(drawn)) == plain.state.step == 3
    train(sqlite_url, tmp_path / "whole", "whole", **told)
    assert drawn[3:] == drawn[:3], "resumed, it draws what it would have drawn"
    for name, weight in plain.policy.model.state_dict().items():
        assert torch.equal(weight, drawing.policy.model.state_dict()[name]), name


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from tests.trainer.test_own_model import trainer_on
import trinity_buffer as tb
torch.set_num_threads(1)
with tb.open_train_stream(sys.argv[1], experiment="run", strategy="grpo", consumer="killed",
                          groups_per_step=2) as stream:
    def die(report):
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    trainer_on(stream, Path(sys.argv[2])).run(die)
"""


def test_a_run_that_ended_goes_on_and_replays_to_the_same_bits(
    sqlite_url: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    anyio.run(prepared, sqlite_url, algorithm())
    train(sqlite_url, tmp_path / "ended", "ended", 2)
    assert_it_goes_on_to_the_same_bits(sqlite_url, tmp_path, "ended")


@pytest.mark.long  # a process that imports transformers
def test_a_killed_run_goes_on_and_replays_to_the_same_bits(sqlite_url: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    anyio.run(prepared, sqlite_url, algorithm())
    killed = run(
        [sys.executable, "-c", KILLED, sqlite_url, str(tmp_path / "killed")],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert_it_goes_on_to_the_same_bits(sqlite_url, tmp_path, "killed")


def assert_it_goes_on_to_the_same_bits(url: str, folder: Path, consumer: str) -> None:
    """Compare a run that is resumed now, and its replay, with one that goes through."""
    through = train(url, folder / "through", "through")
    resumed = train(url, folder / consumer, consumer)
    with tb.open_replay_stream(url, experiment="run", consumer=consumer) as stream:
        replayed = trainer_on(stream, folder / "replayed")
        replayed.run()
    first = qwen3(**DROPOUT).state_dict()
    assert through.state.step == resumed.state.step == replayed.state.step == 3
    for name, weight in through.policy.model.state_dict().items():
        assert torch.equal(weight, resumed.policy.model.state_dict()[name]), name
        assert torch.equal(weight, replayed.policy.model.state_dict()[name]), name
    assert not torch.equal(first["lm_head.weight"], through.policy.model.lm_head.weight)


def test_what_is_published_is_what_from_pretrained_reads(sqlite_url: str, tmp_path: Path) -> None:
    anyio.run(prepared, sqlite_url, algorithm())
    trainer = train(sqlite_url, tmp_path / "c", "trainer", 1)
    folder = tmp_path / "c" / "step-00000001" / "policy"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in trainer.policy.model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_compiled_model_is_saved_under_the_names_that_from_pretrained_reads(
    tmp_path: Path,
) -> None:
    model = qwen3(1)
    CausalLM(torch.compile(model, backend="eager")).save(tmp_path / "policy")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name


@pytest.mark.parametrize("make", [qwen2, qwen3])
def test_a_saved_model_is_restored_in_place_and_its_bytes_are_its_own(
    make: type, tmp_path: Path
) -> None:
    saved, other = CausalLM(make(1)), CausalLM(make(2))
    before = other.model.lm_head.weight
    for name in ("a", "b"):
        saved.save(tmp_path / name)
    other.restore(tmp_path / "a")
    assert other.model.lm_head.weight is before
    assert torch.equal(before, saved.model.lm_head.weight)
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b")


def test_weights_of_another_shape_or_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    CausalLM(qwen2(hidden_size=32)).save(tmp_path / "wide")
    with pytest.raises(CheckpointError, match=r"wide/model.safetensors: no weights of a Qwen2For"):
        CausalLM(qwen2()).restore(tmp_path / "wide")
    with pytest.raises(CheckpointError, match=r"none/model.safetensors: no weights"):
        CausalLM(qwen2()).restore(tmp_path / "none")
    broken = qwen2()
    broken.lm_head.weight.data[0, 0] = torch.nan
    CausalLM(broken).save(tmp_path / "broken")
    with pytest.raises(CheckpointError, match="NaN or Inf"):
        CausalLM(qwen2()).restore(tmp_path / "broken")


def test_a_model_that_makes_no_critic_is_refused_by_name(sqlite_url: str, tmp_path: Path) -> None:
    anyio.run(prepared, sqlite_url, build("ppo"))
    with (
        tb.open_train_stream(sqlite_url, experiment="run", strategy=None) as stream,
        pytest.raises(InvalidArgumentError, match="CausalLM has no method `new_critic"),
    ):
        tb.Trainer(stream, qwen2(), build("ppo"), tb.TrainerSettings(checkpoints=tmp_path))
