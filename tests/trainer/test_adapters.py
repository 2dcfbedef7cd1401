"""Adapters of peft: what a checkpoint would lack is refused before the first step."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import trinity_buffer as tb
from tests.trainer.data import prepared
from tests.trainer.qwen import qwen2
from trinity_buffer.algorithm import build
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.trainer.causal_lm import CausalLM, reference_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks by an old name


def adapted(**config: Any) -> Any:
    """Return a model with a fresh adapter."""
    peft = import_module("peft")
    wanted = {"r": 2, "target_modules": ["q_proj", "v_proj"]} | config
    model = qwen2()
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**wanted))


def with_a_free_embedding(model: Any) -> str:
    model.get_input_embeddings().requires_grad_(requires_grad=True)
    return "embed_tokens.weight"


def with_another_adapter(model: Any) -> str:
    model.add_adapter("other", model.peft_config["default"])
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora" in name)
    return "lora_A.other.weight"


def train(url: str, folder: Path, model: Any, steps: int = 1, **given: Any) -> tb.Trainer:
    """Train on from the last commit."""
    with tb.open_train_stream(url, experiment="run", strategy="grpo", groups_per_step=2) as stream:
        settings = tb.TrainerSettings(checkpoints=folder, max_steps=steps)
        algorithm = build("grpo", kl_loss_fn="none")
        trainer = tb.Trainer(stream, model, algorithm, settings, **given)
        trainer.run()
    return trainer


@pytest.mark.parametrize("change", [with_a_free_embedding, with_another_adapter])
def test_trainable_weights_outside_the_active_adapter_are_refused_by_name(
    change: Any, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    model = adapted()
    name = change(model)
    every: list[dict[str, Any]] = [{}, {"optimizer": torch.optim.AdamW(model.parameters())}]
    for given in every:
        with pytest.raises(InvalidArgumentError, match=rf"lost, such as \S*{name}: name their"):
            train(sqlite_url, tmp_path, model, **given)
    adapter = [w for n, w in model.named_parameters() if "lora" in n and "other" not in n]
    before = {n: w.clone() for n, w in model.named_parameters()}
    train(sqlite_url, tmp_path, model, optimizer=torch.optim.AdamW(adapter, lr=0.1))
    changed = {n for n, w in model.named_parameters() if not torch.equal(w, before[n])}
    assert changed
    assert all("lora" in n and "other" not in n for n in changed)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"modules_to_save": ["norm"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"use_dora": True},
        {"trainable_token_indices": [3, 4]},
    ],
    ids=lambda config: next(iter(config), "plain"),
)
def test_all_that_an_adapter_trains_is_restored(
    config: dict[str, Any], sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    model, fresh = adapted(**config), adapted(**config)
    before = {n: w.clone() for n, w in model.named_parameters()}
    train(sqlite_url, tmp_path, model)
    changed = [n for n, w in model.named_parameters() if not torch.equal(w, before[n])]
    assert changed
    resumed = train(sqlite_url, tmp_path, fresh)  # of one step, which is committed
    assert resumed.state.step == 1
    for name, weight in fresh.named_parameters():
        assert torch.equal(weight, dict(model.named_parameters())[name]), name


@pytest.mark.parametrize("init", ["pissa", "olora", False])
def test_a_model_that_is_another_one_without_its_adapter_needs_a_reference(
    init: Any, sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    model = adapted(init_lora_weights=init, target_modules=["q_proj", "v_proj", "up_proj"])
    settings = tb.TrainerSettings(checkpoints=tmp_path, max_steps=1, learning_rate=0.1)
    reports: list[Any] = []
    with tb.open_train_stream(
        sqlite_url, experiment="run", strategy="grpo", groups_per_step=2
    ) as stream:
        algorithm = build("grpo", kl_loss_fn="k2")
        with pytest.raises(InvalidArgumentError, match=r"without its adapter .* give reference="):
            tb.Trainer(stream, model, algorithm, settings)
        trainer = tb.Trainer(stream, model, algorithm, settings, reference=deepcopy(model))
        trainer.run(reports.append)
    assert reports[0].metrics["actor/kl_loss"] == 0.0  # it is the policy of version 0


@pytest.mark.parametrize("config", [{}, {"init_lora_weights": "gaussian"}, {"use_dora": True}])
def test_a_fresh_adapter_is_left_out_of_its_reference(config: dict[str, Any]) -> None:
    model = adapted(lora_dropout=0.1, **config).train()
    batch = {"input_ids": torch.arange(3, 12)[None]}
    reference = reference_of(CausalLM(model)).scores(batch).logprob
    assert model.training
    assert torch.equal(reference, CausalLM(qwen2()).scores(batch).logprob)
