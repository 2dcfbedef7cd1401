"""A step has one gradient, however it is cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithm.losses.steps import (
    CUTS,
    NORMALIZER,
    WHOLE,
    Batch,
    Loss,
    assert_close,
    make_step,
)
from tests.algorithm.losses.variants import label, make, variants
from trinity_buffer.algorithm import (
    ENTROPY_LOSS_FN,
    IMPORTANCE_CORRECTION,
    KL_FN,
    POLICY_LOSS_FN,
    BatchLayout,
    Totals,
    aggregate_loss,
    build,
    building,
)
from trinity_buffer.algorithm.functional import AGGREGATION_MODES, row_sums, spread
from trinity_buffer.errors import InvalidArgumentError

OF_ENTROPY = {"entropy_coef": 0.3}
DTYPES = [torch.float64, pytest.param(torch.float32, marks=pytest.mark.long)]  # ten seconds


def policy_loss(name: str, arguments: dict[str, Any]) -> Loss:
    loss_fn = make(name, arguments)

    def loss(batch: Batch, layout: BatchLayout) -> Tensor:
        tensors = {key: batch[key] for key in loss_fn.select_keys}
        return loss_fn(logprob=batch["logprob"], **tensors, layout=layout)[0]

    return loss


def kl_loss(name: str, mode: str, batch: Batch, layout: BatchLayout) -> Tensor:
    return KL_FN.get(name)(kl_coef=0.3).calculate_kl_loss(
        batch["logprob"],
        batch["ref_logprob"],
        batch["action_mask"],
        mode,
        batch["old_logprob"],
        layout=layout,
    )[0]


def entropy_loss(name: str, mode: str, batch: Batch, layout: BatchLayout) -> Tensor:
    mask, expert = batch["action_mask"], batch["expert_mask"]
    fn = ENTROPY_LOSS_FN.get(name)(entropy_coef=0.3)
    return fn(batch["entropy"], mask, expert, mode, layout=layout)[0]


CASES = [
    pytest.param(policy_loss(name, arguments), "logprob", id=label(name, arguments))
    for name, arguments in variants(every_mode=True)
    if not POLICY_LOSS_FN.get(name).per_microbatch
]
CASES += [
    pytest.param(partial(kl_loss, name, mode), "logprob", id=f"kl-{name}-{mode}")
    for name in KL_FN.names()
    if name != "none"
    for mode in AGGREGATION_MODES
]
CASES += [
    pytest.param(partial(entropy_loss, name, mode), "entropy", id=f"entropy-{name}-{mode}")
    for name in ENTROPY_LOSS_FN.names()
    if name != "none"
    for mode in AGGREGATION_MODES
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("loss", "leaf"), CASES)
def test_padded_packed_accumulated_and_parallel_runs_have_one_gradient(
    loss: Loss, leaf: str, dtype: torch.dtype
) -> None:
    step = make_step(dtype)
    value, gradient = step.gradient(loss, leaf, WHOLE, packed=False)
    for cut in [WHOLE, *CUTS.values()]:
        for packed in (False, True):
            other_value, other = step.gradient(loss, leaf, cut, packed=packed)
            assert_close(other, gradient)
            torch.testing.assert_close(other_value, value)


@pytest.mark.parametrize(
    ("name", "arguments"), [v for v in variants(every_mode=True) if not v[0].startswith("mix")]
)
def test_a_layout_of_the_batch_itself_changes_nothing(name: str, arguments: dict[str, Any]) -> None:
    step = make_step(torch.float64)
    batch, _ = step.microbatch(WHOLE[0][0], packed=False)
    loss_fn = make(name, arguments)
    tensors = {key: batch[key] for key in loss_fn.select_keys}
    layout = replace(step.layout(), normalizer=float(batch["logprob"].shape[-1]))
    torch.manual_seed(0)
    without, _ = loss_fn(logprob=batch["logprob"], **tensors)
    torch.manual_seed(0)
    with_layout, _ = loss_fn(logprob=batch["logprob"], **tensors, layout=layout)
    torch.testing.assert_close(with_layout, without, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("mode", [m for m in AGGREGATION_MODES if "sum-" not in m])
def test_usual_and_expert_rows_have_denominators_of_their_own(mode: str) -> None:
    step = make_step(torch.float64)
    batch, _ = step.microbatch(WHOLE[0][0], packed=False)
    expert, layout = batch["expert_mask"], step.layout()

    def alone(name: str, rows: Tensor) -> Tensor:
        loss_fn = make(name, POLICY_LOSS_FN.get(name).default_args() | {"loss_agg_mode": mode})
        tensors = {key: batch[key][rows] for key in ("logprob", *loss_fn.select_keys)}
        return loss_fn(**tensors)[0]

    expected = 0.9 * alone("ppo", ~expert) + 0.1 * alone("sft", expert)
    mixed = policy_loss("mix", {"mu": 0.1, "clip_range": 0.2, "loss_agg_mode": mode})
    torch.testing.assert_close(mixed(batch, layout), expected, rtol=1e-7, atol=1e-12)
    entropy = ENTROPY_LOSS_FN.get("mix")(0.3)
    arguments = (batch["entropy"], batch["action_mask"], expert, mode)
    bonus, of_the_step = entropy(*arguments)[0], entropy(*arguments, layout=layout)[0]
    torch.testing.assert_close(of_the_step, bonus, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", IMPORTANCE_CORRECTION.names())
def test_importance_weights_do_not_depend_on_the_cut(name: str) -> None:
    step, correction = make_step(torch.float64), IMPORTANCE_CORRECTION.get(name)()
    padded, _ = step.microbatch(WHOLE[0][0], packed=False)
    packed, cu_seqlens = step.microbatch(WHOLE[0][0], packed=True)
    keys = ("logprob", "old_logprob", "action_mask")
    expected, _ = correction(*(padded[key] for key in keys), layout=step.layout())
    layout = replace(step.layout(), cu_seqlens=cu_seqlens)
    actual, _ = correction(*(packed[key] for key in keys), layout=layout)
    torch.testing.assert_close(actual[packed["action_mask"]], expected[padded["action_mask"]])


def test_a_layout_counts_tokens_sequences_groups_and_kinds() -> None:
    layout = make_step(torch.float32).layout()
    assert (layout.global_tokens, layout.global_sequences, layout.global_groups) == (18, 8, 4)
    assert layout.total.active_sequences == 6
    assert layout.expert.sequences == 2
    assert layout.part("usual").global_tokens + layout.part("expert").global_tokens == 18
    step = make_step(torch.float32)
    packed, cu_seqlens = step.microbatch(WHOLE[0][0], packed=True)
    assert Totals.count(packed["action_mask"], cu_seqlens=cu_seqlens) == Totals(18, 8, 8, 6)


def test_dr_grpo_divides_by_the_constant_and_the_number_of_sequences() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 50.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    loss = aggregate_loss(values, mask, "seq-mean-token-sum-const", normalizer=4)
    assert float(loss) == pytest.approx((3.0 / 4 + 3.0 / 4) / 2)
    total = Totals(tokens=30, sequences=10, groups=5)
    layout = BatchLayout(total=total, usual=total, expert=total, normalizer=NORMALIZER)
    norm = aggregate_loss(values, mask, "seq-mean-token-sum-norm", layout=layout)
    assert float(norm) == pytest.approx(6.0 / NORMALIZER)
    argument_wins = aggregate_loss(
        values, mask, "seq-mean-token-sum-norm", normalizer=3, layout=layout
    )
    assert float(argument_wins) == pytest.approx(2.0)


def test_fully_masked_rows_count_unless_the_mode_says_active() -> None:
    values, mask = torch.ones(3, 2), torch.tensor([[1, 1], [1, 0], [0, 0]])
    assert float(aggregate_loss(values, mask, "seq-mean-token-sum")) == pytest.approx(1.0)
    assert float(aggregate_loss(values, mask, "active-seq-mean-token-sum")) == pytest.approx(1.5)
    assert float(aggregate_loss(values, mask, "active-seq-mean-token-mean")) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_one_row_may_lack_its_first_dimension(mode: str) -> None:
    values, mask = torch.rand(6), torch.tensor([0, 1, 1, 0, 1, 1])
    of_row = aggregate_loss(values[None], mask[None], mode)
    assert torch.equal(aggregate_loss(values, mask, mode), of_row)


def test_a_denominator_that_nobody_stated_is_refused() -> None:
    total = Totals(tokens=3, sequences=2, groups=1)
    layout = BatchLayout(total=total, usual=total, expert=total)
    values, mask = torch.ones(2, 2), torch.ones(2, 2)
    with pytest.raises(InvalidArgumentError, match="normalizer"):
        aggregate_loss(values, mask, "seq-mean-token-sum-norm", layout=layout)
    with pytest.raises(InvalidArgumentError, match="active_sequences"):
        aggregate_loss(values, mask, "active-seq-mean-token-sum", layout=layout)
    with pytest.raises(InvalidArgumentError, match="loss_agg_mode must be one of"):
        aggregate_loss(values, mask, "token-maen")
    with pytest.raises(InvalidArgumentError, match="expert_mask"):
        BatchLayout.of_step(mask, expert_mask=torch.zeros(3))


def test_an_empty_micro_batch_contributes_nothing() -> None:
    total = Totals(tokens=3, sequences=2, groups=1, active_sequences=2)
    layout = BatchLayout(total=total, usual=total, expert=total, normalizer=4.0)
    for mode in AGGREGATION_MODES:
        values = torch.ones(2, 3, requires_grad=True)
        loss = aggregate_loss(values, torch.zeros(2, 3), mode, layout=layout)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert values.grad is not None
        assert not values.grad.any()
        assert float(aggregate_loss(torch.ones(0, 3), torch.ones(0, 3), mode)) == 0.0


def test_sixteen_bit_losses_are_added_up_in_thirty_two() -> None:
    values = torch.full((1, 4096), 0.1, dtype=torch.bfloat16)
    loss = aggregate_loss(values, torch.ones(1, 4096), "token-mean")
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(values[0, 0]), rel=1e-5)


def test_rows_of_a_packed_batch_are_its_segments() -> None:
    total = Totals(tokens=5, sequences=3, groups=3)
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    layout = BatchLayout(total=total, usual=total, expert=total, cu_seqlens=cu_seqlens)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert row_sums(values, layout).tolist() == [3.0, 0.0, 12.0]
    assert spread(torch.tensor([7.0, 8.0, 9.0]), values, layout).tolist() == [7, 7, 9, 9, 9]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"loss_agg_mode": "seq-mean-token-mean", "entropy_loss_fn_args": OF_ENTROPY}),
        ("gspo", {"kl_loss_fn": "k3", "kl_loss_fn_args": {"kl_coef": 0.3}}),
        ("grpo", {"policy_loss_fn": "gmpo"}),
        ("dpo", {}),
        ("grpo", {"importance_correction": "sequence_tis"}),
    ],
)
def test_packed_rows_without_a_layout_are_the_step_as_padded_ones_are(
    name: str, options: dict[str, Any]
) -> None:
    algorithm, losses = build(name, **options), []
    for packed in (False, True):
        batch, ends = make_step(torch.float64).microbatch(range(8), packed=packed)
        batch |= {"rollout_logprob": batch["ref_logprob"]}
        batch |= {} if ends is None else {"cu_seqlens": ends}
        losses.append(algorithm.loss(batch["logprob"], batch, entropy=batch["entropy"])[0])
    assert_close(losses[1], losses[0])


def test_a_micro_batch_that_left_its_layout_behind_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    building.warn_of_copy.cache_clear()
    algorithm, step = build("grpo", kl_loss_fn="none"), make_step(torch.float64)
    batch, _ = step.microbatch([0, 1], packed=False)
    algorithm.loss(batch["logprob"], batch)
    batch["sample_index"] = torch.tensor([0, 1])
    algorithm.loss(batch["logprob"], batch, layout=step.layout())
    assert not caplog.messages
    for _ in range(2):
        algorithm.loss(batch["logprob"], batch)
    assert ["give layout=microbatch.layout" in line for line in caplog.messages] == [True]


def test_experts_of_a_packed_dict_may_be_told_for_each_token() -> None:
    algorithm = build("mix", kl_loss_fn="none", policy_loss_fn_args={"mu": 0.3})
    batch, ends = make_step(torch.float64).microbatch(range(8), packed=True)
    assert ends is not None
    by_row = torch.arange(8) % 2 == 0
    losses = [
        algorithm.loss(batch["logprob"], batch | {"cu_seqlens": ends, "expert_mask": told})[0]
        for told in (by_row, by_row.repeat_interleave(ends.diff()))
    ]
    assert_close(losses[1], losses[0])


def test_a_dict_whose_tokens_are_one_row_has_that_row_alone() -> None:
    batch, ends = make_step(torch.float64).microbatch(range(8), packed=True)
    one_row = {name: value[None] for name, value in batch.items()}
    assert ends is not None
    losses = [
        build("sft").loss(of["logprob"], of | {"cu_seqlens": ends})[0] for of in (batch, one_row)
    ]
    assert_close(losses[1], losses[0])
    with pytest.raises(InvalidArgumentError, match="needs the tensor 'action_mask'"):
        build("sft").loss(batch["logprob"], {"cu_seqlens": ends})
