"""Names, backends and signatures: how a loss is found and called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import (
    ADD_STRATEGY,
    KL_FN,
    POLICY_LOSS_FN,
    LossAndMetrics,
    PolicyLossFn,
    PPOPolicyLossFn,
    RECPolicyLossFn,
    Registry,
    aggregate_loss,
)
from trinity_buffer.algorithm.compat import reference_kwargs
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.writer import StagedWriter


class ReinforceLossFn(PolicyLossFn):
    """A loss as a user writes it: one method, plain names, no layout."""

    @override
    def __call__(self, logprob: Tensor, action_mask: Tensor, advantages: Tensor) -> LossAndMetrics:
        """Return the loss."""
        loss = aggregate_loss(-advantages * logprob, action_mask, "seq-mean-token-mean")
        return loss, {"pg_loss": loss.detach()}


TENSORS = {
    "logprob": torch.tensor([[-1.0, -2.0]]),
    "action_mask": torch.tensor([[1, 1]]),
    "advantages": torch.tensor([[1.0, 3.0]]),
}


def test_a_misspelt_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'gspo'.*sapo"):
        POLICY_LOSS_FN.get("gsop")
    with pytest.raises(UnknownNameError, match="low_var_kl"):
        KL_FN.get("low_var")


def test_a_name_belongs_to_one_class() -> None:
    registry: Registry[type] = Registry("thing")
    registry.register_module("one")(ReinforceLossFn)
    registry.register_module("one")(ReinforceLossFn)
    with pytest.raises(InvalidArgumentError, match="taken"):
        registry.register_module("one")(PPOPolicyLossFn)
    assert registry.names() == ("one",)


def test_an_installed_package_adds_its_loss_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_loss.py").write_text(
        "from trinity_buffer.algorithm import PPOPolicyLossFn\n"
        "class TheirLossFn(PPOPolicyLossFn):\n    pass\n"
    )
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[trinity_buffer.thing]\ntheirs = their_loss:TheirLossFn"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type] = Registry("thing")
    assert registry.names() == ("theirs",)
    assert registry.get("theirs").__name__ == "TheirLossFn"
    sys.modules.pop("their_loss")


def test_a_users_loss_is_one_method() -> None:
    loss_fn: Any = ReinforceLossFn()
    assert loss_fn.select_keys == ["response_mask", "advantages"]
    assert ReinforceLossFn.default_args() == {}
    loss, _ = loss_fn(
        logprob=TENSORS["logprob"],
        response_mask=TENSORS["action_mask"],
        advantages=TENSORS["advantages"],
    )
    assert float(loss) == pytest.approx(3.5)


def test_a_call_may_use_the_backends_names_or_ours_or_positions() -> None:
    for backend in ("verl", "tinker", "trinity"):
        loss_fn = ReinforceLossFn(backend)
        assert float(loss_fn(**TENSORS)[0]) == pytest.approx(3.5)
        assert float(loss_fn(*TENSORS.values())[0]) == pytest.approx(3.5)
    assert ReinforceLossFn("tinker").select_keys == ["action_mask", "advantages"]


def test_an_unknown_or_missing_tensor_is_named() -> None:
    loss_fn: Any = ReinforceLossFn()
    with pytest.raises(TypeError, match="'advantage'; did you mean 'advantages'"):
        loss_fn(logprob=TENSORS["logprob"], response_mask=1, advantage=1)
    with pytest.raises(TypeError, match="needs the tensor 'response_mask'"):
        loss_fn(logprob=TENSORS["logprob"], advantages=1)
    with pytest.raises(TypeError, match="clip_rnage"):
        POLICY_LOSS_FN.get("ppo")(clip_rnage=0.2)  # type: ignore[call-arg]


def test_defaults_are_read_off_the_signature_and_tuned() -> None:
    arguments = RECPolicyLossFn.default_args()
    assert arguments["epsilon_low_prime"] == 0.6
    assert arguments["clip_mode"] == "none"
    assert "backend" not in arguments
    assert "loss_agg_mode" not in arguments  # None: it follows the clip mode


def test_the_way_back_to_the_reference_is_on_the_class() -> None:
    assert reference_kwargs("policy_loss_fn", "sapo") == {"detach_gate": True}
    assert reference_kwargs("policy_loss_fn", "dpo") == {"per_pair": False}
    assert reference_kwargs("kl_fn", "k1") == {}
    for name, function in (
        ("gigpo", "gigpo"),
        ("grpo_grouped", "grpo"),
        ("reinforce", "reinforce"),
    ):
        args = reference_kwargs("add_strategy", name)
        assert args == reference_kwargs("advantage_fn", function)
        ADD_STRATEGY.get(name)(StagedWriter(), **args)
    with pytest.raises(UnknownNameError, match="kl_fn"):
        reference_kwargs("kl", "k1")
