"""Settings with which the tasks are known to be learnt, from random weights, on a processor core.

All were found with rollouts that are 1 to 3 policy versions old. What matters is a learning rate
that falls to a tenth: at a constant one the sorter passes 0.9 as early, then falls back to between
0.7 and 0.9 time and again. With a falling one, three digits are learnt as well without the entropy
bonus, without weight decay, and with 16 groups of 16 runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trinity_buffer.demo.policy import PolicyConfig
from trinity_buffer.demo.tasks import GuessNumber, SortDigits, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a task is learnt with GRPO, PPO's clipped loss and AdamW.

    Attributes:
        strategy: registered name of the strategy.
        groups_per_step: groups of one gradient step.
        rollouts_per_group: runs of one task.
        max_staleness: policy versions that a rollout may be behind.
        width: of the policy.
        layers: of the policy.
        heads: of the policy.
        learning_rate: the highest.
        warmup_steps: steps over which it rises from 0, linearly.
        decay_steps: steps over which it then falls, linearly and counted from the start of the run.
        lowest_rate: fraction of ``learning_rate`` at which it stays.
        betas: of AdamW.
        weight_decay: of AdamW.
        max_gradient_norm: gradients are scaled down to it.
        entropy_coef: weight of the entropy bonus, per token.
        clip_range_low: how far the ratio may fall below 1.
        clip_range_high: how far it may rise above 1.
        max_steps: gradient steps after which the target has been reached in every trial.
        target_accuracy: what greedy answers to fresh problems then reach.
    """

    strategy: str = "grpo"
    groups_per_step: int = 32
    rollouts_per_group: int = 8
    max_staleness: int = 3
    width: int = 64
    layers: int = 2
    heads: int = 2
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    decay_steps: int = 240
    lowest_rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    entropy_coef: float = 0.03
    clip_range_low: float = 0.2
    clip_range_high: float = 0.28
    max_steps: int = 240
    target_accuracy: float = 0.95

    def policy_config(self, task: Task) -> PolicyConfig:
        """Return the shape of the policy for ``task``."""
        return PolicyConfig(
            vocab_size=task.vocab_size,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            max_length=task.max_length,
        )


SORT_THREE_DIGITS = Recipe()
"""Over five seeds: 0.9 after 100 to 140 steps, 0.99 to 1.00 after 240."""

SORT_FIVE_DIGITS = replace(
    SORT_THREE_DIGITS,
    decay_steps=400,
    max_steps=400,
)
"""Over five seeds: 0.9 after 180 to 220 steps, 0.99 to 1.00 after 400."""

GUESS_NUMBER = replace(
    SORT_THREE_DIGITS,
    strategy="step_wise_grpo",
    groups_per_step=16,
    rollouts_per_group=16,
    entropy_coef=0.05,
    decay_steps=300,
    max_steps=300,
)
"""Over five seeds, 8 numbers and 4 turns: 0.9 after 140 to 220 steps, 1.00 after 300.

Binary search always succeeds there, and 0.875 is one number that is never found: in the last 80
steps, some evaluations of three seeds still saw it. For 16 numbers and 5 turns 500 steps are too
few: 0.76.
"""


def recipe_for(task: Task) -> Recipe:
    """Return the recipe of ``task``: the nearest one that was tried."""
    if isinstance(task, GuessNumber):
        return GUESS_NUMBER
    small = isinstance(task, SortDigits) and task.digits <= 3
    return SORT_THREE_DIGITS if small else SORT_FIVE_DIGITS
