"""Configurations with which the demo's tasks are known to be learnt."""

from __future__ import annotations

from typing import Any


def recipe_for(task: str, digits: int) -> dict[str, Any]:
    """Return the configuration for a task, as plain values."""
    return {
        "task": {"name": task, "digits": digits},
        "groups_per_batch": 16,
        "rollouts_per_group": 8,
        "groups_per_step": 32,
        "max_staleness": 2,
        "optimizer": {"learning_rate": 1e-3, "entropy_coef": 0.02},
        "evaluation": {"every_steps": 10, "problems": 256, "target_accuracy": 0.97},
        "strategy": "grpo" if task == "sort" else "step_wise_grpo",
        "max_steps": 400,
    }
