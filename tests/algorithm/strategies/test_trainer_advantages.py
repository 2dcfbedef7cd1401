from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.two_ranks import RankOfTwo
from trinity_buffer.algorithm import ADVANTAGE_FN
from trinity_buffer.algorithm.advantage_fn import (
    ClipBAdvantageFn,
    ClipVAdvantageFn,
    GRPOAdvantageFn,
    JSDAdvantage,
    OnPolicyDistillAdvantage,
    PPOAdvantageFn,
    REINFORCEPLUSPLUSAdvantageFn,
    REMAXAdvantageFn,
    RLOOAdvantageFn,
)
from trinity_buffer.algorithm.advantage_fn.token_scores import (
    discounted_returns,
    entropy_change,
    expected_entropy_change,
    generalized_advantages,
)
from trinity_buffer.errors import InvalidArgumentError

TRAINER = [name for name in ADVANTAGE_FN.names() if ADVANTAGE_FN.get(name).compute_in_trainer()]
WIDTHS = (4, 2, 3, 5)
VERL = {
    "action_mask": "response_mask",
    "old_logprob": "old_log_probs",
    "rollout_logprob": "rollout_log_probs",
    "teacher_logprob": "teacher_logprobs",
    "entropy": "entropys",
    "group_index": "uid",
}


def step(seed: int = 0, **fixed: Any) -> dict[str, Any]:
    """Return a padded batch of four rows in two groups, under our names."""
    draw = torch.Generator().manual_seed(seed)
    rows, width = len(WIDTHS), max(WIDTHS)
    mask = torch.arange(width) < torch.tensor(WIDTHS).unsqueeze(-1)
    mask[:, 0] = False  # the prompt
    mask[3, 2] = False  # a token of the environment
    columns = {
        name: torch.rand(rows, width, generator=draw) * scale
        for name, scale in {
            "token_level_rewards": 1.0,
            "values": 1.0,
            "old_logprob": -2.0,
            "rollout_logprob": -2.0,
            "teacher_logprob": -2.0,
            "entropy": 2.0,
            "necs": 0.5,
        }.items()
    }
    columns["token_level_rewards"] = columns["token_level_rewards"].where(mask, 0.0)
    return {
        **columns,
        "action_mask": mask,
        "reward_baselines": torch.rand(rows, generator=draw),
        "group_index": torch.tensor([0, 0, 1, 1], dtype=torch.int32),
        **fixed,
    }


def packed(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the same batch without padding."""
    keep = [torch.arange(max(WIDTHS)) < width for width in WIDTHS]
    flat = {
        name: torch.cat([row[k] for row, k in zip(value, keep, strict=True)])
        for name, value in batch.items()
        if value.dim() == 2
    }
    ends = torch.tensor([0, *WIDTHS]).cumsum(0).to(torch.int32)
    rows = {name: value for name, value in batch.items() if value.dim() == 1}
    return {**rows, **flat, "cu_seqlens": ends}


@pytest.mark.parametrize("name", TRAINER)
def test_both_vocabularies_give_the_same(name: str) -> None:
    ours, _ = ADVANTAGE_FN.get(name)()(step())
    theirs = {VERL.get(key, key): value for key, value in step().items()}
    theirs["uid"] = [str(i) for i in theirs["uid"].tolist()]
    theirs, _ = ADVANTAGE_FN.get(name)()(theirs)
    assert torch.equal(ours["advantages"], theirs["advantages"])
    assert torch.equal(ours["returns"], theirs["returns"])
    assert torch.equal(ours["action_mask"], theirs["response_mask"])


@pytest.mark.parametrize("name", TRAINER)
def test_a_packed_batch_gives_the_same_as_a_padded_one(name: str) -> None:
    padded, metrics = ADVANTAGE_FN.get(name)()(step())
    flat, flat_metrics = ADVANTAGE_FN.get(name)()(packed(step()))
    for column in ("advantages", "returns", "action_mask"):
        assert torch.allclose(packed({column: padded[column]})[column], flat[column], atol=1e-6)
    assert {k: float(v) for k, v in flat_metrics.items()} == pytest.approx(
        {k: float(v) for k, v in metrics.items()}, abs=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("name", TRAINER)
def test_columns_of_few_digits_have_advantages_of_many(name: str, dtype: torch.dtype) -> None:
    columns = ("token_level_rewards", "values", "teacher_logprob")
    rough = step()
    rough |= {key: (8 * rough[key]).to(dtype) for key in columns}
    exact = rough | {key: rough[key].float() for key in columns}
    for batch in (rough, exact):
        ADVANTAGE_FN.get(name)()(batch)
    for key in ("advantages", "returns"):
        assert rough[key].dtype == torch.float32
        assert torch.equal(rough[key], exact[key])


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("name", TRAINER)
def test_rows_of_an_expert_do_not_matter_and_keep_their_mask(name: str, by_token: bool) -> None:
    mixed, own = step(group_index=torch.tensor([0, 0, 1, 2])), slice(3)
    of_rows = torch.tensor([False, False, False, True])
    mask = mixed["action_mask"].clone()
    mixed["expert_mask"] = of_rows.unsqueeze(-1).expand_as(mask) if by_token else of_rows
    make: Any = ADVANTAGE_FN.get(name)
    fn = make(mu=-1.0, max_frac=1.0) if name == "clipv" else make()
    alone, _ = fn({key: value[own] for key, value in mixed.items()})
    flat, _ = fn(packed(mixed))
    fn(mixed)
    for column in ("advantages", "returns", "action_mask"):
        assert torch.equal(mixed[column][own], alone[column])
        assert torch.allclose(packed(mixed)[column], flat[column], atol=1e-6)
    assert not mixed["advantages"][3].any()
    assert torch.equal(mixed["action_mask"][3], mask[3])


@pytest.mark.parametrize("name", TRAINER)
def test_what_lies_outside_the_mask_does_not_matter(name: str) -> None:
    clean, _ = ADVANTAGE_FN.get(name)()(step())
    dirty = step()
    for key in ("values", "old_logprob", "rollout_logprob", "teacher_logprob", "entropy", "necs"):
        dirty[key] = dirty[key].where(dirty["action_mask"], math.nan)
    dirty, _ = ADVANTAGE_FN.get(name)()(dirty)
    assert torch.equal(clean["advantages"], dirty["advantages"])
    assert not clean["advantages"][~step()["action_mask"]].any()


@pytest.mark.parametrize("name", TRAINER)
def test_a_step_without_action_tokens_has_no_advantages(name: str) -> None:
    batch = step()
    batch["action_mask"] = torch.zeros_like(batch["action_mask"])
    found, metrics = ADVANTAGE_FN.get(name)()(batch)
    assert not found["advantages"].any()
    assert all(math.isfinite(float(value)) for value in metrics.values())


@pytest.mark.parametrize("name", ["ppo", "reinforceplusplus", "clipb"])
def test_ranks_that_sum_their_statistics_find_what_one_rank_finds(name: str) -> None:
    whole, _ = ADVANTAGE_FN.get(name)()(step())
    halves = [{key: value[rows] for key, value in step().items()} for rows in ([0, 1], [2, 3])]
    # What the other rank says, call by call: recorded in a dry run of as many rounds as there are.
    said: list[list[torch.Tensor]] = [[], []]
    for _ in range(3):
        recorded: list[list[torch.Tensor]] = [[], []]
        for rank, half in enumerate(halves):
            others = iter(said[1 - rank])

            def total(
                value: Tensor, others: Any = others, recorded: Any = recorded[rank]
            ) -> Tensor:
                recorded.append(value.clone())
                return value + next(others, torch.zeros_like(value))

            batch = dict(half)
            ADVANTAGE_FN.get(name)()(batch, reduce=total)
            half["found"] = batch["advantages"]
            half["mask"] = batch["action_mask"]
        said = recorded
    found = torch.cat([half["found"] for half in halves])
    mask = torch.cat([half["mask"] for half in halves])
    assert torch.allclose(found, whole["advantages"], atol=1e-6)
    assert torch.equal(mask, whole["action_mask"])


@pytest.mark.parametrize("cut", [[0, 1], [2, 3]])
def test_ranks_drop_as_many_tokens_as_one_rank_drops(cut: list[int]) -> None:
    """Of all ranks together the two largest go, negative numbers behind positive ones."""
    clip = ClipVAdvantageFn(mu=-1.0, max_frac=0.25)
    whole, rest = step(), [row for row in range(len(WIDTHS)) if row not in cut]
    whole["token_level_rewards"] = torch.zeros_like(whole["values"])
    whole["token_level_rewards"][::2, 1] = 1.0  # one good answer in each group
    halves = [{key: value[rows] for key, value in whole.items()} for rows in (cut, rest)]
    ranks = RankOfTwo.pair()
    clip(whole)
    with ThreadPoolExecutor(2) as threads:
        works = [
            threads.submit(clip, half, reduce=rank.sum)
            for half, rank in zip(halves, ranks, strict=True)
        ]
        found = torch.cat([work.result()[0]["action_mask"] for work in works])
    assert int((step()["action_mask"] & ~whole["action_mask"]).sum()) == 2
    assert torch.equal(found, whole["action_mask"][[*cut, *rest]])


def test_generalized_advantages_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.5]])
    found = generalized_advantages(rewards, values, gamma=0.5, lam=0.5)
    # deltas: .5*.25-.5 = -.375; .5*.5-.25 = 0; 1-.5 = .5
    assert found.tolist() == [[-0.375 + 0.25 * 0.125, 0.125, 0.5]]


def test_time_passes_only_at_action_tokens() -> None:
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    holes = [[True, False, True, False]]
    spread_rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    spread_values = torch.tensor([[0.5, 9.0, 0.25, 9.0]])
    dense = generalized_advantages(rewards, values, 0.9, 0.8)
    sparse = generalized_advantages(spread_rewards, spread_values, 0.9, 0.8, torch.tensor(holes))
    assert torch.allclose(sparse[:, [0, 2]], dense)
    assert not sparse[:, [1, 3]].any()


def test_a_reward_on_a_token_of_the_environment_counts_for_the_action_before_it() -> None:
    mask = torch.tensor([[True, False, True]])
    late = discounted_returns(torch.tensor([[0.0, 2.0, 1.0]]), 0.5, mask)
    early = discounted_returns(torch.tensor([[2.0, 0.0, 1.0]]), 0.5, mask)
    assert torch.equal(late, early)
    assert late.tolist() == [[2.5, 0.0, 1.0]]


def test_ppo_counts_a_reward_on_a_token_of_the_environment_for_the_action_before_it() -> None:
    mask = torch.tensor([[True, False, True]])
    values = torch.tensor([[0.5, 9.0, 0.25]])
    late, early = (
        generalized_advantages(torch.tensor([rewards]), values, 0.9, 0.8, mask)
        for rewards in ([0.0, 2.0, 1.0], [2.0, 0.0, 1.0])
    )
    assert torch.equal(late, early)


def test_ppo_returns_are_what_the_critic_should_have_said() -> None:
    batch, _ = PPOAdvantageFn(gamma=1.0, lam=1.0)(step())
    rewards, mask = batch["token_level_rewards"], batch["action_mask"]
    assert torch.allclose(batch["returns"], discounted_returns(rewards, 1.0, mask), atol=1e-6)


@pytest.mark.parametrize("cls", [PPOAdvantageFn, REINFORCEPLUSPLUSAdvantageFn])
def test_whitened_advantages_have_mean_0_and_deviation_1(cls: type[Any]) -> None:
    batch, _ = cls()(step())
    chosen = batch["advantages"][batch["action_mask"]]
    assert float(chosen.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(chosen.std()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("cls", [PPOAdvantageFn, REINFORCEPLUSPLUSAdvantageFn])
def test_one_action_token_alone_has_advantage_0(cls: type[Any]) -> None:
    batch = step()
    batch["action_mask"] = torch.zeros_like(batch["action_mask"])
    batch["action_mask"][0, 1] = True
    assert not cls()(batch)[0]["advantages"].any()
    with pytest.raises(ValueError, match="at least two"):
        cls(mask_aware=False)(batch)


def last_rewards(rewards: Any) -> dict[str, Any]:
    """Return a batch with one reward per row, on its last token."""
    batch = step()
    batch["token_level_rewards"] = torch.zeros_like(batch["token_level_rewards"])
    batch["token_level_rewards"][torch.arange(4), torch.tensor(WIDTHS) - 1] = torch.tensor(rewards)
    return batch


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    batch, _ = RLOOAdvantageFn()(last_rewards([1.0, 0.0, 5.0, 2.0]))
    assert batch["advantages"].max(-1).values.tolist() == [1.0, 0.0, 3.0, 0.0]
    assert batch["advantages"].min(-1).values.tolist() == [0.0, -1.0, 0.0, -3.0]


def test_remax_compares_with_the_greedy_answer() -> None:
    batch = last_rewards([1.0, 0.0, 5.0, 2.0])
    batch["reward_baselines"] = torch.tensor([0.5, 0.5, 5.0, 2.0])
    found, _ = REMAXAdvantageFn()(batch)
    assert found["advantages"][0].tolist() == [0.0, 0.5, 0.5, 0.5, 0.0]
    assert found["advantages"][1].tolist() == [0.0, -0.5, 0.0, 0.0, 0.0]
    assert not found["advantages"][2:].any()


def test_grpo_in_the_trainer_scores_rows_by_their_group() -> None:
    batch, _ = GRPOAdvantageFn(epsilon=0.0)(last_rewards([0.0, 2.0, 1.0, 1.0]))
    half = 2**-0.5
    assert batch["advantages"][0].tolist() == pytest.approx([0.0, -half, -half, -half, 0.0])
    assert batch["advantages"][1, 1].item() == pytest.approx(half)
    assert not batch["advantages"][2:].any()


def test_distillation_pulls_towards_the_teacher() -> None:
    batch = step()
    found, metrics = OnPolicyDistillAdvantage(kl_coef=0.5)(batch)
    gap = 0.5 * (batch["teacher_logprob"] - batch["old_logprob"])
    assert torch.allclose(found["advantages"], gap.where(batch["action_mask"], 0.0))
    assert set(metrics) == {"kl/mean", "kl/std", "advantages/mean"}


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergence_advantages_are_the_gradient_of_the_divergence(weight: float) -> None:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=draw, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, generator=draw, dtype=torch.float64).log_softmax(-1)
    student = logits.log_softmax(-1)
    p, q = teacher.exp(), student.exp()
    mixed = (1 - weight) * q + weight * p
    forward = (p * (teacher - mixed.log())).sum()
    reverse = (q * (student - mixed.log())).sum()
    divergence = {0.0: (q * (student - teacher)).sum(), 1.0: (p * (teacher - student)).sum()}.get(
        weight, weight * forward + (1 - weight) * reverse
    )
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    batch = {
        "action_mask": torch.ones(1, 6, dtype=torch.bool),
        "old_logprob": student.detach().unsqueeze(0),
        "teacher_logprob": teacher.unsqueeze(0),
    }
    found, metrics = JSDAdvantage(lambda_coef=weight)(batch)
    # the policy gradient of every token, weighted by how often it is sampled
    surrogate = (q.detach() * found["advantages"][0] * student).sum()
    (actual,) = torch.autograd.grad(surrogate, logits)
    assert torch.allclose(actual, -expected, atol=1e-10)
    if weight > 0:
        assert float(metrics["jsd/mean"]) >= 0


def test_divergence_advantages_never_reward_leaving_the_teacher_and_the_references_do() -> None:
    gap = step()["old_logprob"] - step()["teacher_logprob"]
    away = step()["action_mask"] & (gap > 0)
    found, _ = JSDAdvantage()(step())
    assert (found["advantages"][away] < 0).all()
    theirs, _ = JSDAdvantage(estimator="log_ratio")(step())
    assert (theirs["advantages"][away] > 0).all()


def test_divergence_advantages_stay_finite_where_the_student_is_sure() -> None:
    batch = step()
    batch["old_logprob"] = torch.full_like(batch["old_logprob"], -1e4)
    for weight in (0.5, 1.0):
        found, _ = JSDAdvantage(lambda_coef=weight)(dict(batch))
        assert torch.isfinite(found["advantages"]).all()


def test_clip_b_drops_the_tokens_of_bad_answers_that_move_entropy_most() -> None:
    batch = last_rewards([0.0, 2.0, 1.0, 1.0])
    batch["rollout_logprob"] = torch.full_like(batch["rollout_logprob"], -1.0)
    batch["entropy"] = torch.ones_like(batch["entropy"])
    batch["rollout_logprob"][0, 2] = -2.0  # S = e^-2 (1 - 2) < 0, all others have S = 0
    found, metrics = ClipBAdvantageFn(mu=1.0)(batch)
    dropped = step()["action_mask"] & ~found["action_mask"]
    assert dropped.nonzero().tolist() == [[0, 2]]
    assert float(metrics["frac_clipped_neg"]) == pytest.approx(1 / 3)
    assert float(metrics["frac_clipped_pos"]) == 0.0


def test_clip_b_keeps_the_tokens_of_good_answers_wherever_they_are() -> None:
    batch = last_rewards([0.0, 2.0, 1.0, 1.0])
    batch["rollout_logprob"] = torch.full_like(batch["rollout_logprob"], -1.0)
    batch["entropy"] = torch.ones_like(batch["entropy"])
    batch["rollout_logprob"][1, 1] = -2.0  # as far out as one can be, but A > 0
    found, _ = ClipBAdvantageFn(mu=1.0)(batch)
    assert torch.equal(found["action_mask"], step()["action_mask"])


def test_clip_b_keeps_everything_where_all_tokens_are_alike() -> None:
    batch = last_rewards([0.0, 2.0, 1.0, 1.0])
    batch["rollout_logprob"] = torch.full_like(batch["rollout_logprob"], -1.0)
    batch["entropy"] = torch.ones_like(batch["entropy"])
    found, _ = ClipBAdvantageFn(mu=0.0)(batch)
    assert torch.equal(found["action_mask"], step()["action_mask"])


def test_clip_v_drops_no_more_than_its_share() -> None:
    free, metrics = ClipVAdvantageFn(mu=0.0, max_frac=1.0)(step())
    few, few_metrics = ClipVAdvantageFn(mu=0.0, max_frac=0.1)(step())
    assert float(metrics["frac_clipped"]) > float(few_metrics["frac_clipped"]) > 0
    assert int(few["action_mask"].sum()) == int(step()["action_mask"].sum()) - 1
    assert int(free["action_mask"].sum()) < int(few["action_mask"].sum())


def test_clip_v_drops_tokens_without_an_advantage_beside_its_share() -> None:
    batch = last_rewards([0.0, 2.0, 1.0, 1.0])  # rows 2 and 3 have advantage 0
    batch["necs"] = torch.zeros_like(batch["necs"])
    batch["entropy"] = torch.ones_like(batch["entropy"])
    batch["old_logprob"] = torch.full_like(batch["old_logprob"], -1.0)  # S = 0
    batch["necs"][2, 1] = batch["necs"][0, 1] = batch["necs"][0, 2] = 1.0
    batch["necs"][0, 3] = 2.0
    few, _ = ClipVAdvantageFn(mu=1.0, max_frac=0.1)(dict(batch))
    dropped = step()["action_mask"] & ~few["action_mask"]
    assert dropped.nonzero().tolist() == [[0, 3], [2, 1]]
    free, _ = ClipVAdvantageFn(mu=1.0, max_frac=1.0)(dict(batch))
    dropped = step()["action_mask"] & ~free["action_mask"]
    assert dropped.nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [2, 1]]


def test_the_expected_entropy_change_is_the_mean_over_the_vocabulary() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0]], dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    by_hand = sum(
        float(logprobs[0, k].exp()) * float(entropy_change(logprobs[0, k], entropy[0]))
        for k in range(3)
    )
    assert float(expected_entropy_change(logits)) == pytest.approx(by_hand)


def test_entropy_change_is_the_derivative_of_the_entropy() -> None:
    logits = torch.tensor([0.3, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum()
    (gradient,) = torch.autograd.grad(entropy, logits)
    assert torch.allclose(-entropy_change(logprobs, entropy).detach(), gradient)


@pytest.mark.parametrize("name", TRAINER)
def test_a_missing_column_is_named_with_what_there_is(name: str) -> None:
    mask = {"action_mask": step()["action_mask"]}
    with pytest.raises(InvalidArgumentError, match=r"the batch has no '.*holds action_mask"):
        ADVANTAGE_FN.get(name)()(mask)


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("ppo", {"gamma": 1.5}, "gamma"),
        ("ppo", {"lam": -0.1}, "lam"),
        ("ppo", {"lamda": 1.0}, "did you mean 'lam'"),
        ("reinforceplusplus", {"gamma": 2}, "gamma"),
        ("jsd", {"lambda_coef": 2.0}, "lambda_coef"),
        ("jsd", {"temperature": 0.0}, "temperature"),
        ("jsd", {"estimator": "kl"}, "estimator"),
        ("opmd_verl", {"opmd_baseline": "median"}, "opmd_baseline"),
        ("grpo_verl", {"ddof": 3}, "ddof"),
        ("rloo", {"epsilon": 1.0}, "epsilon"),
    ],
)
def test_an_argument_that_cannot_be_right_is_named(
    name: str, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        ADVANTAGE_FN.get(name)(**arguments)
