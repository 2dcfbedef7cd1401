"""One gradient: of the bare model, with an adapter, and of wrapped models on two ranks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.forked_ranks import said_by
from tests.trainer.wrapped import batch_of, gradients, loss, model_of, rows_of
from tests.trainer.wrapped_rank import main
from trinity_buffer.trainer.causal_lm import CausalLM, reference_of

ALL = (0, 1, 2, 3)
PEFT = pytest.mark.filterwarnings("ignore::FutureWarning")  # it asks transformers by an old name


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Return if the gradients are equal to 1e-5 of the largest."""
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * largest)


def bare(*, tied: bool) -> dict[str, Tensor]:
    model = model_of(tied=tied)
    loss(model, rows_of(*ALL), "padded").backward()
    return gradients(model)


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "fsdp2 of the root alone"])
def test_two_ranks_have_the_gradient_of_one(wrapper: str, tmp_path: Path) -> None:
    said = said_by(main, [(str(tmp_path), rank, wrapper) for rank in "01"], tmp_path)
    assert [one[0] for one in said] == ["0", "0"], said
    for tied in (False, True):
        wanted = bare(tied=tied)
        for layout in ("padded", "packed"):
            for rank in (0, 1):
                assert_near(torch.load(tmp_path / f"{layout}-{tied}-{rank}.pt"), wanted)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_checkpointed_activations_change_no_gradient(layout: str) -> None:
    model = model_of(tied=True).train()
    model.activation_checkpointing_enable()
    loss(model, rows_of(*ALL), layout).backward()
    assert_near(gradients(model), bare(tied=True))


def test_autocast_scores_near_float32_and_keeps_its_gradients_in_float32() -> None:
    model = model_of(tied=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(model, rows_of(*ALL), "padded")
    found.backward()
    assert found.dtype == torch.float32
    wanted = bare(tied=True)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in gradients(model).items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=0.03 * largest)


def adapted(seed: int | None = 3) -> Any:
    """Return the model with an adapter that says something already; None: with a fresh one."""
    peft = import_module("peft")
    made = peft.get_peft_model(
        model_of(tied=True), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    generator = torch.Generator().manual_seed(seed or 0)
    for name, weight in made.named_parameters():
        if "lora_B" in name and seed is not None:
            torch.nn.init.normal_(weight, std=0.3, generator=generator)
    return made


@PEFT
def test_an_adapter_has_the_gradient_of_all_logits_padded_and_packed() -> None:
    model = adapted()
    total = torch.zeros(())
    for row in rows_of(*ALL):
        every = model(row[None]).logits[0].log_softmax(-1)[:-1]
        logprob = every.gather(1, row[1:, None])
        entropy = -(every.exp() * every).sum(1)
        total = total + logprob.square().sum() + 0.1 * entropy.sum()
    (total / sum(map(len, rows_of(*ALL)))).backward()
    wanted = gradients(model)
    assert all("lora" in name for name in wanted)
    for layout in ("padded", "packed"):
        model.zero_grad()
        loss(model, rows_of(*ALL), layout).backward()
        assert_near(gradients(model), wanted)


@PEFT
def test_an_adapter_is_saved_alone_and_left_out_of_its_reference(tmp_path: Path) -> None:
    model, other = adapted(), adapted(4)
    CausalLM(model).save(tmp_path / "policy")
    assert {path.name for path in (tmp_path / "policy").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    CausalLM(other).restore(tmp_path / "policy")
    batch = batch_of(rows_of(*ALL), "padded")
    said = CausalLM(model).scores(batch).logprob
    assert torch.equal(CausalLM(other).scores(batch).logprob, said)
    base = CausalLM(model_of(tied=True)).scores(batch).logprob
    assert not torch.equal(said, base)
    fresh = CausalLM(adapted(None))
    reference = reference_of(fresh)
    fresh.restore(tmp_path / "policy")
    assert torch.equal(fresh.scores(batch).logprob, said)
    assert torch.equal(reference.scores(batch).logprob, base)
