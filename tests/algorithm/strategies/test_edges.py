"""Strategies and advantages where two things are equal, or there is one of something."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.algorithm.strategies.rollouts import group
from trinity_buffer.algorithm.add_strategy import (
    BestOfGroupAddStrategy,
    DuplicateInformativeAddStrategy,
    DynamicSamplingAddStrategy,
    GRPOAddStrategy,
)
from trinity_buffer.algorithm.advantage_fn import PPOAdvantageFn, RLOOAdvantageFn
from trinity_buffer.algorithm.advantage_fn.rows import Rows
from trinity_buffer.algorithm.advantage_fn.token_scores import discounted_returns, row_statistics
from trinity_buffer.algorithm.arguments import made
from trinity_buffer.algorithm.policy_loss_fn import RECPolicyLossFn
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.writer import StagedWriter


def runs_of(writer: StagedWriter) -> list[list[int]]:
    return [[e.eid.run for e in group] for group in writer.groups]


async def test_of_equal_rewards_the_earlier_run_is_kept() -> None:
    writer = StagedWriter()
    await BestOfGroupAddStrategy(writer, num_kept=2).add(group([1.0, 2.0, 1.0, 1.0]), 0)
    assert runs_of(writer) == [[0, 1]]


async def test_a_run_at_the_least_reward_is_kept() -> None:
    writer = StagedWriter()
    await BestOfGroupAddStrategy(writer, min_reward=1.0).add(group([1.0, 0.0]), 0)
    assert runs_of(writer) == [[0]]


async def test_an_outcome_at_the_threshold_is_wrong_and_one_success_is_enough() -> None:
    writer = StagedWriter()
    strategy = DynamicSamplingAddStrategy(writer, correct_threshold=0.5)
    await strategy.add(group([0.5, 0.5], 0) + group([0.5, 0.6], 1), 0)
    assert [some[0].eid.task for some in writer.groups] == [1]
    assert {reason for _, reason in writer.rejections} == {"all_wrong"}


async def test_a_batch_that_is_full_gets_no_copy() -> None:
    writer = StagedWriter()
    await DuplicateInformativeAddStrategy(writer).add(group([0.0, 1.0], 0), 0)
    assert len(writer.groups) == 1


def test_one_row_has_no_deviation() -> None:
    rows = Rows({"action_mask": torch.ones(1, 3, dtype=torch.bool)})
    found = row_statistics("x", torch.ones(1, 3), rows)
    assert (float(found["x/mean"]), float(found["x/std"])) == (3.0, 0.0)


def test_returns_begin_at_the_last_token() -> None:
    assert discounted_returns(torch.tensor([[0.0, 0.0, 8.0]]), 0.5).tolist() == [[2.0, 4.0, 8.0]]


def test_rloo_scores_a_group_of_one_with_its_reward() -> None:
    scored = RLOOAdvantageFn().score_groups(np.array([[2.0]]))
    assert scored.scores is not None
    assert scored.scores.tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("part", "option"),
    [
        (partial(BestOfGroupAddStrategy, StagedWriter()), "num_kept"),
        (partial(GRPOAddStrategy, StagedWriter()), "epsilon"),
        (PPOAdvantageFn, "gamma"),
        (RECPolicyLossFn, "temp"),
    ],
)
def test_an_option_that_must_be_a_number_is_not_none(part: Any, option: str) -> None:
    with pytest.raises(TypeError, match="NoneType"):
        part(**{option: None})


def test_the_writer_may_be_named() -> None:
    writer = StagedWriter()
    assert GRPOAddStrategy(writer=writer, epsilon=0.5).writer is writer
    with pytest.raises(InvalidArgumentError, match="no argument 'writer' "):
        made(PPOAdvantageFn, writer=writer)
