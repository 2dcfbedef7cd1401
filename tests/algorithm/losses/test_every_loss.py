"""What every policy loss, KL and entropy loss owes, whatever its formula."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithm.losses.steps import WHOLE, make_step
from tests.algorithm.losses.variants import label, make, variants
from trinity_buffer.algorithm import ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN

VARIANTS = [
    pytest.param(name, arguments, id=label(name, arguments))
    for name, arguments in variants(every_mode=False)
]
TOKEN_TENSORS = ("logprob", "old_logprob", "ref_logprob", "advantages")

GOOD_ADVANTAGE = {"dpo", "sft", "sft_is", "sft_phi"}
"""Losses without advantages: what they reinforce is said in another way."""


def padded(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    return make_step(dtype, seed).microbatch(WHOLE[0][0], packed=False)[0]


def evaluate(
    name: str, arguments: dict[str, Any], batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the loss, its metrics and its gradient in ``logprob``."""
    torch.manual_seed(0)
    loss_fn = make(name, arguments)
    leaf = batch["logprob"].clone().requires_grad_()
    tensors = {key: batch[key] for key in loss_fn.select_keys}
    loss, metrics = loss_fn(logprob=leaf, **tensors)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), metrics, leaf.grad


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_what_a_mask_hides_reaches_neither_value_nor_gradient(
    name: str, arguments: dict[str, Any], garbage: float
) -> None:
    clean = padded()
    hidden = ~clean["action_mask"]
    dirty = {
        key: value.masked_fill(hidden, garbage) if key in TOKEN_TENSORS else value
        for key, value in clean.items()
    }
    loss, _, gradient = evaluate(name, arguments, clean)
    dirty_loss, dirty_metrics, dirty_gradient = evaluate(name, arguments, dirty)
    assert torch.equal(dirty_loss, loss)
    assert torch.equal(dirty_gradient, gradient)
    assert not gradient[hidden].any()
    assert all(bool(value.isfinite()) for value in dirty_metrics.values())


@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_metrics_are_detached_numbers(name: str, arguments: dict[str, Any]) -> None:
    loss, metrics, _ = evaluate(name, arguments, padded())
    assert loss.shape == ()
    assert metrics
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())


def _smooth(name: str, arguments: dict[str, Any]) -> bool:
    """Kinks, and weights that are held constant on purpose, are no derivatives."""
    detached = {"gspo", "gspo_token", "topr", "cispo", "sft_is", "sft_phi", "mix_chord", "rec"}
    if name == "rec":
        return bool(arguments["weight"] == "none" and arguments["clip_mode"] == "none")
    if name == "mix_chord":
        return not arguments["enable_phi_function"]
    gate = arguments.get("detach_gate", False) or arguments.get("fallback_to_policy_gradient")
    return name not in detached and not gate


@pytest.mark.parametrize(
    ("name", "arguments"),
    [p for p in VARIANTS if _smooth(*p.values)],  # type: ignore[arg-type]
)
def test_the_gradient_is_the_derivative(name: str, arguments: dict[str, Any]) -> None:
    loss_fn = make(name, arguments)
    batch = padded(seed=3)
    tensors = {key: batch[key] for key in loss_fn.select_keys}

    def value(logprob: Tensor) -> Tensor:
        torch.manual_seed(0)
        return loss_fn(logprob=logprob, **tensors)[0]

    assert torch.autograd.gradcheck(value, batch["logprob"].clone().requires_grad_(), eps=1e-7)


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSS_FN.names()) - GOOD_ADVANTAGE))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_good_tokens_become_likelier_and_bad_ones_rarer(name: str, sign: float) -> None:
    batch = padded()
    batch["old_logprob"] = batch["logprob"].clone()
    batch["advantages"] = torch.full_like(batch["advantages"], sign)
    batch["expert_mask"] = torch.zeros_like(batch["expert_mask"])
    _, _, gradient = evaluate(name, POLICY_LOSS_FN.get(name).default_args(), batch)
    shown = gradient[batch["action_mask"]]
    assert bool((shown * sign <= 0.0).all())
    assert bool((shown * sign < 0.0).any())


@pytest.mark.parametrize("name", sorted(GOOD_ADVANTAGE))
def test_recorded_tokens_become_likelier(name: str) -> None:
    batch = padded()
    _, _, gradient = evaluate(name, POLICY_LOSS_FN.get(name).default_args(), batch)
    gradient, mask = gradient.clone(), batch["action_mask"].clone()
    if name == "dpo":
        assert bool((gradient[1::2][mask[1::2]] > 0.0).all())  # the rejected ones, rarer
        gradient, mask = gradient[0::2], mask[0::2]
    assert bool((gradient[mask] < 0.0).all())


@pytest.mark.parametrize("name", POLICY_LOSS_FN.names())
def test_sixteen_bit_inputs_are_computed_in_thirty_two(name: str) -> None:
    batch = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in padded(torch.float32).items()
    }
    exact = {
        key: value.float() if value.is_floating_point() else value for key, value in batch.items()
    }
    arguments = POLICY_LOSS_FN.get(name).default_args()
    loss, _, _ = evaluate(name, arguments, batch)
    expected, _, _ = evaluate(name, arguments, exact)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSS_FN.names())
def test_a_loss_is_constructible_from_its_default_args(name: str) -> None:
    cls = POLICY_LOSS_FN.get(name)
    loss_fn = cls(**cls.default_args())
    assert loss_fn.select_keys
    assert "logprob" not in loss_fn.select_keys
    assert "layout" not in loss_fn.select_keys
    assert "layout" in signature(cls.__call__).parameters
    assert set(cls.reference_args) <= set(cls.default_args())


@pytest.mark.parametrize("name", KL_FN.names())
def test_a_kl_loss_ignores_garbage_behind_the_mask(name: str) -> None:
    clean = padded()
    hidden = ~clean["action_mask"]
    results = []
    for garbage in (0.0, float("nan"), float("inf")):
        leaf = clean["logprob"].masked_fill(hidden, garbage).requires_grad_()
        ref, old = (clean[k].masked_fill(hidden, garbage) for k in ("ref_logprob", "old_logprob"))
        kl = KL_FN.get(name)(kl_coef=0.5)
        loss, _ = kl.calculate_kl_loss(leaf, ref, clean["action_mask"], "token-mean", old)
        if loss.requires_grad:
            loss.backward()
        results.append((loss.detach(), leaf.grad))
    first_loss, first_gradient = results[0]
    for loss, gradient in results[1:]:
        assert torch.equal(loss, first_loss)
        if first_gradient is None or gradient is None:
            assert first_gradient is gradient
        else:
            assert torch.equal(gradient, first_gradient)


@pytest.mark.parametrize("name", sorted(set(KL_FN.names()) - {"none"}))
def test_the_gradient_of_a_kl_is_its_derivative(name: str) -> None:
    batch = padded(seed=5)
    kl = KL_FN.get(name)(kl_coef=0.5)

    def value(logprob: Tensor) -> Tensor:
        mask, old = batch["action_mask"], batch["old_logprob"]
        return kl.calculate_kl_loss(logprob, batch["ref_logprob"], mask, old_logprob=old)[0]

    assert torch.autograd.gradcheck(value, batch["logprob"].clone().requires_grad_(), eps=1e-7)


@pytest.mark.parametrize("name", ENTROPY_LOSS_FN.names())
def test_an_entropy_loss_ignores_garbage_behind_the_mask(name: str) -> None:
    batch = padded()
    entropy = batch["entropy"].masked_fill(~batch["action_mask"], float("nan")).requires_grad_()
    loss, _ = ENTROPY_LOSS_FN.get(name)(0.5)(entropy, batch["action_mask"], batch["expert_mask"])
    assert bool(loss.isfinite())
    if loss.requires_grad:
        loss.backward()
        assert entropy.grad is not None
        assert bool(entropy.grad.isfinite().all())
