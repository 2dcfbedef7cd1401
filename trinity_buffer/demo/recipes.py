"""Settings with which each algorithm learns a task of the demo from random weights, on one core.

What matters for rollouts is a learning rate that falls to a tenth: at a constant one the sorter
passes 0.9 as early, then falls back to between 0.7 and 0.9 time and again. With a falling one,
three digits are learnt by GRPO as well without the entropy bonus, without weight decay, and with 16
groups of 16 runs. All was found with rollouts that are 1 to 3 policy versions old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_buffer.demo.tasks import TASKS, Task
from trinity_buffer.errors import InvalidArgumentError

SMALL_DIGITS = 3
"""With so many digits the recipes were found; for more, steps are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRecipe:
    """The numbers of an algorithm; `config` gives them as the configuration of a run.

    Attributes:
        family: whose learning curves are drawn together.
        task: name of the task that it was found with.
        groups_per_step: groups of one gradient step, an expert's included.
        groups_per_batch: groups that an explorer plans at once; two explorers fill a step together.
        rollouts_per_group: runs of one task.
        max_staleness: policy versions that a rollout may be behind; None: recorded data, which do
            not age.
        max_queued_groups: groups that may wait for the trainer; None: no bound.
        width: of the policy.
        layers: of the policy.
        heads: of the policy.
        learning_rate: the highest.
        critic_learning_rate: the critic's, where there is one.
        warmup_steps: steps over which it rises from 0, linearly; then it falls until ``max_steps``.
        min_lr_ratio: fraction of ``learning_rate`` at which it ends.
        weight_decay: of AdamW.
        entropy_coef: weight of the entropy bonus, per token; None: the algorithm's.
        loss_args: of the policy loss.
        algorithm_args: of `trinity_buffer.algorithm.build`.
        max_steps: gradient steps after which ``threshold`` has been reached in every trial.
        threshold: greedy accuracy on fresh problems that counts as learnt.
        target_accuracy: at which a run ends before ``max_steps``; None: it does not.
    """

    family: str = "others"
    task: str = "sort"
    groups_per_step: int = 32
    groups_per_batch: int = 16
    rollouts_per_group: int = 8
    max_staleness: int | None = 3
    max_queued_groups: int | None = None
    width: int = 64
    layers: int = 2
    heads: int = 2
    learning_rate: float = 1e-3
    critic_learning_rate: float | None = None
    warmup_steps: int = 10
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    entropy_coef: float | None = None
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    algorithm_args: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int = 240
    threshold: float = 0.9
    target_accuracy: float | None = 0.95

    def config(self) -> dict[str, Any]:
        """Return it as keys of a run's configuration, those that it sets alone."""

        def picked(*names: str) -> dict[str, Any]:
            return {name: getattr(self, name) for name in names}

        optimizer = picked("learning_rate", "critic_learning_rate", "warmup_steps", "min_lr_ratio")
        optimizer |= picked("weight_decay", "entropy_coef") | {"decay_steps": self.max_steps}
        return {
            "model": picked("width", "layers", "heads"),
            "optimizer": {key: value for key, value in optimizer.items() if value is not None},
            "loss": {"args": dict(self.loss_args)},
            "evaluation": {"target_accuracy": self.target_accuracy},
            "algorithm_args": dict(self.algorithm_args),
            **picked("groups_per_batch", "rollouts_per_group", "groups_per_step"),
            **picked("max_staleness", "max_queued_groups", "max_steps"),
        }


_NO_REFERENCE = {"kl_loss_fn": "none"}
# From random weights there is nothing that the policy should stay close to, and a frozen reference
# would cost a forward pass of every step.

_GROUPS = DemoRecipe(family="group-relative", entropy_coef=0.02, algorithm_args=_NO_REFERENCE)
_REINFORCE = replace(_GROUPS, family="REINFORCE and mirror descent")
_CLIPS = replace(_GROUPS, family="other ratios and clips")
_TURNS = replace(
    _GROUPS,
    family="several turns",
    task="guess",
    groups_per_step=16,
    groups_per_batch=8,
    rollouts_per_group=16,
    entropy_coef=0.05,
    max_steps=300,
)
_RECORDED = DemoRecipe(
    family="recorded data",
    groups_per_step=128,
    groups_per_batch=64,
    rollouts_per_group=1,
    max_staleness=None,
    max_queued_groups=256,
    max_steps=100,
)
_MIXED = {**_NO_REFERENCE, "sample_strategy_args": {"expert_data_ratio": 1 / 3}}
_EXPERT = replace(_GROUPS, family="expert data", groups_per_step=48, algorithm_args=_MIXED)
_TEACHER = DemoRecipe(family="distillation")

RECIPES: dict[str, DemoRecipe] = {
    "sft": _RECORDED,
    "cpt": _RECORDED,
    "dpo": replace(_RECORDED, max_steps=150, loss_args={"beta": 0.5}),
    # Over five seeds: 0.9 after 100 to 140 steps, 0.99 to 1.00 after 240; of five digits 0.9 after
    # 180 to 220 steps, 0.99 to 1.00 after 400.
    "grpo": replace(
        _GROUPS, entropy_coef=0.03, loss_args={"clip_range_low": 0.2, "clip_range_high": 0.28}
    ),
    "grpo_verl": _GROUPS,
    "ppo": replace(_GROUPS, critic_learning_rate=2e-3),
    "dapo": replace(_GROUPS, algorithm_args={}),
    "rloo": _REINFORCE,
    "reinforceplusplus": _REINFORCE,
    "opmd": _REINFORCE,
    "asymre": replace(_REINFORCE, algorithm_args={}),
    "sppo": replace(_REINFORCE, algorithm_args={}),
    "rec": _REINFORCE,
    "raft": replace(_REINFORCE, algorithm_args={}),
    # Rewards of `sort` are fractions, never below 0: uncentred, nothing counts as a failure.
    "topr": replace(_CLIPS, algorithm_args={**_NO_REFERENCE, "add_strategy": ["opmd"]}),
    "cispo": _CLIPS,
    # The loss's own limits (3e-4) are for sequences of thousands of tokens that are hardly older
    # than the weights; the mean of three tokens of an older policy is nearly always beyond them.
    "gspo": replace(_CLIPS, loss_args={"clip_range_low": 0.2, "clip_range_high": 0.28}),
    "sapo": _CLIPS,
    "mix": _EXPERT,
    "mix_chord": _EXPERT,
    # Over five seeds, 8 numbers and 4 turns: 0.9 after 140 to 220 steps, 1.00 after 300. Binary
    # search always succeeds there, and 0.875 is one number that is never found: in the last 80
    # steps, some evaluations of three seeds still saw it. For 16 numbers and 5 turns 500 steps are
    # too few: 0.76.
    "multi_step_grpo": replace(_TURNS, loss_args={"clip_range_low": 0.2, "clip_range_high": 0.28}),
    "gigpo": _TURNS,
    "on_policy_distill": _TEACHER,
    "jsd": _TEACHER,
}
"""By the algorithm's registered name; one that is not here is tried with a plain `DemoRecipe`."""

ALGORITHM_OF_TASK = {"sort": "grpo", "guess": "multi_step_grpo"}
"""The usual algorithm of a task."""


def recipe_for(algorithm: str, task: Task) -> DemoRecipe:
    """Return the recipe of ``algorithm`` for ``task``: the nearest one that was tried."""
    recipe = RECIPES.get(algorithm, DemoRecipe())
    if task.name == "guess" and recipe.task != "guess":
        names = ["groups_per_step", "groups_per_batch", "rollouts_per_group", "max_steps"]
        names += [] if recipe.entropy_coef is None else ["entropy_coef"]
        return replace(recipe, **{name: getattr(_TURNS, name) for name in names})
    return _lengthened(recipe, task)


def teacher_config(task: Task) -> dict[str, Any]:
    """Return the configuration with which a teacher learns ``task`` from solutions.

    It trains to the last step: a pupil does not get better than its teacher.
    """
    recipe = replace(_RECORDED, max_steps=150, target_accuracy=None)
    return {"algorithm": "sft", **_lengthened(recipe, task).config()}


def _lengthened(recipe: DemoRecipe, task: Task) -> DemoRecipe:
    """Return ``recipe`` with more steps where ``task`` is larger than it was found with."""
    if task.name != "sort" or task.response_length <= SMALL_DIGITS:
        return recipe
    return replace(recipe, max_steps=recipe.max_steps * 5 // 3)


def config_for(
    algorithm: str | None = None, task: str | None = None, digits: int = SMALL_DIGITS
) -> dict[str, Any]:
    """Return the configuration with which an algorithm is known to learn, as plain values.

    Args:
        algorithm: registered name; None: the task's usual one.
        task: name of the task; None: the one that the algorithm's recipe was found with.
        digits: of the task ``sort``.

    Raises:
        InvalidArgumentError: no such task, or digits that it cannot have.
    """
    if task is None:
        task = RECIPES[algorithm].task if algorithm in RECIPES else "sort"
    if task not in TASKS:
        raise InvalidArgumentError(f"no task {task!r} (there are: {', '.join(TASKS)})")
    options = {"digits": digits} if task == "sort" else {}
    algorithm = algorithm or ALGORITHM_OF_TASK[task]
    recipe = recipe_for(algorithm, TASKS[task](**options))
    return {"algorithm": algorithm, "task": {"name": task, **options}, **recipe.config()}
