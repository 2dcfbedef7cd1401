"""What a demo makes before the run: a teacher, an expert's data."""

from __future__ import annotations

import math

from trinity_buffer.cli.demo_ends import require_policies, task_of
from trinity_buffer.cli.ranks import device_here
from trinity_buffer.cli.run_algorithm import algorithm_of, recorded, require_parts_of
from trinity_buffer.cli.run_config import RunConfig, resolved
from trinity_buffer.demo.needs import Needs, needs_of
from trinity_buffer.demo.recipes import config_for, teacher_config
from trinity_buffer.demo.solutions import require_solutions
from trinity_buffer.errors import InvalidArgumentError

STEPS_WITHOUT_END = 1000
"""For so many steps an expert's data are made where the run says no number."""


def needs_of_run(config: RunConfig) -> Needs:
    """Return what the algorithm of a run needs.

    Raises:
        UnknownNameError, InvalidArgumentError: there is no such algorithm, or its task cannot give
            what it needs.
    """
    needs = needs_of(algorithm_of(config), config.groups_per_step)
    if needs.solutions and config.rollout is not None:
        raise InvalidArgumentError(
            f"algorithm {config.algorithm!r} needs somebody who knows the answers, and "
            f"{config.rollout!r} makes rollouts alone: choose another one, such as grpo"
        )
    if needs.solutions:
        require_solutions(task_of(config))
    return needs


def require_parts_of_demo(config: RunConfig) -> None:
    """Return if a run has what its algorithm needs, or the demo can make it.

    Raises:
        UnknownNameError, InvalidArgumentError: says what is lacking, and what to do.
    """
    device_here(config.device)
    require_policies(config)
    needs, made = needs_of_run(config), {}
    if needs.teacher and config.teacher is None:
        made["teacher"] = "made by the demo"
    if needs.expert_groups and config.expert_experiment is None:
        made["expert_experiment"] = "made by the demo"
    require_parts_of(config.model_copy(update=made), schema=recorded(config)["schema"])


def teacher_of(config: RunConfig) -> RunConfig:
    """Return how the teacher of a run is trained: a policy of the same shape, from solutions.

    A run that is cut to a few steps has a teacher of no more.
    """
    recipe = teacher_config(task_of(config))
    steps = min(recipe["max_steps"], config.max_steps or recipe["max_steps"])
    shared = config.model_dump(include={"task", "model", "device"})
    # Another seed than the pupil's: it begins elsewhere, and sees other problems.
    return resolved(recipe | shared | {"max_steps": steps, "seed": config.seed + 1})


def expert_of(config: RunConfig) -> RunConfig:
    """Return the configuration of the experiment that holds an expert's solutions."""
    base = config_for("sft", config.task.name, config.task.digits)
    # Nobody trains on this experiment as its own trainer: nothing may wait for one.
    return resolved(base | {"seed": config.seed, "max_waiting_groups": None})


def expert_batches(config: RunConfig) -> int:
    """Return how many batches of solutions the steps of a run can take from its expert."""
    steps = config.max_steps or STEPS_WITHOUT_END
    needs = needs_of_run(config)
    return math.ceil(needs.expert_groups * steps / expert_of(config).groups_per_batch)
