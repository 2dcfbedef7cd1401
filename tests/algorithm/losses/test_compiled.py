"""Every loss under ``torch.compile``: one graph without a break, and the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend

from tests.algorithm.losses.steps import WHOLE, make_step
from tests.algorithm.losses.variants import label, make, variants
from trinity_buffer.algorithm import ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN, BatchLayout
from trinity_buffer.algorithm.functional import AGGREGATION_MODES, aggregate_loss
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import LossAndMetrics

pytestmark = pytest.mark.long

REC_CHOICES = ("clip_mode", "weight", "regularizer")

VARIANTS = [
    pytest.param(name, arguments, id=label(name, arguments))
    for name, arguments in variants(every_mode=False)
    # Of REC every choice by itself: the sixty of them together take two minutes.
    if [arguments.get(key, "none") for key in REC_CHOICES].count("none") >= 2
    # These are compiled below, backward pass and all.
    and arguments != POLICY_LOSS_FN.get(name).default_args()
]
KINDS = ("alone", "padded", "packed")
"""Without a layout, and with one."""

STEPS: Sequence[Sequence[int]] = (WHOLE[0][0], (0, 1, 2, 3), (6, 7, 4, 5, 2, 3), (6, 7, 2, 3), ())
"""Rows of one step after the other, none in the last; their shapes and their totals differ."""

FEW_GRAPHS = 5
"""One for the first shape, for any number of tokens, of rows, of pairs, and for no row."""

Inputs = dict[str, Any]


class Graphs:
    """A backend that counts the graphs it is given, and runs each as ``backend`` does."""

    def __init__(self, backend: str) -> None:
        torch.compiler.reset()
        self.count = 0
        self._run = lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return self._run(graph, inputs)


def inputs(kind: str, number: int) -> Inputs:
    """Return the tensors of a step, and its layout."""
    step = make_step(torch.float32, seed=number)
    batch, cu_seqlens = step.microbatch(STEPS[number], packed=kind == "packed")
    if kind == "alone":
        return {**batch, "layout": None}
    layout = replace(step.layout(), cu_seqlens=cu_seqlens)
    totals = {
        part: replace(getattr(layout, part), tokens=getattr(layout, part).tokens + number)
        for part in ("total", "usual", "expert")
    }
    return {**batch, "layout": replace(layout, **totals)}


def evaluated(loss_fn: Callable[..., LossAndMetrics], name: str, given: Inputs) -> list[Tensor]:
    """Return the loss, its gradient in the tensor ``name``, and its metrics."""
    torch.manual_seed(0)
    leaf = given[name].clone().requires_grad_()
    loss, metrics = loss_fn(**{**given, name: leaf})
    loss.backward()
    assert leaf.grad is not None
    return [loss.detach(), leaf.grad, *metrics.values()]


def assert_compiled(
    loss_fn: Callable[..., LossAndMetrics],
    taken: Sequence[str],
    kind: str,
    leaf: str = "logprob",
    backend: str = "eager",
) -> None:
    """Return if one graph without a break gives the bits of the loss, step after step."""
    graphs = Graphs(backend)
    compiled = torch.compile(loss_fn, fullgraph=True, backend=graphs)
    for number in range(len(STEPS) - (kind == "alone")):  # without a step no batch is empty
        given = {name: value for name, value in inputs(kind, number).items() if name in taken}
        expected, found = (evaluated(one, leaf, given) for one in (loss_fn, compiled))
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert 1 <= graphs.count <= FEW_GRAPHS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_a_policy_loss_is_one_graph(name: str, arguments: dict[str, Any], kind: str) -> None:
    loss_fn = make(name, arguments)
    assert_compiled(loss_fn, ["logprob", "layout", *loss_fn.select_keys], kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICY_LOSS_FN.names())
def test_a_policy_loss_and_its_backward_pass_are_one_graph_each(name: str, kind: str) -> None:
    loss_fn = make(name, POLICY_LOSS_FN.get(name).default_args())
    taken = ["logprob", "layout", *loss_fn.select_keys]
    assert_compiled(loss_fn, taken, kind, backend="aot_eager")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(set(KL_FN.names()) - {"none"}))
def test_a_divergence_is_one_graph(name: str, kind: str) -> None:
    kl_fn = KL_FN.get(name)(kl_coef=0.3)

    def loss_fn(action_mask: Tensor, **tensors: Any) -> LossAndMetrics:
        return kl_fn.calculate_kl_loss(response_mask=action_mask, **tensors)

    taken = ["logprob", "ref_logprob", "old_logprob", "action_mask", "layout"]
    assert_compiled(loss_fn, taken, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(set(ENTROPY_LOSS_FN.names()) - {"none"}))
def test_an_entropy_bonus_is_one_graph(name: str, kind: str) -> None:
    loss_fn = ENTROPY_LOSS_FN.get(name)(entropy_coef=0.3)
    taken = ["entropy", "action_mask", "expert_mask", "layout"]
    assert_compiled(loss_fn, taken, kind, leaf="entropy")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_an_aggregation_is_one_graph(mode: str, kind: str) -> None:
    def loss_fn(logprob: Tensor, action_mask: Tensor, layout: BatchLayout | None) -> LossAndMetrics:
        return aggregate_loss(logprob, action_mask, mode, layout=layout), {}

    assert_compiled(loss_fn, ["logprob", "action_mask", "layout"], kind)


def test_a_compiled_schedule_says_nan_where_the_steps_of_a_batch_differ() -> None:
    loss_fn = make("mix_chord", POLICY_LOSS_FN.get("mix_chord").default_args())
    taken = ["logprob", "layout", *loss_fn.select_keys]
    given = {name: value for name, value in inputs("padded", 0).items() if name in taken}
    given["step"] = torch.arange(len(given["step"]))
    compiled = torch.compile(loss_fn, fullgraph=True, backend="eager")
    assert bool(compiled(**given)[0].isnan())
