"""How gradients become steps: the numbers of a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trinity_buffer.options import Count, takes_old_names
from trinity_buffer.pipeline.config import OptimizerOptions, TrainingOptions
from trinity_buffer.trainer.policy import Trainable

KEPT_CHECKPOINTS = 2
"""Of the newest steps that are committed: what a trainer resumes from, and what explorers load."""


@takes_old_names
@dataclass(frozen=True, kw_only=True)
class TrainerSettings(OptimizerOptions, TrainingOptions):
    """How gradients become steps: options of the optimizer, of training, and these.

    Attributes:
        checkpoints: folder under which checkpoints are written.
        keep_checkpoints: how many of the newest committed ones stay on the disk; None: all.
        seed: seeds torch at the start of a run, as for dropout, with this number plus the rank; a
            resumed run restores the random state of its checkpoint. None: torch is not seeded, and
            a replay may differ.
    """

    checkpoints: Path
    keep_checkpoints: Count | None = KEPT_CHECKPOINTS
    seed: int | None = 0

    def rate_at(self, step: int) -> float:
        """Return the learning rate of gradient step ``step``, from 1; nothing else decides it."""
        return self.learning_rate * self._share_at(step)

    def critic_rate_at(self, step: int) -> float:
        """Return the learning rate of the critic in gradient step ``step``."""
        return self.critic_learning_rate * self._share_at(step)

    def _share_at(self, step: int) -> float:
        """Return the part of the highest rate that the schedule allows in a step."""
        # From 1 / (n + 1) on: a rate of 0 would waste the first step.
        rising = min(1.0, step / (self.warmup_steps + 1))
        falling = (
            1.0
            if self.decay_steps is None
            else 1 - (1 - self.min_lr_ratio) * step / self.decay_steps
        )
        return rising * max(falling, self.min_lr_ratio)

    def optimizer_of(self, model: Trainable, *, is_critic: bool = False) -> torch.optim.Optimizer:
        """Return a fresh optimizer for the policy, or for the critic."""
        return torch.optim.AdamW(
            model.parameters(),
            lr=self.critic_learning_rate if is_critic else self.learning_rate,
            weight_decay=self.weight_decay,
            betas=self.betas,
        )
