"""Each loss on two rows of three tokens, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trinity_buffer.algorithm import (
    ENTROPY_LOSS_FN,
    IMPORTANCE_CORRECTION,
    KL_FN,
    POLICY_LOSS_FN,
    IcePop,
    MIXCHORDPolicyLossFn,
    SAPOPolicyLossFn,
    TokenTIS,
)
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import InvalidArgumentError

# Ratios 2, 0.5, 1 | 1, (masked), (masked); everything else hidden is nonsense.
RATIOS = torch.tensor([[2.0, 0.5, 1.0], [1.0, 9.0, 9.0]], dtype=torch.float64)
LOGPROB = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, 3.0, 3.0]], dtype=torch.float64)
BATCH = {
    "old_logprob": LOGPROB - RATIOS.log(),
    "ref_logprob": LOGPROB - torch.tensor([[0.1, 0.2, 0.3], [0.5, 7.0, 7.0]], dtype=torch.float64),
    "action_mask": torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool),
    "advantages": torch.tensor([[1.0, -2.0, 0.5], [-1.0, 8.0, 8.0]], dtype=torch.float64),
    "expert_mask": torch.tensor([False, True]),
    "step": torch.tensor([2, 2]),
}
MEAN = (2.0 * 0.5 * 1.0) ** (1 / 3)  # geometric mean of the ratios of row 0


def call(name: str, **arguments: Any) -> tuple[float, dict[str, float], Tensor]:
    loss_fn = POLICY_LOSS_FN.get(name)(backend="trinity", **arguments)
    logprob = LOGPROB.clone().requires_grad_()
    tensors = {key: BATCH[key] for key in loss_fn.select_keys}
    loss, metrics = loss_fn(logprob=logprob, **tensors)
    loss.backward()
    assert logprob.grad is not None
    return float(loss.detach()), {k: float(v) for k, v in metrics.items()}, logprob.grad


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def gate(ratio: float, tau: float) -> float:
    return 4.0 / tau * sigmoid(tau * (ratio - 1.0))


# Token losses of row 0, then of the one token of row 1; the loss is the mean of these four.
BY_TOKEN: list[tuple[str, dict[str, Any], list[float]]] = [
    ("ppo", {"clip_range": 0.2}, [-1.2, 1.6, -0.5, 1.0]),
    ("ppo", {"clip_range_low": 0.6, "clip_range_high": 1.5}, [-2.0, 1.0, -0.5, 1.0]),
    ("ppo", {"clip_range": 0.2, "fallback_to_policy_gradient": True}, [-1.0, 2.0, -0.5, 1.0]),
    # row 0 has drifted by -(ln 2 - ln 2 + 0) / 3 = 0, row 1 by 0: both above -0.1
    (
        "ppo",
        {"clip_range": 0.2, "enable_sequence_masking": True, "delta_sequence_masking": -0.1},
        [-1.2, 0.0, -0.5, 0.0],
    ),
    ("opmd", {"tau": 1.0}, [0.5, -2.0, 0.125, -0.75]),
    ("sft", {}, [1.0, 2.0, 0.5, 1.5]),
    ("sft_is", {}, [e * math.exp(-e) for e in (1.0, 2.0, 0.5, 1.5)]),
    ("sft_phi", {}, [e * math.exp(-e) * (1 - math.exp(-e)) for e in (1.0, 2.0, 0.5, 1.5)]),
    ("importance_sampling", {}, [-2.0, 1.0, -0.5, 1.0]),
    ("cispo", {}, [1.28 * 1.0, -2.0 * 0.5 * 2.0, 0.25, -1.5]),
    ("topr", {}, [1.0, -2.0 * 0.5 * 2.0, 0.25, -1.5]),
    ("sppo", {"epsilon": 0.3}, [0.0, 0.0, 0.0, 0.0]),
    ("sppo", {"epsilon": 1.5}, [-math.log(2), -2.0 * math.log(2), 0.0, 0.0]),
    ("rec", {}, [1.0, -4.0, 0.25, -1.5]),
    ("rec", {"clip_mode": "two-side"}, [0.0, 0.0, 0.25, -1.5]),
    ("rec", {"clip_mode": "one-side"}, [0.0, 0.0, 0.25, -1.5]),
    ("rec", {"weight": "importance_sampling"}, [2.0, -2.0, 0.25, -1.5]),
    ("rec", {"weight": "gspo_importance_sampling"}, [MEAN, -4.0 * MEAN, 0.25 * MEAN, -1.5]),
    (
        "rec",
        {"regularizer": "k2", "regularizer_coef": 0.5},
        [1.0 + 0.5 * math.log(2) ** 2, -4.0 + 0.5 * math.log(2) ** 2, 0.25, -1.5],
    ),
    ("sapo", {}, [-gate(2.0, 1.0), 2.0 * gate(0.5, 1.05), -0.5 * gate(1, 1), gate(1, 1.05)]),
    ("kl_cov", {"kl_cov_ratio": 0.25}, [-2.0 + math.log(2), 1.0, -0.5, 1.0]),
]


@pytest.mark.parametrize(("name", "arguments", "tokens"), BY_TOKEN)
def test_the_token_mean_of_a_loss_worked_out_by_hand(
    name: str, arguments: dict[str, Any], tokens: list[float]
) -> None:
    loss, _, _ = call(name, **arguments)
    assert loss == pytest.approx(sum(tokens) / 4, rel=1e-7, abs=1e-9)


def test_gspo_and_gmpo_worked_out_by_hand() -> None:
    means = [MEAN * (1.0 - 2.0 + 0.5) / 3, -1.0]
    loss, metrics, _ = call("gspo", clip_range=0.2)
    assert loss == pytest.approx(-(means[0] + means[1]) / 2)
    assert metrics["ppo_kl_seq"] == pytest.approx(-math.log(MEAN) / 2, abs=1e-9)
    # GMPO: the first token is cut to +0.4, the second (A < 0) to -0.4, the third is 0
    loss, _, gradient = call("gmpo")
    assert loss == pytest.approx(-((1.0 - 2.0 + 0.5) / 3 - 1.0) / 2)
    assert gradient[0, :2].tolist() == [0.0, 0.0]


WHOLE_BATCH: dict[str, Any] = {"backend": "trinity", "per_pair": False}


def test_dpo_compares_each_pair_and_the_reference_the_sum() -> None:
    chosen, rejected = 0.1 * (0.1 + 0.2 + 0.3), 0.1 * 0.5
    loss, metrics, _ = call("dpo", beta=0.1)
    assert loss == pytest.approx(-math.log(sigmoid(chosen - rejected)))
    assert metrics["accuracy_mean"] == 1.0
    assert metrics["chosen_reward"] == pytest.approx(chosen)
    pairs = {k: torch.cat([v, v.flip(0)]) for k, v in BATCH.items()}
    two = {"logprob": torch.cat([LOGPROB, LOGPROB.flip(0)]), "ref_logprob": pairs["ref_logprob"]}
    dpo = POLICY_LOSS_FN.get("dpo")
    both, _ = dpo(backend="trinity")(**two, action_mask=pairs["action_mask"])
    margin = chosen - rejected
    expected = -(math.log(sigmoid(margin)) + math.log(sigmoid(-margin))) / 2
    assert float(both) == pytest.approx(expected)
    summed, _ = dpo(**WHOLE_BATCH)(**two, action_mask=pairs["action_mask"])
    assert float(summed) == pytest.approx(math.log(2.0))


def test_mix_weighs_its_two_kinds_and_chord_schedules_the_weight() -> None:
    ppo, sft = (-1.2 + 1.6 - 0.5) / 3, 1.5
    loss, metrics, _ = call("mix", mu=0.25, clip_range=0.2)
    assert loss == pytest.approx(0.75 * ppo + 0.25 * sft)
    assert metrics["usual/pg_loss"] == pytest.approx(ppo)
    loss, metrics, _ = call("mix_chord", clip_range=0.2, mu_warmup_steps=4, mu_peak=0.8)
    phi = 1.5 * math.exp(-1.5) * (1 - math.exp(-1.5))
    assert metrics["mu"] == pytest.approx(0.4)
    assert loss == pytest.approx(0.6 * ppo + 0.4 * phi)


def test_the_share_of_an_expert_rises_falls_and_settles() -> None:
    chord = MIXCHORDPolicyLossFn(
        clip_range=0.2, mu_warmup_steps=2, mu_decay_steps=4, mu_peak=0.8, mu_valley=0.2
    )
    mu = chord.mu_schedule(torch.arange(8)).tolist()
    assert mu == pytest.approx([0.0, 0.4, 0.8, 0.7121, 0.5, 0.2879, 0.2, 0.2], abs=1e-4)


def test_rows_that_disagree_about_the_step_are_refused() -> None:
    chord = MIXCHORDPolicyLossFn(backend="trinity", clip_range=0.2)
    old, mask, advantages = (BATCH[k] for k in ("old_logprob", "action_mask", "advantages"))
    with pytest.raises(InvalidArgumentError, match="step"):
        chord(LOGPROB, old, mask, advantages, BATCH["expert_mask"], torch.tensor([1, 2]))


def test_a_soft_gate_fades_where_the_references_grows() -> None:
    """At r = 8 a token pulls less than at r = 1; with the detached gate it pulls more."""
    advantages = torch.ones(1, 2, dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    for detach, fades in ((False, True), (True, False)):
        logprob = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
        old = torch.tensor([[-1.0, -1.0 - math.log(8)]], dtype=torch.float64)
        sapo = SAPOPolicyLossFn(backend="trinity", detach_gate=detach)
        loss, _ = sapo(logprob, old, mask, advantages)
        loss.backward()
        assert logprob.grad is not None
        on_policy, drifted = (-2.0 * logprob.grad[0]).tolist()
        assert (drifted < on_policy) is fades
        assert on_policy == pytest.approx(1.0 if fades else 2.0)
    gates = SAPOPolicyLossFn().soft_gate_function(torch.ones(2), torch.tensor([1.0, -1.0]))
    assert gates.tolist() == pytest.approx([2.0, 2.0 / 1.05])


def test_clip_cov_holds_the_tokens_it_draws_and_no_others() -> None:
    torch.manual_seed(0)
    loss, metrics, gradient = call(
        "clip_cov", clip_range=5.0, clip_cov_ratio=0.5, clip_cov_lb=-9.0, clip_cov_ub=9.0
    )
    assert metrics["cov_frac"] == pytest.approx(0.5)
    assert int((gradient[BATCH["action_mask"]] == 0.0).sum()) == 2
    _, metrics, _ = call("clip_cov", clip_range=0.2, clip_cov_lb=8.0, clip_cov_ub=9.0)
    assert metrics["cov_frac"] == 0.0
    assert math.isfinite(loss)


KL = {
    "k1": [0.1, 0.2, 0.3, 0.5],
    "k2": [0.005, 0.02, 0.045, 0.125],
    "k3": [math.exp(-x) - 1 + x for x in (0.1, 0.2, 0.3, 0.5)],
    "low_var_kl": [math.exp(-x) - 1 + x for x in (0.1, 0.2, 0.3, 0.5)],
    "abs": [0.1, 0.2, 0.3, 0.5],
    "corrected_k3": [
        w * (math.exp(-x) - 1 + x) for w, x in ((2.0, 0.1), (0.5, 0.2), (1.0, 0.3), (1.0, 0.5))
    ],
    "none": [0.0],
}


@pytest.mark.parametrize("name", KL_FN.names())
def test_a_kl_loss_worked_out_by_hand(name: str) -> None:
    loss, metrics = KL_FN.get(name)(kl_coef=0.5).calculate_kl_loss(
        LOGPROB, BATCH["ref_logprob"], BATCH["action_mask"], old_logprob=BATCH["old_logprob"]
    )
    mean = sum(KL[name]) / 4
    assert float(loss) == pytest.approx(0.5 * mean)
    if name != "none":
        assert float(metrics["kl_loss"]) == pytest.approx(mean)


def test_an_adaptive_coefficient_moves_towards_its_target() -> None:
    kl = KL_FN.get("k1")(adaptive=True, kl_coef=0.1, target_kl=0.5, horizon=10)
    kl.update_kl_coef(0.55, 5)
    assert kl.kl_coef == pytest.approx(0.1 * 1.05)
    kl.update_kl_coef(torch.tensor(50.0), 5)  # cut to +0.2
    assert kl.kl_coef == pytest.approx(0.1 * 1.05 * 1.1)
    fixed = KL_FN.get("k1")(kl_coef=0.1)
    fixed.update_kl_coef(9.0, 5)
    assert fixed.kl_coef == 0.1
    with pytest.raises(InvalidArgumentError, match="horizon"):
        KL_FN.get("k1")(adaptive=True)


@pytest.mark.parametrize(
    "names",
    [
        ("old_log_probs", "ref_log_prob", "response_mask"),
        ("old_logprob", "ref_logprob", "action_mask"),
    ],
)
def test_a_kl_penalty_lowers_rewards_token_by_token(names: tuple[str, ...]) -> None:
    old, ref, mask = names
    batch = {
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]]).double(),
        old: LOGPROB,
        ref: BATCH["ref_logprob"],
        mask: BATCH["action_mask"],
    }
    _, metrics = KL_FN.get("k1")(kl_coef=0.5).apply_kl_penalty_to_reward(batch)
    expected = [[-0.05, -0.1, 0.85], [1.75, 0.0, 0.0]]
    assert batch["token_level_rewards"].tolist() == [pytest.approx(row) for row in expected]
    assert float(metrics["kl"]) == pytest.approx((0.2 + 0.5) / 2)
    del batch[ref]
    with pytest.raises(InvalidArgumentError, match="ref_log_prob"):
        KL_FN.get("k1")().apply_kl_penalty_to_reward(batch)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_kl_penalty_leaves_out_the_rows_of_an_expert(is_packed: bool, by_token: bool) -> None:
    expert = BATCH["expert_mask"]
    batch = {
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]]).double(),
        "old_logprob": LOGPROB,
        "ref_logprob": BATCH["ref_logprob"],
        "action_mask": BATCH["action_mask"],
        "expert_mask": expert[:, None].expand_as(LOGPROB) if by_token else expert,
    }
    layout = None
    if is_packed:
        batch = {
            name: value if value is expert else value.flatten() for name, value in batch.items()
        }
        limits = torch.tensor([0, 3, 6])
        layout = BatchLayout.of_step(batch["action_mask"], cu_seqlens=limits, expert_mask=expert)
    kl = KL_FN.get("k1")(kl_coef=0.5, adaptive=True, target_kl=0.1, horizon=10.0)
    _, metrics = kl.apply_kl_penalty_to_reward(batch, layout=layout)
    wanted = [-0.05, -0.1, 0.85, 2.0, 0.0, 0.0]
    assert batch["token_level_rewards"].flatten().tolist() == pytest.approx(wanted)
    assert float(metrics["kl"]) == pytest.approx(0.2)
    assert kl.kl_coef == pytest.approx(0.5 * (1 + 0.2 * 1 / 10)), "of one row"
    batch["expert_mask"] = torch.ones_like(batch["expert_mask"])
    _, metrics = kl.apply_kl_penalty_to_reward(batch, layout=layout)
    assert float(metrics["kl"]) == 0.0
    assert kl.kl_coef == pytest.approx(0.51)


def test_an_entropy_bonus_counts_all_rows_or_the_usual_ones() -> None:
    entropy = torch.tensor([[1.0, 2.0, 3.0], [6.0, 99.0, 99.0]])
    arguments = (entropy, BATCH["action_mask"], BATCH["expert_mask"])
    assert float(ENTROPY_LOSS_FN.get("default")(0.5)(*arguments)[0]) == pytest.approx(1.5)
    assert float(ENTROPY_LOSS_FN.get("mix")(0.5)(*arguments)[0]) == pytest.approx(1.0)
    assert float(ENTROPY_LOSS_FN.get("none")(0.5)(*arguments)[0]) == 0.0
    only_expert = (entropy, BATCH["action_mask"], torch.tensor([True, True]))
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert float(ENTROPY_LOSS_FN.get("mix")(0.5)(*only_expert, mode)[0]) == 0.0
    with pytest.raises(InvalidArgumentError, match="expert_mask"):
        ENTROPY_LOSS_FN.get("mix")(0.5)(entropy, BATCH["action_mask"])


CORRECTIONS = [
    ("none", {}, [1.0, 1.0, 1.0, 1.0]),
    ("token_tis", {"cap": 1.5}, [1.5, 0.5, 1.0, 1.0]),
    ("sequence_tis", {}, [1.0, 1.0, 1.0, 1.0]),
    ("token_mis", {"cap": 1.5}, [0.0, 0.5, 1.0, 1.0]),
    ("sequence_mis", {"cap": 0.9}, [0.0, 0.0, 0.0, 0.0]),
    ("icepop", {"low": 0.6, "high": 5.0}, [2.0, 0.0, 1.0, 1.0]),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), CORRECTIONS)
def test_importance_weights_worked_out_by_hand(
    name: str, arguments: dict[str, float], expected: list[float]
) -> None:
    correction = IMPORTANCE_CORRECTION.get(name)(**arguments)
    mask = BATCH["action_mask"]
    rollout = BATCH["old_logprob"].masked_fill(~mask, float("nan"))
    weights, metrics = correction(LOGPROB, rollout, mask)
    assert weights[mask].tolist() == pytest.approx(expected)
    assert not weights[~mask].any()
    assert float(metrics["rollout_is/weight"]) == pytest.approx(sum(expected) / 4)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("ppo", {}, "clip_range"),
    ("ppo", {"clip_range_low": 0.2}, "clip_range_high"),
    ("ppo", {"clip_range": 0.2, "clip_ratio_c": 1.0}, "clip_ratio_c"),
    ("ppo", {"clip_range": 0.2, "backend": "verrl"}, "did you mean 'verl'"),
    ("gspo", {"clip_range": 0.2, "loss_agg_mode": "token-sum"}, "loss_agg_mode"),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 1.0}, "tau_neg"),
    ("sft_phi", {"cutoff_prob": 0.0}, "cutoff_prob"),
    ("mix", {"clip_range": 0.2, "ngpus_trainer": 2}, "ngpus_trainer"),
    ("mix", {"clip_range": 0.2, "ppo_micro_batch_size_per_gpu": 0}, "ppo_micro_batch_size_per_gpu"),
    ("rec", {"clip_mode": "bad"}, "clip_mode"),
    ("rec", {"epsilon_low": 0.0}, "epsilon_low"),
    ("sppo", {"epsilon": -0.1}, "epsilon"),
    ("opmd", {"tau": -1.0}, "tau"),
]


@pytest.mark.parametrize(("name", "arguments", "named"), REFUSED)
def test_an_argument_that_cannot_be_right_is_refused_by_name(
    name: str, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        POLICY_LOSS_FN.get(name)(**arguments)


def test_an_odd_number_of_rows_is_no_pairs() -> None:
    dpo = POLICY_LOSS_FN.get("dpo")(backend="trinity")
    mask = torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(InvalidArgumentError, match="pairs"):
        dpo(torch.zeros(3, 3), torch.zeros(3, 3), mask)


def test_an_importance_correction_refuses_limits_that_cannot_be_right() -> None:
    with pytest.raises(InvalidArgumentError, match="cap"):
        TokenTIS(cap=0.0)
    with pytest.raises(InvalidArgumentError, match="low"):
        IcePop(low=2.0, high=1.0)
