"""Rollouts: log-probs as the trainer sees them, and the same runs whatever else is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from trinity_buffer.demo.policy import PolicyConfig, TransformerPolicy
from trinity_buffer.demo.rollout import TaskSampler, evaluate
from trinity_buffer.demo.tasks import (
    HELD_OUT,
    GuessNumber,
    SortDigits,
    Task,
    draws,
    whole_draws,
)
from trinity_buffer.experience import EID, Experience
from trinity_buffer.identity import Key

ALL = [(task, run) for task in range(4) for run in range(3)]
BOTH = pytest.mark.parametrize("task", [SortDigits(3), GuessNumber(8)], ids=lambda t: t.name)


def make_policy(task: Task) -> TransformerPolicy:
    config = PolicyConfig(task.vocab_size, width=16, heads=2, max_length=task.max_length)
    policy = TransformerPolicy(config)
    with torch.no_grad():
        policy.head.weight.mul_(10)  # opinions strong enough to tell contexts apart
    return policy


def generate(
    task: Task,
    pairs: Sequence[tuple[Key, int]] = ALL,
    *,
    batch: str = "e0-1",
    seed: int = 1,
    version: int = 0,
) -> list[Experience]:
    policy = make_policy(task)
    return TaskSampler(policy, task, seed).rollout(pairs, batch=batch, policy_version=version)


def said(experiences: list[Experience]) -> dict[str, list[int]]:
    return {e.eid.uid: e.tokens.tolist() for e in experiences}


@BOTH
def test_recorded_logprobs_are_the_policys(task: Task) -> None:
    policy = make_policy(task)
    for experience in generate(task):
        scores = policy.scores({"input_ids": experience.tokens.long().unsqueeze(0)}).logprob[0]
        torch.testing.assert_close(
            experience.logprobs, scores[experience.prompt_length :].detach(), rtol=0, atol=1e-5
        )


@BOTH
def test_missing_pairs_are_generated_as_they_would_have_been(task: Task) -> None:
    whole, missing = generate(task), [ALL[7], ALL[2], ALL[10]]
    part = generate(task, missing)
    wanted = {uid: tokens for uid, tokens in said(whole).items() if uid in said(part)}
    assert said(part) == wanted
    assert [e.eid.rid for e in part if e.eid.step == 0] == [f"e0-1/{t}/{r}" for t, r in missing]
    logprobs = {e.eid: e.logprobs for e in whole}
    for e in part:
        torch.testing.assert_close(e.logprobs, logprobs[e.eid], rtol=0, atol=1e-5)


@BOTH
@pytest.mark.parametrize("changed", [{"seed": 2}, {"batch": "e0-2"}, {"version": 1}])
def test_another_seed_batch_or_version_says_something_else(
    task: Task, changed: dict[str, Any]
) -> None:
    first, second = said(generate(task)), said(generate(task, **changed))
    assert list(first.values()) != list(second.values())


def test_nothing_missing_is_nothing_generated() -> None:
    assert generate(SortDigits(3), []) == []


def test_the_runs_of_a_task_differ() -> None:
    responses = {e.response_text for e in generate(SortDigits(3), [(0, r) for r in range(8)])}
    assert len(responses) > 4


def test_runs_are_whole_and_in_order() -> None:
    experiences = generate(GuessNumber(8))
    assert [(e.eid.task, e.eid.run) for e in experiences if e.eid.step == 0] == ALL
    by_run: dict[str, list[Experience]] = {}
    for e in experiences:
        by_run.setdefault(e.eid.rid, []).append(e)
    assert max(map(len, by_run.values())) > 1
    for steps in by_run.values():
        assert [e.eid.step for e in steps] == list(range(len(steps)))
        assert all(e.reward == 0 and not e.info["solved"] for e in steps[:-1])


def test_a_turn_goes_on_where_the_last_one_ended() -> None:
    task = GuessNumber(8)
    experiences = {e.eid: e for e in generate(task, version=3)}
    for eid, e in experiences.items():
        assert e.policy_version == 3
        before = experiences.get(EID(eid.batch, eid.task, eid.run, eid.step - 1))
        if before is None:
            assert e.tokens[:-1].tolist() == [10]
        else:
            hidden, guess = task.problem(1, "e0-1", eid.task).answer[0], before.tokens[-1].item()
            assert e.tokens[:-2].tolist() == before.tokens.tolist()
            assert e.tokens[-2].item() == (8 if hidden > guess else 9)


def test_rewards_are_the_tasks() -> None:
    task = SortDigits(3)
    for e in generate(task):
        verdict = task.judge(task.problem(1, "e0-1", e.eid.task), e.tokens[4:].tolist(), 0)
        assert (e.reward, e.info["solved"]) == (verdict.reward, verdict.solved)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    task = SortDigits(1)
    policy = make_policy(task)
    runs = [(0, run) for run in range(4000)]
    experiences = TaskSampler(policy, task, 0).rollout(runs, batch="b", policy_version=0)
    counts = torch.bincount(torch.stack([e.tokens[-1] for e in experiences]), minlength=11)
    likely = policy(experiences[0].tokens[:2].unsqueeze(0))[0, -1].softmax(-1).detach()
    error = (counts / 4000 - likely).abs() / (likely * (1 - likely) / 4000).sqrt()
    assert error.max() < 4


def test_evaluation_is_greedy_and_the_same_every_time() -> None:
    task = SortDigits(1)
    policy = make_policy(task)
    right = 0
    for index in range(40):
        problem = task.problem(5, index, stream=HELD_OUT)
        best = policy(torch.tensor([problem.prompt]))[0, -1].argmax().item()
        right += best == problem.answer[0]
    assert evaluate(policy, task, 40, seed=5) == right / 40 == evaluate(policy, task, 40, seed=5)


def test_draws_are_the_same_for_ever() -> None:
    assert whole_draws(6, 10, "sort", 0, "e0-1", 0) == (9, 7, 0, 3, 1, 1)
    assert draws(3, "a", 7).tolist() == draws(5, "a", "7")[:3].tolist()
    assert draws(2, "a/b").tolist() != draws(2, "a", "b").tolist()


def test_draws_are_uniform() -> None:
    numbers = draws(20_000, "uniform")
    assert 0 <= numbers.min() < numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(counts - 1000).max() < 150
