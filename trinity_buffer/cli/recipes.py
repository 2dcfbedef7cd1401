"""The recipes of the demo's tasks, as configurations of a run."""

from __future__ import annotations

from typing import Any

from trinity_buffer.demo.recipes import recipe_for
from trinity_buffer.demo.tasks import TASKS
from trinity_buffer.errors import InvalidArgumentError

BATCHES_PER_STEP = 2
"""So that two explorers fill a step together."""


def config_for(task: str, digits: int) -> dict[str, Any]:
    """Return the configuration with which a task is known to be learnt, as plain values.

    Raises:
        InvalidArgumentError: no such task, or digits that it cannot have.
    """
    if task not in TASKS:
        raise InvalidArgumentError(f"no task {task!r} (there are: {', '.join(TASKS)})")
    options = {"digits": digits} if task == "sort" else {}
    recipe = recipe_for(TASKS[task](**options))
    return {
        "task": {"name": task, **options},
        "model": {"width": recipe.width, "layers": recipe.layers, "heads": recipe.heads},
        "optimizer": {
            "learning_rate": recipe.learning_rate,
            "warmup_steps": recipe.warmup_steps,
            "decay_steps": recipe.decay_steps,
            "lowest_rate": recipe.lowest_rate,
            "betas": recipe.betas,
            "weight_decay": recipe.weight_decay,
            "max_gradient_norm": recipe.max_gradient_norm,
            "entropy_coef": recipe.entropy_coef,
        },
        "loss": {
            "args": {
                "clip_range_low": recipe.clip_range_low,
                "clip_range_high": recipe.clip_range_high,
            }
        },
        "evaluation": {"target_accuracy": recipe.target_accuracy},
        "algorithm": "grpo" if recipe.strategy == "grpo" else "multi_step_grpo",
        # From random weights there is nothing that the policy should stay close to, and a frozen
        # reference would cost a forward pass of every step.
        "algorithm_args": {"kl_loss_fn": "none"},
        "groups_per_batch": recipe.groups_per_step // BATCHES_PER_STEP,
        "rollouts_per_group": recipe.rollouts_per_group,
        "groups_per_step": recipe.groups_per_step,
        "max_staleness": recipe.max_staleness,
        "max_steps": recipe.max_steps,
    }
