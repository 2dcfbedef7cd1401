"""Losses where two things are equal: a limit, a threshold, a pair."""

from __future__ import annotations

import math

import torch

from trinity_buffer.algorithm.kl_fn import DummyKLFn
from trinity_buffer.algorithm.policy_loss_fn import (
    CISPOPolicyLossFn,
    DPOLossFn,
    PPOPolicyLossFn,
    TOPRPolicyLossFn,
)

MASK = torch.ones(1, 2, dtype=torch.bool)
HALVES = torch.full((1, 2), math.log(0.5))
ONES = torch.zeros(1, 2)


def test_topr_takes_an_advantage_at_its_threshold_for_a_failure() -> None:
    advantages = torch.tensor([[0.0, 1.0]])
    _, metrics = TOPRPolicyLossFn()(HALVES, ONES, MASK, advantages)
    assert float(metrics["avg_alpha"]) == 0.75


def test_a_pair_of_equal_rewards_is_not_won() -> None:
    mask = MASK.expand(2, 2)
    _, metrics = DPOLossFn()(HALVES.expand(2, 2), HALVES.expand(2, 2), mask)
    assert float(metrics["accuracy_mean"]) == 0.0


def test_cispo_lets_a_token_without_an_advantage_be_whatever_its_ratio() -> None:
    loss = CISPOPolicyLossFn(enable_mask_clip=True, mask_clip_range_low=0.1)
    for logprob, old in ((HALVES, ONES), (ONES, HALVES)):
        _, metrics = loss(logprob, old, MASK, torch.zeros(1, 2))
        assert float(metrics["unmasked_frac"]) == 1.0


def test_the_bound_of_a_ratio_holds_for_negative_advantages_alone() -> None:
    logprob = torch.full((1, 2), math.log(8.0)) + HALVES  # a ratio of 8
    loss = PPOPolicyLossFn(clip_range=10.0, clip_ratio_c=3.0)
    good, _ = loss(logprob, HALVES, MASK, torch.ones(1, 2))
    bad, _ = loss(logprob, HALVES, MASK, -torch.ones(1, 2))
    same, _ = loss(HALVES, HALVES, MASK, torch.ones(1, 2))
    assert [round(float(one), 4) for one in (good, bad, same)] == [-8.0, 3.0, -1.0]


def test_no_divergence_needs_no_reference() -> None:
    assert torch.equal(DummyKLFn().calculate_kl(HALVES, None), torch.zeros(1, 2))
    half = HALVES.to(torch.bfloat16)
    assert DummyKLFn().calculate_kl(half, HALVES).dtype == torch.bfloat16
