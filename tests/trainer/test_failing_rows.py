"""A row that a model cannot read is named, and whatever else fails in a step says where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers

import trinity_buffer as tb
from tests.trainer.qwen import qwen2
from trinity_buffer.algorithm import build
from trinity_buffer.errors import TrainingError


async def with_a_long_row(url: str, token: int) -> None:
    """Record two runs of two tasks; the last one is longer, and ends with this token."""
    async with tb.open_store(url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 2})
        for task, run in ((0, 0), (0, 1), (1, 0), (1, 1)):
            tokens = [1, 2, 3, *((4, 5, token) if task and run else ())]
            made = tb.Experience(
                eid=tb.EID("b", task, run),
                tokens=tokens,
                prompt_length=1,
                logprobs=[-1.0] * (len(tokens) - 1),
                reward=float(run),
            )
            await experiment.writer("test").write([made])
        await tb.run_strategy(experiment, "grpo")


def train(url: str, folder: Path, model: Any, beside: Any = None, **options: Any) -> None:
    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", **{"groups_per_step": 2, **options}
    ) as stream:
        settings = tb.TrainerSettings(checkpoints=folder)
        tb.Trainer(stream, model, build("grpo"), settings, **(beside or {})).run()


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [None, 3])
def test_a_token_beyond_the_vocabulary_is_named_with_its_row(
    layout: str, budget: int | None, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(with_a_long_row, sqlite_url, 37)
    options = {"layout": layout, "tokens_per_microbatch": budget}
    with pytest.raises(
        TrainingError, match=r"step 1: row b/1/1/0/? holds token 37, and the model has the tokens 0"
    ):
        train(sqlite_url, tmp_path, qwen2(), **options)


@pytest.mark.parametrize("name", ["reference", "teacher"])
def test_a_model_beside_it_must_have_the_tokens_too(
    name: str, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(with_a_long_row, sqlite_url, 37)
    model = qwen2()
    model.resize_token_embeddings(40)
    told = f"holds token 37, and the {name} has the tokens 0 to 36: take a {name} whose"
    with pytest.raises(TrainingError, match=told):
        train(sqlite_url, tmp_path, model, {name: qwen2()})


def test_a_token_of_an_embedding_that_was_resized_is_trained(
    sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(with_a_long_row, sqlite_url, 37)
    model = qwen2()
    model.resize_token_embeddings(40)
    train(sqlite_url, tmp_path, model)


def test_an_error_of_the_model_says_in_which_step_and_at_which_row(
    sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(with_a_long_row, sqlite_url, 6)
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=37, n_positions=4, **shape)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(IndexError) as caught:
        train(sqlite_url, tmp_path, model, groups_per_step=1)
    note, remedy = caught.value.__notes__
    assert note.rstrip("/") == (
        "in step 2, in the micro-batch of 2 rows of up to 6 tokens, the first b/1/0/0"
    )
    assert remedy == "the model has no such position: max_tokens= leaves out longer rows"
    train(sqlite_url, tmp_path, model, groups_per_step=1, max_tokens=4)


def test_an_error_of_the_loss_says_it_too(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anyio.run(with_a_long_row, sqlite_url, 6)

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(build("grpo").policy_loss), "__call__", fail)
    with pytest.raises(ZeroDivisionError) as caught:
        train(sqlite_url, tmp_path, qwen2(), groups_per_step=1)
    assert "in step 1, in the micro-batch of 2 rows" in caught.value.__notes__[0]
