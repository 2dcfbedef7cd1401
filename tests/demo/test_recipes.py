"""The recipes: every algorithm has one that holds what it reads, and the first one learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trinity_buffer.algorithm import ALGORITHM_TYPE, build
from trinity_buffer.algorithm.policy_loss_fn import PPOPolicyLossFn
from trinity_buffer.cli.run_config import algorithm_of, resolved
from trinity_buffer.demo.policy import PolicyConfig, TransformerPolicy
from trinity_buffer.demo.recipes import RECIPES, config_for, recipe_for
from trinity_buffer.demo.rollout import Needs, TaskSampler, evaluate, needs_of
from trinity_buffer.demo.tasks import GuessNumber, SortDigits, Task
from trinity_buffer.experience import Experience

SPECIAL = {
    "sft": Needs("solutions", teacher=False, expert_groups=0),
    "cpt": Needs("solutions", teacher=False, expert_groups=0),
    "dpo": Needs("pairs", teacher=False, expert_groups=0),
    "mix": Needs("rollouts", teacher=False, expert_groups=16),
    "mix_chord": Needs("rollouts", teacher=False, expert_groups=16),
    "on_policy_distill": Needs("rollouts", teacher=True, expert_groups=0),
    "jsd": Needs("rollouts", teacher=True, expert_groups=0),
}


def test_every_algorithm_has_a_recipe() -> None:
    assert set(RECIPES) == set(ALGORITHM_TYPE.names())
    assert len(RECIPES) == 24


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_its_algorithm_reads_and_nothing_else(name: str) -> None:
    config = config_for(name)
    algorithm = algorithm_of(resolved(config))  # refuses an argument that nothing takes
    own = build(name)
    assert algorithm.name == name
    assert needs_of(algorithm, config["groups_per_step"]) == SPECIAL.get(
        name, Needs("rollouts", teacher=False, expert_groups=0)
    )
    assert ("critic_learning_rate" in config["optimizer"]) == algorithm.type.use_critic
    parts: dict[str, object] = {part: choice.name for part, choice in own.choices.items()}
    parts["add_strategy"] = [choice.name for choice in own.strategies]
    for part, choice in config["algorithm_args"].items():
        assert part.endswith("_args") or choice != parts[part]
    assert algorithm.needs_reference == (name == "dpo")  # whose loss compares with it


@pytest.mark.parametrize("name", RECIPES)
def test_the_batches_of_a_recipe_fill_its_steps(name: str) -> None:
    config = config_for(name)
    sample = algorithm_of(resolved(config)).sample
    usual = sample.plan(1, config["groups_per_step"]).usual
    assert config["groups_per_batch"] * 2 == usual


@pytest.mark.parametrize(
    ("given", "algorithm", "task", "steps"),
    [
        ({}, "grpo", {"name": "sort", "digits": 3}, 240),
        ({"digits": 5}, "grpo", {"name": "sort", "digits": 5}, 400),
        ({"task": "guess"}, "multi_step_grpo", {"name": "guess"}, 300),
        ({"algorithm": "gigpo"}, "gigpo", {"name": "guess"}, 300),
        ({"algorithm": "grpo", "task": "guess"}, "grpo", {"name": "guess"}, 300),
        ({"algorithm": "gigpo", "task": "sort"}, "gigpo", {"name": "sort", "digits": 3}, 300),
        ({"algorithm": "mine"}, "mine", {"name": "sort", "digits": 3}, 240),
    ],
)
def test_who_says_less_gets_what_was_tried(
    given: dict[str, Any], algorithm: str, task: dict[str, Any], steps: int
) -> None:
    config = config_for(**given)
    assert (config["algorithm"], config["task"], config["max_steps"]) == (algorithm, task, steps)
    assert config["optimizer"]["decay_steps"] == steps


def policy_for(task: Task, seed: int = 0) -> TransformerPolicy:
    recipe = recipe_for("grpo", task)
    shape = PolicyConfig(
        task.vocab_size, recipe.width, recipe.layers, recipe.heads, task.max_length
    )
    return TransformerPolicy(shape, seed=seed)


@pytest.mark.parametrize("task", [SortDigits(3), SortDigits(5), GuessNumber()])
def test_a_recipes_policy_can_say_and_hear_everything_of_its_task(task: Any) -> None:
    policy = policy_for(task)
    made = TaskSampler(policy, task, 0).rollout(
        [(i, 0) for i in range(20)], batch=0, policy_version=0
    )
    assert max(e.length for e in made) == task.max_length
    assert max(int(e.tokens.max()) for e in made) < task.vocab_size


def test_random_weights_solve_next_to_nothing() -> None:
    for seed in range(5):
        task = SortDigits(3)
        policy = policy_for(task, seed)
        assert evaluate(policy, task, 500, seed=1) < 0.02


def recorded(experience: Experience) -> Tensor:
    assert experience.logprobs is not None
    return experience.logprobs


@pytest.mark.long
def test_the_recipe_of_the_sorter_learns_one_digit() -> None:
    task, recipe = SortDigits(1), RECIPES["grpo"]
    policy = policy_for(task)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=recipe.learning_rate)
    loss_fn = PPOPolicyLossFn(**recipe.loss_args)
    pairs = [(index, run) for index in range(32) for run in range(recipe.rollouts_per_group)]
    before = evaluate(policy, task, 200, seed=1)
    for step in range(40):
        made = TaskSampler(policy, task, 0).rollout(pairs, batch=step, policy_version=step)
        rewards = torch.tensor([e.reward for e in made]).view(32, -1)
        scores = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        advantages = torch.nn.functional.pad(scores.view(-1, 1), (2, 0))
        old = torch.stack([torch.nn.functional.pad(recorded(e), (2, 0)) for e in made])
        logprob = policy.scores({"input_ids": torch.stack([e.tokens for e in made])}).logprob
        response = (torch.arange(3) > 1).expand_as(old)
        loss, _ = loss_fn(logprob, old, response, advantages)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before < 0.5 < 0.9 < evaluate(policy, task, 200, seed=1)
