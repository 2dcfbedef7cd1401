"""The training loop: loss, backward, step; checkpoint, commit; and where to go on after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import torch
from torch import Tensor

from trinity_buffer.algorithm import Algorithm
from trinity_buffer.crash_points import reached
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.history.replay import ReplayStream
from trinity_buffer.pipeline.streaming.collate import MicroBatch
from trinity_buffer.pipeline.streaming.stream_options import TrainStep
from trinity_buffer.pipeline.streaming.sync_stream import SyncTrainStream
from trinity_buffer.trainer.checkpoint_folder import (
    POLICY_FILE,
    TrainerState,
    load_checkpoint,
    remove_old,
    save_checkpoint,
)
from trinity_buffer.trainer.critic import ValueLossFn
from trinity_buffer.trainer.models import Models, prepare, require_models, scores_of, values_of
from trinity_buffer.trainer.parallel import OneProcess, Processes
from trinity_buffer.trainer.policy import AnyPolicy, Critic, Policy, Trainable
from trinity_buffer.trainer.settings import TrainerSettings

__all__ = ["StepReport", "Trainer", "TrainerSettings"]


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


class Trainer(Generic[AnyPolicy]):
    """Trains a policy on a stream of gradient steps.

    Args:
        stream: where the steps come from and commits go to; its last commit is where training goes
            on.
        fresh_policy: returns the policy to begin with, where there is no commit yet; it is also the
            reference, unless another is given.
        algorithm: what `trinity_buffer.algorithm.build` made.
        settings: everything else.
        reference: a frozen policy that divergences are measured from.
        teacher: a frozen policy to distil; None: its log-probabilities are in the store, or the
            algorithm needs none.
        processes: of a data-parallel trainer.

    Raises:
        InvalidArgumentError: the algorithm cannot be trained like this.
    """

    def __init__(
        self,
        stream: SyncTrainStream | ReplayStream,
        fresh_policy: Callable[[], AnyPolicy],
        algorithm: Algorithm,
        settings: TrainerSettings,
        *,
        reference: Policy | None = None,
        teacher: Policy | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._stream = stream
        self._algorithm = algorithm
        self._settings = settings
        self._processes = processes or OneProcess()
        self._value_loss = ValueLossFn(settings.value_clip_range, algorithm.loss_agg_mode)
        adaptive = algorithm.kl_loss.adaptive or algorithm.kl_penalty.adaptive
        if adaptive and self._processes.world_size > 1:
            raise InvalidArgumentError(
                "an adaptive KL coefficient would differ from rank to rank: give a fixed one"
            )
        resume = stream.resume
        if resume is not None and resume.checkpoint is not None:
            self.state = load_checkpoint(resume.checkpoint, settings.optimizer_of, fresh_policy())
        else:
            self.state = self._fresh(fresh_policy())
        if reference is None and algorithm.needs_reference:
            reference = fresh_policy()
        for name, coefficient in self.state.coefficients.items():
            getattr(algorithm, name).kl_coef = coefficient
        critic = None if self.state.critic is None else self.state.critic[0]
        self._models = Models(self.state.policy, critic, reference, teacher)
        require_models(algorithm, self._models)

    def _fresh(self, policy: AnyPolicy) -> TrainerState[AnyPolicy]:
        settings, critic = self._settings, None
        if self._algorithm.type.use_critic:
            model = policy.new_critic()
            critic = (model, settings.optimizer_of(model, is_critic=True))
        return TrainerState(policy, settings.optimizer_of(policy), 0, (), critic)

    @property
    def policy(self) -> AnyPolicy:
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
        reduce = self._processes.sum if self._processes.world_size > 1 else None
        if self._settings.recompute_old_logprob:
            for microbatch in step.microbatches:
                microbatch.tensors.pop("old_logprob", None)
        found = prepare(step, self._algorithm, self._models, reduce=reduce)
        policy, optimizer = self.state.policy, self.state.optimizer
        optimizer.zero_grad(set_to_none=True)
        parts = []
        for microbatch in step.microbatches:
            loss, metrics = self._loss(microbatch)
            loss.backward()
            parts.append({"loss": loss.detach(), **metrics})
        norm = self._clipped(policy)
        _set_rate(optimizer, self._settings.rate_at(step.step))
        reached("before-step")
        optimizer.step()
        if self.state.critic is not None:
            found |= self._train_critic(step, *self.state.critic)
        reached("after-step")
        numbers = {name: float(value) for name, value in (found | _combined(parts)).items()}
        self._adapt(step, numbers)
        return numbers.pop("loss"), norm, numbers

    def _loss(self, microbatch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        scores = scores_of(self.state.policy, microbatch)
        return self._algorithm.loss(
            scores.logprob, microbatch, entropy=scores.entropy, layout=microbatch.layout
        )

    def _train_critic(
        self, step: TrainStep, critic: Critic, optimizer: torch.optim.Optimizer
    ) -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        parts = []
        for microbatch in step.microbatches:
            loss, metrics = self._value_loss(
                values_of(critic, microbatch),
                microbatch["values"],
                microbatch["returns"],
                microbatch["action_mask"],
                layout=microbatch.layout,
            )
            loss.backward()
            parts.append(metrics)
        self._clipped(critic)
        _set_rate(optimizer, self._settings.critic_rate_at(step.step))
        optimizer.step()
        return _combined(parts)

    def _clipped(self, model: Trainable) -> float:
        """Average the gradients over the ranks, scale them down to the limit, return their norm."""
        self._processes.average_gradients(model)
        limit = self._settings.max_gradient_norm
        return float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))

    def _adapt(self, step: TrainStep, numbers: Mapping[str, float]) -> None:
        """Let an adaptive coefficient of the loss take its step; that of a penalty has done so."""
        kl_loss = self._algorithm.kl_loss
        if kl_loss.adaptive and "actor/kl_loss" in numbers:
            rows = step.microbatches[0].layout.global_sequences
            kl_loss.update_kl_coef(numbers["actor/kl_loss"], rows)

    def _remember(self, step: TrainStep) -> None:
        """Note what the weights went through: true from here on, committed or not."""
        digests: Sequence[bytes] = (*self.state.manifests, step.manifest.digest)
        adaptive = {
            name: getattr(self._algorithm, name).kl_coef
            for name in ("kl_loss", "kl_penalty")
            if getattr(self._algorithm, name).adaptive
        }
        self.state = replace(self.state, step=step.step, manifests=digests, coefficients=adaptive)

    def _commit(self, step: TrainStep, metrics: dict[str, float]) -> None:
        if self._processes.rank:
            self._stream.commit(step)
            return
        reached("before-checkpoint")
        folder = save_checkpoint(self._settings.checkpoints, self.state)
        reached("after-checkpoint")
        self._stream.commit(step, checkpoint=folder, policy=folder / POLICY_FILE, metrics=metrics)
        remove_old(
            self._settings.checkpoints,
            keep=self._settings.keep_checkpoints,
            committed=folder,
        )


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _combined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return a step's metrics from its micro-batches': losses add up, others average."""
    found = {}
    for name in parts[0]:
        values = torch.stack([torch.as_tensor(part[name], dtype=torch.float64) for part in parts])
        found[name] = values.sum() if name.endswith("loss") else values.mean()
    return found


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
