"""The training loop: loss, backward, step; checkpoint, commit; and where to go on after a crash.

A commit follows its checkpoint at once, or in a thread that writes it beside the training. Whether
a step is skipped is decided by one flag. Only then is it worth a second pass over the loss, to name
the rows: its gradient with respect to every log-probability is the term of that token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity_buffer.algorithm import Algorithm
from trinity_buffer.errors import InvalidArgumentError, NonFiniteError
from trinity_buffer.options import Count, option_types, takes_old_names
from trinity_buffer.pipeline.config import OptimizerOptions, TrainingOptions
from trinity_buffer.pipeline.history.replay import ReplayStream
from trinity_buffer.pipeline.manifest import ManifestChain
from trinity_buffer.pipeline.sync_stream import SyncTrainStream
from trinity_buffer.pipeline.train.microbatch import MicroBatch
from trinity_buffer.pipeline.train.options import Resume
from trinity_buffer.pipeline.train.step import TrainStep
from trinity_buffer.trainer import models
from trinity_buffer.trainer.causal_lm import policy_of, reference_of
from trinity_buffer.trainer.checkpoint import Commits, TrainerState, load_checkpoint
from trinity_buffer.trainer.determinism import SameBits, algorithm_settings
from trinity_buffer.trainer.models import Number, StepMeter, StepReport
from trinity_buffer.trainer.parallel import processes_here, whole
from trinity_buffer.trainer.policy import Critic, Policy, Trainable
from trinity_buffer.trainer.requirements import (
    require_of,
    require_same_ranks,
    warn_of_rounding,
    warn_of_trained_reference,
    warn_of_unread,
)

Report = Callable[[StepReport], bool | None]
Measure = Callable[[int], dict[str, float]]

KEPT_CHECKPOINTS = 2
"""Of the newest steps that are committed: what a trainer resumes from, and what explorers load."""


@takes_old_names
@dataclass(frozen=True, kw_only=True)
class TrainerSettings(OptimizerOptions, TrainingOptions):
    """How gradients become steps: options of the optimizer, of training, and these.

    The others are keys of the configuration, some in its section ``optimizer``
    (docs/configuration.md).

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
        falling = 1 - (1 - self.min_lr_ratio) * step / (self.decay_steps or math.inf)
        return rising * max(falling, self.min_lr_ratio)

    def deciding(self, *, is_own: bool) -> dict[str, Any]:
        """Return the settings that decide weights, for commits; few beside ``optimizer=``."""
        own = ("max_gradient_norm", "value_clip_range")
        names = (*(own if is_own else option_types(OptimizerOptions)), "recompute_old_logprob")
        values = {name: getattr(self, name) for name in names}
        return {name: [*v] if isinstance(v, tuple) else v for name, v in values.items()}

    def optimizer_of(self, model: Trainable, *, is_critic: bool = False) -> torch.optim.Optimizer:
        """Return a fresh optimizer for the policy, or for the critic."""
        # A policy may name a weight twice that two of its parts share.
        weights, decay = [*dict.fromkeys(model.parameters())], self.weight_decay
        rate = self.critic_learning_rate if is_critic else self.learning_rate
        return torch.optim.AdamW(weights, lr=rate, weight_decay=decay, betas=self.betas)


def is_beside(settings: TrainerSettings, policy: Policy) -> bool:
    """Return whether checkpoints of ``policy`` are written beside the training."""
    if settings.async_checkpoints is not None:
        return settings.async_checkpoints
    # Of another policy a copy is made where it is, which may be more than a GPU has room for.
    in_parts = hasattr(policy, "held")
    return in_parts and any(weight.device.type == "cuda" for weight in policy.parameters())


__all__ = ["StepReport", "Trainer", "TrainerSettings"]


class Trainer:
    """Trains a policy on a stream of gradient steps.

    Args:
        stream: where the steps come from and commits go to; its last commit is where training goes
            on.
        model: with the weights to begin with: a causal language model of transformers, or any
            `Policy`. It is trained in place; where there is a commit, it takes the weights of that.
        algorithm: what `trinity_buffer.algorithm.build` made.
        settings: everything else.
        optimizer: of the model's parameters, at its own rates; after a restart those of the
            checkpoint. None: AdamW, by ``settings`` as they are now.
        reference: a frozen model that divergences are measured from; None: a copy of ``model``.
        teacher: a frozen policy to distil; None: its log-probabilities are in the store, or the
            algorithm needs none.

    In the processes of a `torch.distributed` group the gradients are averaged over its ranks.

    Raises:
        InvalidArgumentError: the algorithm cannot be trained like this.
    """

    def __init__(
        self,
        stream: SyncTrainStream | ReplayStream,
        model: Any,
        algorithm: Algorithm,
        settings: TrainerSettings,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        reference: Any = None,
        teacher: Any = None,
    ) -> None:
        self._stream = stream
        self._algorithm = algorithm
        self._settings = settings
        self._optimizer = optimizer
        self._processes = processes_here()
        require_same_ranks(stream, self._processes)
        if isinstance(stream, SyncTrainStream):
            stream.require_commits(settings.commit_every_steps, "commit_every_steps")
        if self._coefficients() and self._processes.world_size > 1:
            raise InvalidArgumentError("adaptive KL coefficients differ by rank: give a fixed one")
        # Before a model is used: a reference may be tried out.
        self._bits = SameBits(
            stream,
            self._processes,
            deterministic=settings.deterministic,
            settings=settings.deciding(is_own=optimizer is not None)
            | algorithm_settings(algorithm),
            optimizer=optimizer,
        )
        policy = policy_of(model)
        models.require_trained(policy, optimizer)
        for role, frozen in {"reference": reference, "teacher": teacher}.items():
            if models.trained_weights(policy, optimizer) & models.trained_weights(frozen):
                raise InvalidArgumentError(
                    f"{role}= is the very model that is trained, or shares weights with it, and so "
                    "would change with each step: give a copy (copy.deepcopy), or leave it out"
                )
        is_copied = reference is None and algorithm.needs_reference
        # Before it takes the weights of a commit.
        copied = reference_of(policy) if is_copied else None
        with self._bits.asked():
            self.state = self._begun(policy, stream.resume, copied)
        reference = copied if reference is None else policy_of(reference)
        for trained, stepped_by in self.state.trained:
            models.require_same_weights(trained, self._processes)
            warn_of_rounding(trained, stepped_by)
        self._set_coefficients(self.state.coefficients)
        self._skipped: dict[int, list[str]] = {}  # step -> uids, until they are committed
        self._look_at: list[str] = []
        self._skipped_in_a_row = 0 if stream.resume is None else stream.resume.skipped
        teacher = None if teacher is None else policy_of(teacher)
        critic = None if self.state.critic is None else self.state.critic[0]
        self._models = models.Models(policy, critic, reference, teacher)
        root, keep = settings.checkpoints, settings.keep_checkpoints
        beside = is_beside(settings, policy)
        self._commits = Commits(stream, self._processes, policy, root, keep=keep, beside=beside)
        if algorithm.type.use_critic and critic is None:  # the checkpoint has none
            raise InvalidArgumentError(f"algorithm {algorithm.name!r} needs a critic model")
        if isinstance(stream, SyncTrainStream):  # a replay lacks nothing that the run had
            recomputes = settings.recompute_old_logprob
            require_of(
                algorithm, stream, recompute_old_logprob=recomputes, teacher=teacher is not None
            )
            warn_of_unread(algorithm, reference=reference, teacher=teacher)

    def _begun(
        self, policy: Policy, resume: Resume | None, copied: Policy | None
    ) -> TrainerState[Any]:
        """Return the state after the last commit, or that of the beginning.

        Args:
            copied: the copy of ``policy`` that divergences are measured from.
        """
        settings, rank = self._settings, self._processes.rank
        if settings.seed is not None:
            torch.manual_seed(settings.seed)  # all ranks have one critic
        pair = None
        if self._algorithm.type.use_critic:
            critic = models.new_critic(policy)
            pair = (critic, settings.optimizer_of(critic, is_critic=True))
            of_policy = models.trained_weights(policy, self._optimizer)
            if twice := of_policy & models.trained_weights(critic):
                raise InvalidArgumentError(
                    f"the critic of {type(policy).__name__} holds {len(twice)} weights of the "
                    "policy, which two optimizers would step: let its parameters() yield those of "
                    "its own alone, or new_critic() copy them"
                )
        if settings.seed is not None and rank:
            torch.manual_seed(settings.seed + rank)
        optimizer = settings.optimizer_of(policy) if self._optimizer is None else self._optimizer
        begun = TrainerState(policy, optimizer, 0, ManifestChain(), pair)
        if resume is None or resume.checkpoint is None:
            return begun
        takes, device = self._optimizer is not None, self._stream.device
        state = load_checkpoint(
            resume.checkpoint, begun, rank=rank, takes_groups=takes, device=device
        )
        if copied is not None:
            warn_of_trained_reference(copied, policy, resume.step)
        return state

    @property
    def policy(self) -> Any:
        """The policy as it is now."""
        return self.state.policy

    @property
    def differences(self) -> Mapping[str, list[Any]]:
        """What differs here from what the commits say that are replayed, or that it resumed from.

        Name of a setting -> what was recorded, and what it is here.
        """
        return self._bits.differences

    @property
    def scoring(self) -> list[Any]:
        """The policy, and those that it is compared with."""
        every = (self.policy, self._models.reference, self._models.teacher)
        return [model for model in every if model is not None]

    def run(self, report: Report = lambda _: None, *, measure: Measure = lambda _: {}) -> None:
        """Train until the stream ends, ``max_steps`` is reached, or ``report`` returns True.

        What was trained is committed before it returns. A step whose loss or gradient norm is not
        finite changes nothing; its commit says so.

        Args:
            report: hears of every step; like ``measure`` it has random numbers of its own.
            measure: called after every step with its number; what it returns on rank 0 is recorded
                with the step's commit.

        Raises:
            NonFiniteError: ``max_skipped_steps`` in a row were skipped, which is committed; or the
                weights themselves are not finite, which is not.
        """
        if self._reached(self.state.step):
            return
        drawing_apart = self._drawing_apart()
        with closing(self._commits):
            self._train_all(drawing_apart(report), drawing_apart(measure))
            self._commits.finish()
        # Rank 0 may still commit, and would take the next stream of another for a start anew.
        self._processes.gather(0)

    @contextmanager
    def _drawing_apart(self) -> Iterator[None]:
        """Give what runs beside the training random numbers of its own.

        A replay, beside which nothing runs, then draws what the training drew. They are of the
        step: a resumed run measures what the undisturbed one would.
        """
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(gpus):
            seed = (torch.initial_seed() + self.state.step) % 2**63
            torch.default_generator.manual_seed(seed)
            if gpus:
                torch.cuda.manual_seed_all(seed)
            yield

    def _train_all(self, report: Report, measure: Measure) -> None:
        """Train step after step, and commit the last one too."""
        last = None
        for step in self._stream:
            if isinstance(self._stream, ReplayStream) and step.step != self.state.step + 1:
                wanted = f"that of step {step.step - 1}" if step.step > 1 else "None"
                raise InvalidArgumentError(
                    f"the weights are those after step {self.state.step}, and would be trained on "
                    f"step {step.step}: give open_replay_stream() first={self.state.step + 1}, or "
                    f"another checkpoint (from_checkpoint=), {wanted}"
                )
            self._commits.look()
            begin = time.perf_counter()
            meter = None
            if self._settings.record_row_metrics and step.microbatches:
                meter = StepMeter(step, tokens=self._settings.record_token_metrics)
            with self._bits.asked(step.environment):
                self._bits.compare(step, self.policy)
                metrics = self._train(step, meter)
            # What the weights went through: true from here on, committed or not.
            self.state = replace(
                self.state,
                step=step.step,
                manifests=self.state.manifests.after(step.manifest.digest),
                coefficients=self._coefficients(),
                log_head=step.log_head,
            )
            if step.staleness is not None:
                metrics["staleness"] = step.staleness
            # After the weights have moved: it measures what the commit saves.
            metrics |= measure(step.step)
            measures = None if meter is None else meter.measures(metrics, self._processes)
            if measures is not None:
                self._stream.measure(measures)
            # Not two steps' tensors, while it is uncommitted.
            last = replace(step, microbatches=[]), metrics
            ending, committed = self._reached(step.step) or self._gives_up, False
            if ending or step.step % self._settings.commit_every_steps == 0:
                committed, last = self._commit(step, metrics), None
            step_report = StepReport(
                step=step.step,
                loss=metrics["loss"],
                reward=step.reward or 0.0,
                gradient_norm=metrics["gradient_norm"],
                staleness=step.staleness or 0.0,
                rows=len(step.manifest.experiences),
                tokens=step.microbatches[0].layout.global_tokens if step.microbatches else 0,
                seconds=time.perf_counter() - begin,
                recorded=step.recorded,
                committed=committed,
                skipped=self._skipped_in_a_row > 0,
                metrics=metrics,
                measures=measures,
                unknown=tuple(n for n in ("reward", "staleness") if getattr(step, n) is None),
            )
            stop = report(step_report)
            if self._gives_up:
                uids = ", ".join(self._look_at) or "none was found"
                raise NonFiniteError(
                    f"loss or gradient norm were not finite in {self._skipped_in_a_row} steps in a "
                    f"row, up to step {step.step}, and none of them changed the weights: look at "
                    f"the rows with the largest terms ({uids}) with `trinity-buffer show UID`, "
                    f"lower the learning rate ({self._settings.learning_rate:g}), or go on from an "
                    "older step with resume_from="
                )
            if stop or ending:
                break
        if last is not None:
            self._commit(*last)

    def _reached(self, step: int) -> bool:
        return self._settings.max_steps is not None and step >= self._settings.max_steps

    def _train(self, step: TrainStep, meter: StepMeter | None) -> dict[str, float]:
        """Step the optimizers if all is finite; return the numbers of the step."""
        if not step.microbatches:  # every row was dropped: it changes nothing
            self._skipped_in_a_row = 0
            return {"loss": 0.0, "gradient_norm": 0.0}
        recomputed = self._settings.recompute_old_logprob
        models.require_readable(step, self._stream.uids, self._algorithm, self._models, recomputed)
        blaming = partial(models.blame_rows, step, self._stream.uids)
        coefficients = self._coefficients()
        prepared = models.prepare(
            step,
            self._algorithm,
            self._models,
            blaming=blaming,
            reduce=self._processes.sum,
            recompute_old_logprob=recomputed,
        )
        rows = sum(  # penalties and advantages are of the usual ones
            (~m["expert_mask"]).sum() if "expert_mask" in m else len(m["sample_index"])
            for m in step.microbatches
        )
        totals = {name: Number(value, rows) for name, value in prepared.items()}
        for _, optimizer in self.state.trained:
            optimizer.zero_grad(set_to_none=True)
        parts = []
        for microbatch in step.microbatches:
            with blaming(microbatch):
                parts.append(self._gradient(microbatch, meter))
        row_metrics = [f"actor/{name}" for name in self._algorithm.policy_loss.row_metrics]
        totals |= models.combined(parts, step.microbatches, row_metrics)
        norm = self._clipped(self.state.policy, self.state.optimizer)
        # What decides is read in one exchange with everything that is only reported.
        deciding = [totals["loss"].value, norm]
        totals["gradient_norm"] = Number(norm)
        own = self._optimizer  # which steps at its own rates
        rate = self._settings.rate_at(step.step) if own is None else own.param_groups[0]["lr"]
        totals["learning_rate"] = Number(float(rate))
        if self.state.critic is not None:
            critic, optimizer = self.state.critic
            # A critic may read the hidden states of the policy, whose gradients are its own.
            held = models.held_by(optimizer)
            own_weights = [w for w in self.state.policy.parameters() if id(w) not in held]
            gradients = [weight.grad for weight in own_weights]
            for weight in own_weights:
                weight.grad = None
            totals |= self._critic_gradient(step, critic)
            for weight, gradient in zip(own_weights, gradients, strict=True):
                weight.grad = gradient
            deciding += [totals["critic/value_loss"].value, self._clipped(critic, optimizer)]
        finite, numbers = models.numbers_of_step(self._processes, deciding, totals)
        if finite and not step.skipped:
            self._step(step)
            if "actor/kl_loss" in numbers:  # an adaptive coefficient; a penalty's has moved already
                rows_of_step = step.microbatches[0].layout.global_sequences
                self._algorithm.kl_loss.update_kl_coef(numbers["actor/kl_loss"], rows_of_step)
            self._skipped_in_a_row = 0
        else:
            self._skip(step, coefficients)
        return numbers

    def _step(self, step: TrainStep) -> None:
        """Let the optimizers take their steps."""
        self._commits.hold()
        rates = self._settings.rate_at(step.step), self._settings.critic_rate_at(step.step)
        for (_, optimizer), rate in zip(self.state.trained, rates, strict=False):
            if optimizer is not self._optimizer:  # which steps at its own rates
                for group in optimizer.param_groups:
                    group["lr"] = rate
            optimizer.step()

    def _skip(self, step: TrainStep, coefficients: Mapping[str, float]) -> None:
        """Leave weights, optimizers and coefficients as they were; note which rows to look at."""
        self._set_coefficients(coefficients)
        for _, optimizer in self.state.trained:
            optimizer.zero_grad(set_to_none=True)
        rows = models.largest_rows(step, self._algorithm, self.state.policy, self._processes)
        self._look_at = self._skipped[step.step] = self._stream.uids(step, rows)
        self._skipped_in_a_row += 1

    @property
    def _gives_up(self) -> bool:
        most = self._settings.max_skipped_steps
        return most is not None and self._skipped_in_a_row >= most

    def _gradient(self, microbatch: MicroBatch, meter: StepMeter | None) -> dict[str, Tensor]:
        """Add to the gradient of the weights; return the metrics of the loss, itself included."""
        scores, layout = self.state.policy.scores(microbatch), microbatch.layout
        weigh = None if meter is None else meter.weigh
        loss, metrics = self._algorithm.loss(
            scores.logprob, microbatch, entropy=scores.entropy, layout=layout, weigh=weigh
        )
        loss.backward()
        if meter is not None:
            meter.add(microbatch, scores)
        return {"loss": loss.detach(), **metrics}

    def _critic_gradient(self, step: TrainStep, critic: Critic) -> dict[str, Number]:
        """Add to the gradient of the critic's weights; return the metrics of its loss."""
        parts = []
        for microbatch in step.microbatches:
            loss = models.value_loss(
                models.values_of(critic, microbatch),
                *(microbatch[name] for name in ("values", "returns", "action_mask")),
                clip_range=self._settings.value_clip_range,
                loss_agg_mode=self._algorithm.loss_agg_mode,
                layout=microbatch.layout,
            )
            loss.backward()
            parts.append({"critic/value_loss": loss.detach()})
        return models.combined(parts, step.microbatches)

    def _clipped(self, model: Trainable, optimizer: torch.optim.Optimizer) -> Tensor:
        """Average the gradients over the ranks, scale them down to the limit, return their norm.

        Only those of weights that the optimizer holds: nothing would ever clear the others.
        """
        held, every = models.held_by(optimizer), dict.fromkeys(model.parameters())
        weights = [weight for weight in every if id(weight) in held]
        for weight in every:
            if id(weight) not in held:
                weight.grad = None
        self._processes.average_gradients(model, weights)
        limit = self._settings.max_gradient_norm
        return whole(torch.nn.utils.clip_grad_norm_(weights, limit).detach())

    def _coefficients(self) -> dict[str, float]:
        """Return the coefficients that adapt from step to step."""
        terms = {"kl_loss": self._algorithm.kl_loss, "kl_penalty": self._algorithm.kl_penalty}
        return {name: term.kl_coef for name, term in terms.items() if term.adaptive}

    def _set_coefficients(self, coefficients: Mapping[str, float]) -> None:
        for name in self._coefficients().keys() & coefficients.keys():  # one may be fixed since
            getattr(self._algorithm, name).kl_coef = coefficients[name]

    def _commit(self, step: TrainStep, metrics: dict[str, float]) -> bool:
        """Commit all steps up to ``step``; return whether that is done, or only begun."""
        recorded = {"environment": self._bits.environment, "skipped": self._skipped}
        self._skipped = {}
        return self._commits.commit(step, self.state, metrics=metrics, **recorded)
