"""The recipes: each fits its task, and the first one learns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trinity_buffer.algorithm import ADD_STRATEGY
from trinity_buffer.algorithm.policy_loss_fn import PPOPolicyLossFn
from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.demo.recipes import (
    GUESS_NUMBER,
    SORT_FIVE_DIGITS,
    SORT_THREE_DIGITS,
    Recipe,
    recipe_for,
)
from trinity_buffer.demo.rollout import evaluate, rollout
from trinity_buffer.demo.tasks import GuessNumber, SortDigits, Task
from trinity_buffer.experience import Experience

TASKS_AND_RECIPES = [
    (SortDigits(1), SORT_THREE_DIGITS),
    (SortDigits(3), SORT_THREE_DIGITS),
    (SortDigits(5), SORT_FIVE_DIGITS),
    (GuessNumber(), GUESS_NUMBER),
]


@pytest.mark.parametrize(("task", "recipe"), TASKS_AND_RECIPES)
def test_every_task_has_its_recipe(task: Task, recipe: Recipe) -> None:
    assert recipe_for(task) is recipe
    assert ADD_STRATEGY.get(recipe.strategy) is not None


@pytest.mark.parametrize("task", [SortDigits(3), SortDigits(5), GuessNumber()])
def test_a_recipes_policy_can_say_and_hear_everything_of_its_task(task) -> None:
    policy = TransformerPolicy(recipe_for(task).policy_config(task))
    made = rollout(policy, task, [(i, 0) for i in range(20)], batch=0, seed=0, policy_version=0)
    assert max(e.length for e in made) == task.max_length
    assert max(int(e.tokens.max()) for e in made) < task.vocab_size


def test_random_weights_solve_next_to_nothing() -> None:
    for seed in range(5):
        task = SortDigits(3)
        policy = TransformerPolicy(recipe_for(task).policy_config(task), seed=seed)
        assert evaluate(policy, task, 500, seed=1) < 0.02


def recorded(experience: Experience) -> Tensor:
    assert experience.logprobs is not None
    return experience.logprobs


def test_the_recipe_of_the_sorter_learns_one_digit() -> None:
    task, recipe = SortDigits(1), SORT_THREE_DIGITS
    policy = TransformerPolicy(recipe.policy_config(task))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=recipe.learning_rate)
    loss_fn = PPOPolicyLossFn(clip_range=recipe.clip_range_low)
    pairs = [(index, run) for index in range(32) for run in range(recipe.rollouts_per_group)]
    before = evaluate(policy, task, 200, seed=1)
    for step in range(40):
        made = rollout(policy, task, pairs, batch=step, seed=0, policy_version=step)
        rewards = torch.tensor([e.reward for e in made]).view(32, -1)
        scores = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        advantages = torch.nn.functional.pad(scores.view(-1, 1), (2, 0))
        old = torch.stack([torch.nn.functional.pad(recorded(e), (2, 0)) for e in made])
        logprob = policy.logprobs(torch.stack([e.tokens for e in made])).logprob
        response = (torch.arange(3) > 1).expand_as(old)
        loss, _ = loss_fn(logprob, old, response, advantages)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before < 0.5 < 0.9 < evaluate(policy, task, 200, seed=1)
