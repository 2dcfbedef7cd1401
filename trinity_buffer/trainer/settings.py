"""How gradients become steps: the numbers of a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.trainer.policy import Trainable

KEPT_CHECKPOINTS = 2
"""Of the newest steps that are committed: what a trainer resumes from, and what explorers load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How gradients become steps.

    Attributes:
        checkpoints: folder under which checkpoints are written.
        learning_rate: the highest rate.
        warmup_steps: steps of the linear warm-up from 0.
        decay_steps: length of the linear decay in steps, counted from the start of the run; None:
            no decay.
        lowest_rate: fraction of ``learning_rate`` below which the rate never decays.
        max_gradient_norm: gradients are clipped to this norm.
        commit_every_steps: how often a checkpoint is written and committed.
        async_checkpoints: write them in a thread, from a copy in CPU memory; the commit follows
            when all is on the disk. One at a time: the next one waits. None: where weights are on a
            GPU, of a model of transformers; of another policy it takes a second one on the GPU.
        keep_checkpoints: how many of the newest committed ones stay on the disk; None: all.
        critic_learning_rate: of the critic, if there is one; it follows the same schedule.
        value_clip_range: see `ValueLossFn`.
        recompute_old_logprob: compute ``old_logprob`` before each step, even if the stream has it
            (the stream of a replay has what explorers recorded).
        max_steps: end after this gradient step; None: when the stream ends.
        max_skipped_steps: end when so many steps in a row were skipped because their loss or
            gradient norm was not finite; None: never (a replay repeats what was recorded).
        record_facts: record with each commit what its steps measured, row by row (`StepMeter`).
        record_tokens: record it token by token too: 16 bytes per token.
        seed: seeds torch at the start of a run, as for dropout, with this number plus the rank; a
            resumed run restores the random state of its checkpoint. None: torch is not seeded, and
            a replay may differ.
        deterministic: ask torch for deterministic algorithms while the trainer computes, so that
            the same steps give the same bits again (`same_bits`); an operation that has no
            deterministic form is an error. False: leave torch as it is.
    """

    checkpoints: Path
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    decay_steps: int | None = None
    lowest_rate: float = 0.1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    max_gradient_norm: float = 1.0
    commit_every_steps: int = 1
    async_checkpoints: bool | None = None
    keep_checkpoints: int | None = KEPT_CHECKPOINTS
    critic_learning_rate: float = 1e-3
    value_clip_range: float | None = None
    recompute_old_logprob: bool = False
    max_steps: int | None = None
    max_skipped_steps: int | None = 3
    record_facts: bool = True
    record_tokens: bool = False
    seed: int | None = 0
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.commit_every_steps < 1:
            raise InvalidArgumentError("commit_every_steps must be at least 1")
        for name in ("keep_checkpoints", "max_skipped_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name} must be at least 1, or None")

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
            else 1 - (1 - self.lowest_rate) * step / self.decay_steps
        )
        return rising * max(falling, self.lowest_rate)

    def optimizer_of(self, model: Trainable, *, is_critic: bool = False) -> torch.optim.Optimizer:
        """Return a fresh optimizer for the policy, or for the critic."""
        return torch.optim.AdamW(
            model.parameters(),
            lr=self.critic_learning_rate if is_critic else self.learning_rate,
            weight_decay=self.weight_decay,
            betas=self.betas,
        )
