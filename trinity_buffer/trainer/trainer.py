"""The training loop: loss, backward, step; checkpoint, commit; and where to go on after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trinity_buffer.algorithm.policy_loss_fn import PolicyLossFn
from trinity_buffer.crash_points import reached
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.collate import MicroBatch
from trinity_buffer.pipeline.sync_stream import SyncTrainStream
from trinity_buffer.pipeline.train_stream import TrainStep
from trinity_buffer.policy import TransformerPolicy
from trinity_buffer.trainer.checkpoint_folder import (
    POLICY_FILE,
    TrainerState,
    load_checkpoint,
    remove_old,
    save_checkpoint,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How gradients become steps.

    Attributes:
        checkpoints: folder under which checkpoints are written.
        learning_rate: the highest.
        warmup_steps: steps over which it rises from 0, linearly.
        decay_steps: steps over which it then falls, linearly, counted from the start of the run; None: never.
        lowest_rate: fraction of ``learning_rate`` at which it stays.
        max_gradient_norm: gradients are scaled down to it.
        commit_every_steps: how often a checkpoint is written and committed.
        keep_checkpoints: how many committed ones stay on the disk.
        entropy_coef: weight of the entropy bonus.
        max_steps: end after this gradient step; None: when the stream ends.
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
    keep_checkpoints: int = 2
    entropy_coef: float = 0.0
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.commit_every_steps < 1 or self.keep_checkpoints < 1:
            raise InvalidArgumentError("commit_every_steps and keep_checkpoints must be at least 1")

    def rate_at(self, step: int) -> float:
        """Return the learning rate of gradient step ``step`` (from 1); it depends on nothing else."""
        rising = min(1.0, step / (self.warmup_steps + 1))
        falling = (
            1.0
            if self.decay_steps is None
            else 1 - (1 - self.lowest_rate) * step / self.decay_steps
        )
        return self.learning_rate * rising * max(falling, self.lowest_rate)

    def optimizer_of(self, policy: TransformerPolicy) -> torch.optim.Optimizer:
        """Return a fresh optimizer."""
        return torch.optim.AdamW(
            policy.parameters(),
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            betas=self.betas,
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """What is said of one gradient step, in numbers.

    Attributes:
        staleness: mean of (step - 1 - policy version) over the rows whose version is known.
        seconds: from the arrival of the batch to the end of its commit, if there was one.
    """

    step: int
    loss: float
    reward: float
    gradient_norm: float
    staleness: float
    rows: int
    tokens: int
    seconds: float
    recorded: bool
    committed: bool
    metrics: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Trains a policy on a stream of gradient steps.

    Args:
        stream: where the steps come from and commits go to; its last commit is where training goes
            on.
        fresh_policy: returns the policy to begin with, where there is no commit yet.
        loss_fn: the policy loss.
        settings: everything else.
    """

    def __init__(
        self,
        stream: SyncTrainStream,
        fresh_policy: Callable[[], TransformerPolicy],
        loss_fn: PolicyLossFn,
        settings: TrainerSettings,
    ) -> None:
        self._stream = stream
        self._loss_fn = loss_fn
        self._settings = settings
        resume = stream.resume
        if resume is not None and resume.checkpoint is not None:
            self.state = load_checkpoint(resume.checkpoint, settings.optimizer_of)
        else:
            policy = fresh_policy()
            self.state = TrainerState(policy, settings.optimizer_of(policy), 0, ())

    @property
    def policy(self) -> TransformerPolicy:
        """The policy as it is now."""
        return self.state.policy

    def run(
        self,
        report: Callable[[StepReport], bool | None],
        *,
        measure: Callable[[int], dict[str, float]] = lambda _: {},
    ) -> None:
        """Train until the stream ends, ``max_steps`` is reached, or ``report`` returns True.

        What was trained is committed before it returns.

        Args:
            report: hears of every step.
            measure: called after every step with its number; what it returns is recorded with the
                step's commit.
        """
        last: TrainStep | None = None
        if self._reached(self.state.step):
            return
        for step in self._stream:
            begin = time.perf_counter()
            loss, norm, metrics = self._train(step)
            self._remember(step)
            metrics |= {"loss": loss, "gradient_norm": norm, **measure(step.step)}
            last = step
            ending = self._reached(step.step)
            committed = ending or step.step % self._settings.commit_every_steps == 0
            if committed:
                self._commit(step, metrics)
                last = None
            stop = report(_report_of(step, loss, norm, metrics, begin, committed=committed))
            if stop or ending:
                break
        if last is not None:
            self._commit(last, {})

    def _reached(self, step: int) -> bool:
        return self._settings.max_steps is not None and step >= self._settings.max_steps

    def _train(self, step: TrainStep) -> tuple[float, float, dict[str, float]]:
        optimizer, policy = self.state.optimizer, self.state.policy
        optimizer.zero_grad(set_to_none=True)
        losses, metrics = [], {}
        for microbatch in step.microbatches:
            loss, metrics = self._loss(microbatch)
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), self._settings.max_gradient_norm)
        for group in optimizer.param_groups:
            group["lr"] = self._settings.rate_at(step.step)
        reached("before-step")
        optimizer.step()
        reached("after-step")
        numbers = {name: float(value) for name, value in metrics.items()}
        return float(torch.stack(losses).sum()), float(norm), numbers

    def _loss(self, microbatch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        scores = self.state.policy.logprobs(
            microbatch["input_ids"],
            attention_mask=microbatch["attention_mask"] if "cu_seqlens" not in microbatch else None,
            cu_seqlens=microbatch.get("cu_seqlens"),
            max_seqlen=microbatch.get("max_seqlen"),
        )
        wanted = {name: microbatch[name] for name in self._loss_fn.select_keys}
        loss, metrics = self._loss_fn(scores.logprob, **wanted, layout=microbatch.layout)
        if self._settings.entropy_coef:
            tokens = max(microbatch.layout.global_tokens, 1)
            entropy = scores.entropy.where(microbatch["action_mask"], 0.0).sum() / tokens
            loss = loss - self._settings.entropy_coef * entropy
            metrics = {**metrics, "entropy": entropy.detach()}
        return loss, metrics

    def _remember(self, step: TrainStep) -> None:
        """Note what the weights went through; from here on it is true, whether it is committed or not."""
        digests: Sequence[bytes] = (*self.state.manifests, step.manifest.digest)
        self.state = TrainerState(self.state.policy, self.state.optimizer, step.step, digests)

    def _commit(self, step: TrainStep, metrics: dict[str, float]) -> None:
        reached("before-checkpoint")
        folder = save_checkpoint(self._settings.checkpoints, self.state)
        reached("after-checkpoint")
        self._stream.commit(step, checkpoint=folder, policy=folder / POLICY_FILE, metrics=metrics)
        remove_old(
            self._settings.checkpoints,
            keep=self._settings.keep_checkpoints,
            committed=folder,
        )


def _report_of(
    step: TrainStep,
    loss: float,
    norm: float,
    metrics: dict[str, float],
    begin: float,
    *,
    committed: bool,
) -> StepReport:
    rewards = torch.cat([m["token_level_rewards"].flatten() for m in step.microbatches]).sum()
    lags = [step.step - 1 - version for version in step.policy_versions]
    rows = len(step.manifest.experiences)
    return StepReport(
        step=step.step,
        loss=loss,
        reward=float(rewards) / max(rows, 1),
        gradient_norm=norm,
        staleness=sum(lags) / len(lags) if lags else 0.0,
        rows=rows,
        tokens=step.microbatches[0].layout.global_tokens,
        seconds=time.perf_counter() - begin,
        recorded=step.recorded,
        committed=committed,
        metrics=metrics,
    )
