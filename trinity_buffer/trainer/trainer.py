"""The training loop: loss, backward, step; checkpoint, commit; and where to go on after a crash.

A commit follows its checkpoint at once, or in a thread that writes it beside the training. Whether
a step is skipped is decided by one flag. Only then is it worth a second pass over the loss, to name
the rows: its gradient with respect to every log-probability is the term of that token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity_buffer.algorithm import Algorithm
from trinity_buffer.algorithm.functional import Metrics, aggregate_loss, keep
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import InvalidArgumentError, NonFiniteError
from trinity_buffer.faultpoints import reached
from trinity_buffer.options import Count, takes_old_names
from trinity_buffer.pipeline.config import OptimizerOptions, TrainingOptions
from trinity_buffer.pipeline.history.replay import ReplayStream
from trinity_buffer.pipeline.manifest import ManifestChain
from trinity_buffer.pipeline.sync_stream import SyncTrainStream
from trinity_buffer.pipeline.train.microbatch import MicroBatch
from trinity_buffer.pipeline.train.options import Resume
from trinity_buffer.pipeline.train.step import TrainStep
from trinity_buffer.trainer.causal_lm import policy_of, reference_of
from trinity_buffer.trainer.checkpoint import (
    PendingCheckpoint,
    TrainerState,
    begin,
    load_checkpoint,
    random_state,
    remove_old,
)
from trinity_buffer.trainer.determinism import SameBits
from trinity_buffer.trainer.measuring import (
    Number,
    StepMeter,
    StepNumbers,
    StepReport,
    combined,
    rows_of_tokens,
)
from trinity_buffer.trainer.models import (
    Models,
    blame_rows,
    held_by,
    new_critic,
    prepare,
    require_known,
    require_models,
    require_taken,
    require_trained,
    settle_sampling,
    values_of,
)
from trinity_buffer.trainer.parallel import (
    Processes,
    is_sharded,
    processes_here,
    processes_of_writers,
    whole,
)
from trinity_buffer.trainer.policy import Critic, Policy, Trainable
from trinity_buffer.trainer.requirements import require_of, require_same_ranks
from trinity_buffer.trainer.sharded import HostCopies

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


def is_beside(settings: TrainerSettings, policy: Policy) -> bool:
    """Return whether checkpoints of ``policy`` are written beside the training."""
    if settings.async_checkpoints is not None:
        return settings.async_checkpoints
    # Of another policy a copy is made where it is, which may be more than a GPU has room for.
    in_parts = hasattr(policy, "held")
    return in_parts and any(weight.device.type == "cuda" for weight in policy.parameters())


class Commits:
    """Writes the checkpoints of a trainer and commits them, one after the other.

    Args:
        stream: of the trainer.
        settings: of the trainer.
        processes: its ranks; each calls everything here, in the same order.
        policy: what is trained.
    """

    def __init__(
        self,
        stream: SyncTrainStream | ReplayStream,
        settings: TrainerSettings,
        processes: Processes,
        policy: Policy,
    ) -> None:
        self._stream = stream
        self._settings = settings
        self._processes = processes
        self._shared = any(map(is_sharded, policy.parameters()))
        self._file_name = policy.file_name
        self._beside = is_beside(settings, policy)
        self._copies = HostCopies(copied=self._beside)
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._writers = Processes()
        if self._shared:  # in a group of their own: the training goes on in the other
            self._writers = processes_of_writers()

    def commit(self, step: TrainStep, state: TrainerState[Any], **beside: Any) -> bool:
        """Commit a step, whose weights ``state`` has; return whether that is done.

        Args:
            step: that is committed.
            state: with its weights.
            beside: what is recorded beside the checkpoint, see `StepStream.commit`.

        Raises:
            CheckpointError, NonFiniteError: it cannot be written, or the one before could not.
            LeaseLostError: another process took over.
        """
        self.finish()
        state = replace(state, random=self._processes.gather(random_state(self._stream.device)))
        if self._processes.rank and not self._shared:
            self._stream.commit(step)  # rank 0 writes for all
            return not self._beside
        reached("before-checkpoint")
        pending = begin(self._settings.checkpoints, state, self._writers, self._copies)
        if self._beside and self._begin(partial(self._write, pending, step, beside)):
            return False
        self._write(pending, step, beside)
        return not self._beside

    def hold(self) -> None:
        """Let what is computed next wait until the states of optimizers are copied, too."""
        self._copies.hold()

    def look(self) -> None:
        """Raise the error of a commit that failed beside the training; do not wait for one."""
        if self._last is not None and self._last.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last step is committed that was to be.

        Raises:
            CheckpointError, LeaseLostError: it was not.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait until what is being written is committed, end the thread, give back memory."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._copies.close()

    def _begin(self, work: Callable[[], None]) -> bool:
        """Begin work beside the training, and return whether it is."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        try:
            self._last = self._thread.submit(work)
        except RuntimeError:
            # The main thread has ended while we train, or no thread can be started. Work that waits
            # for one must not begin later: the caller does it now.
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
            return False
        self._last.add_done_callback(self._tell)
        return True

    def _tell(self, done: Future[None]) -> None:
        """End a wait for the next step, which may be for what this commit would have published."""
        error = done.exception()
        if isinstance(error, Exception):
            self._stream.fail(error)

    def _write(
        self, pending: PendingCheckpoint, step: TrainStep, beside: Mapping[str, Any]
    ) -> None:
        digests, folder = pending.finish(), pending.folder
        reached("after-checkpoint")
        if self._processes.rank:
            self._stream.commit(step)
            return
        policy = folder / self._file_name
        self._stream.commit(step, checkpoint=folder, policy=policy, digests=digests, **beside)
        tidy_up = partial(self._tidy_up, folder)
        if self._beside:
            tidy_up()
        else:
            self._begin(tidy_up)  # to remove gigabytes takes as long as a step

    def _tidy_up(self, committed: Path) -> None:
        keep = self._settings.keep_checkpoints
        # A trainer that took over may have gone back, to a checkpoint that would be removed here.
        if keep is not None and self._stream.leads():
            remove_old(self._settings.checkpoints, keep=keep, committed=committed)


LARGEST_ROWS = 4
"""So many rows are named of a step that was skipped."""


def largest_rows(
    step: TrainStep, algorithm: Algorithm, policy: Policy, processes: Processes
) -> list[int]:
    """Return the places in the manifest of the rows with the largest terms, the largest first.

    Rows that hold a number that is not finite come before those whose gradient is not finite, and
    these before large ones. Every rank must call it; all get the same answer.
    """
    terms = torch.zeros(len(step.manifest.experiences), dtype=torch.float64)
    for microbatch in step.microbatches:
        slots = microbatch["sample_index"].long().cpu()
        of_rows = _terms_of_rows(microbatch, algorithm, policy).cpu()
        terms.scatter_reduce_(0, slots, of_rows, "amax")
    device = step.microbatches[0]["input_ids"].device
    total = processes.sum(terms.to(device)).cpu()
    order = torch.argsort(total, descending=True, stable=True)[:LARGEST_ROWS]
    return [place for place in order.tolist() if total[place] > 0]


def _terms_of_rows(microbatch: MicroBatch, algorithm: Algorithm, policy: Policy) -> Tensor:
    """Return ``[N]``: the largest term of each row; infinite where its own numbers are not finite.

    A gradient that is not finite counts as the largest finite number: one broken row may spoil
    those of all others.
    """
    with torch.no_grad():
        scores = policy.scores(microbatch)
    leaves = [scores.logprob.requires_grad_(), scores.entropy.requires_grad_()]
    with torch.enable_grad():
        loss, _ = algorithm.loss(leaves[0], microbatch, entropy=leaves[1], layout=microbatch.layout)
        gradients = (
            torch.autograd.grad(loss, leaves, allow_unused=True)
            if loss.requires_grad
            else (None, None)
        )
    largest = torch.finfo(torch.float64).max
    terms = torch.zeros_like(microbatch["input_ids"], dtype=torch.float64)
    for gradient in gradients:
        if gradient is not None:
            size = gradient.double().abs().nan_to_num(nan=largest, posinf=largest)
            terms = torch.maximum(terms, size)
    rows = rows_of_tokens(microbatch)
    of_rows = terms.new_zeros(len(microbatch["sample_index"]))
    of_rows.scatter_reduce_(0, rows, terms.flatten(), "amax")
    for column in (scores.logprob.detach(), *(microbatch[name] for name in microbatch)):
        if not isinstance(column, Tensor) or not column.is_floating_point():
            continue
        broken = torch.where(column.detach().isfinite(), 0.0, torch.inf).double()
        if column.shape == terms.shape:
            of_rows.scatter_reduce_(0, rows, broken.flatten(), "amax")
        elif column.shape == of_rows.shape:
            of_rows = torch.maximum(of_rows, broken)
    return of_rows


@dataclass(frozen=True, slots=True)
class ValueLossFn:
    """Half the squared error between values and returns, on action tokens.

    ``clip_range`` keeps new values near the old ones, as in PPO's first implementations: the worse
    of the two errors counts. The algorithms' descriptions name no such range, so there is none by
    default.

    Args:
        clip_range: how far a value may move from the one of the step's beginning; None: any way.
        loss_agg_mode: see `aggregate_loss`.
    """

    clip_range: float | None = None
    loss_agg_mode: str = "token-mean"

    def __post_init__(self) -> None:
        if self.clip_range is not None and self.clip_range <= 0:
            raise InvalidArgumentError(f"value_clip_range={self.clip_range}: it must be positive")

    def __call__(
        self,
        predicted: Tensor,
        values: Tensor,
        returns: Tensor,
        action_mask: Tensor,
        *,
        layout: BatchLayout | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the loss, and metrics.

        Args:
            predicted: by the critic as it is now.
            values: by the critic before the step.
            returns: what it is to predict.
            action_mask: what counts.
            layout: boundaries and denominators of the step.
        """
        now, before = keep(action_mask, predicted), keep(action_mask, values)
        wanted = keep(action_mask, returns)
        errors = (now - wanted).square()
        if self.clip_range is not None:
            near = before + (now - before).clamp(-self.clip_range, self.clip_range)
            errors = torch.maximum(errors, (near - wanted).square())
        loss = aggregate_loss(0.5 * errors, action_mask, self.loss_agg_mode, layout=layout)
        return loss, {"critic/value_loss": loss.detach()}


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
        if isinstance(stream, SyncTrainStream):
            require_same_ranks(stream, self._processes)
            stream.require_commits(settings.commit_every_steps, "commit_every_steps")
        self._numbers = StepNumbers(self._processes)
        self._value_loss = ValueLossFn(settings.value_clip_range, algorithm.loss_agg_mode)
        adaptive = algorithm.kl_loss.adaptive or algorithm.kl_penalty.adaptive
        if adaptive and self._processes.world_size > 1:
            raise InvalidArgumentError(
                "an adaptive KL coefficient would differ from rank to rank: give a fixed one"
            )
        # Before a model is used: a reference may be tried out.
        self._bits = SameBits(stream, self._processes, deterministic=settings.deterministic)
        policy = policy_of(model)
        require_trained(policy, optimizer)
        if reference is not None:
            reference = policy_of(reference)
        elif algorithm.needs_reference:
            reference = reference_of(policy)  # before it takes the weights of a commit
        with self._bits.asked():
            self.state = self._begun(policy, stream.resume)
        for name, coefficient in self.state.coefficients.items():
            getattr(algorithm, name).kl_coef = coefficient
        critic = None if self.state.critic is None else self.state.critic[0]
        self._skipped: dict[int, list[str]] = {}  # step -> uids, until they are committed
        self._look_at: list[str] = []
        self._skipped_in_a_row = 0 if stream.resume is None else stream.resume.skipped
        teacher = None if teacher is None else policy_of(teacher)
        self._models = Models(policy, critic, reference, teacher)
        self._commits = Commits(stream, settings, self._processes, policy)
        require_models(algorithm, self._models)
        if isinstance(stream, SyncTrainStream):  # a replay lacks nothing that the run had
            require_of(algorithm, stream, teacher=teacher is not None)

    def _begun(self, policy: Policy, resume: Resume | None) -> TrainerState[Any]:
        """Return the state after the last commit, or that of the beginning."""
        if self._settings.seed is not None:
            torch.manual_seed(self._settings.seed + self._processes.rank)
        critic = new_critic(policy) if self._algorithm.type.use_critic else None
        if resume is not None and resume.checkpoint is not None:
            return load_checkpoint(
                resume.checkpoint,
                self._optimizer_of,
                policy,
                critic,
                rank=self._processes.rank,
                takes_groups=self._optimizer is not None,
                device=self._stream.device,
            )
        pair = None if critic is None else (critic, self._optimizer_of(critic, is_critic=True))
        return TrainerState(policy, self._optimizer_of(policy), 0, ManifestChain(), pair)

    def _optimizer_of(self, model: Trainable, *, is_critic: bool = False) -> torch.optim.Optimizer:
        if self._optimizer is not None and not is_critic:
            return self._optimizer
        return self._settings.optimizer_of(model, is_critic=is_critic)

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

    def run(
        self,
        report: Callable[[StepReport], bool | None] = lambda _: None,
        *,
        measure: Callable[[int], dict[str, float]] = lambda _: {},
    ) -> None:
        """Train until the stream ends, ``max_steps`` is reached, or ``report`` returns True.

        What was trained is committed before it returns. A step whose loss or gradient norm is not
        finite changes nothing; its commit says so.

        Args:
            report: hears of every step.
            measure: called after every step with its number; what it returns on rank 0 is recorded
                with the step's commit.

        Raises:
            NonFiniteError: ``max_skipped_steps`` in a row were skipped, which is committed; or the
                weights themselves are not finite, which is not.
        """
        if self._reached(self.state.step):
            return
        with closing(self._commits):
            last = self._steps(report, measure)
            if last is not None:
                self._commit(*last)
            self._commits.finish()

    def _steps(
        self,
        report: Callable[[StepReport], bool | None],
        measure: Callable[[int], dict[str, float]],
    ) -> tuple[TrainStep, dict[str, float]] | None:
        """Train; return the last step and its numbers if it is still to be committed."""
        last: tuple[TrainStep, dict[str, float]] | None = None
        for step in self._stream:
            self._commits.look()
            begin = time.perf_counter()
            meter = None
            if self._settings.record_row_metrics and step.microbatches:
                meter = StepMeter(step, tokens=self._settings.record_token_metrics)
            with self._bits.asked(step.environment):
                self._bits.compare(step, self.policy)
                metrics = self._train(step, meter)
            self._remember(step)
            if step.staleness is not None:
                metrics["staleness"] = step.staleness
            # After the weights have moved: it measures what the commit saves.
            metrics |= measure(step.step)
            measures = None if meter is None else meter.measures(metrics, self._processes)
            if measures is not None:
                self._stream.measure(measures)
            # Not two steps' tensors, while it is uncommitted.
            last = replace(step, microbatches=[]), metrics
            ending = self._reached(step.step) or self._gives_up
            committed = ending or step.step % self._settings.commit_every_steps == 0
            if committed:
                committed = self._commit(step, metrics)
                last = None
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
                raise self._given_up(step)
            if stop or ending:
                break
        return last

    def _reached(self, step: int) -> bool:
        return self._settings.max_steps is not None and step >= self._settings.max_steps

    def _train(self, step: TrainStep, meter: StepMeter | None) -> dict[str, float]:
        """Step the optimizers if all is finite; return the numbers of the step."""
        if not step.microbatches:  # every row was dropped: it changes nothing
            self._skipped_in_a_row = 0
            return {"loss": 0.0, "gradient_norm": 0.0}
        recomputed = self._settings.recompute_old_logprob
        settle_sampling(step, self._algorithm, recomputed=recomputed)
        require_taken(step, self._stream.uids, self._models)
        require_known(step, self._stream.uids, self._models)
        blaming = partial(blame_rows, step, self._stream.uids)
        coefficients = self._coefficients()
        prepared = prepare(
            step,
            self._algorithm,
            self._models,
            blaming=blaming,
            reduce=self._processes.sum,
            recompute_old_logprob=recomputed,
        )
        rows = sum(len(microbatch["sample_index"]) for microbatch in step.microbatches)
        totals = {name: Number(value, rows) for name, value in prepared.items()}
        self.state.optimizer.zero_grad(set_to_none=True)
        parts = []
        for microbatch in step.microbatches:
            with blaming(microbatch):
                loss, metrics = self._gradient(microbatch, meter)
            parts.append({"loss": loss, **metrics})
        row_metrics = [f"actor/{name}" for name in self._algorithm.policy_loss.row_metrics]
        totals |= combined(parts, step.microbatches, row_metrics)
        norm = self._clipped(self.state.policy, self.state.optimizer)
        # What decides is read in one exchange with everything that is only reported.
        deciding = [totals["loss"].value, norm]
        totals["gradient_norm"] = Number(norm)
        totals["learning_rate"] = Number(self._rate(step))
        if self.state.critic is not None:
            of_critic, of_critic_norm = self._critic_gradient(step, *self.state.critic)
            totals |= of_critic
            deciding += [of_critic["critic/value_loss"].value, of_critic_norm]
        finite, numbers = self._numbers.read(deciding, totals)
        if finite and not step.skipped:
            self._step(step)
            if "actor/kl_loss" in numbers:  # an adaptive coefficient; a penalty's has moved already
                rows_of_step = step.microbatches[0].layout.global_sequences
                self._algorithm.kl_loss.update_kl_coef(numbers["actor/kl_loss"], rows_of_step)
            self._skipped_in_a_row = 0
        else:
            self._skip(step, coefficients)
        return numbers

    def _rate(self, step: TrainStep) -> float:
        """Return the learning rate of a step: the schedule's, or that of the given optimizer."""
        if self._optimizer is None:
            return self._settings.rate_at(step.step)
        return float(self._optimizer.param_groups[0]["lr"])

    def _step(self, step: TrainStep) -> None:
        """Let the optimizers take their steps."""
        if self._optimizer is None:
            _set_rate(self.state.optimizer, self._rate(step))
        reached("before-step")
        self._commits.hold()
        self.state.optimizer.step()
        if self.state.critic is not None:
            _set_rate(self.state.critic[1], self._settings.critic_rate_at(step.step))
            self.state.critic[1].step()
        reached("after-step")

    def _skip(self, step: TrainStep, coefficients: Mapping[str, float]) -> None:
        """Leave weights, optimizers and coefficients as they were; note which rows to look at."""
        for name, coefficient in coefficients.items():
            getattr(self._algorithm, name).kl_coef = coefficient
        self.state.optimizer.zero_grad(set_to_none=True)
        if self.state.critic is not None:
            self.state.critic[1].zero_grad(set_to_none=True)
        rows = largest_rows(step, self._algorithm, self.state.policy, self._processes)
        self._look_at = self._skipped[step.step] = self._stream.uids(step, rows)
        self._skipped_in_a_row += 1

    @property
    def _gives_up(self) -> bool:
        most = self._settings.max_skipped_steps
        return most is not None and self._skipped_in_a_row >= most

    def _given_up(self, step: TrainStep) -> NonFiniteError:
        uids = ", ".join(self._look_at) or "none was found"
        return NonFiniteError(
            f"loss or gradient norm were not finite in {self._skipped_in_a_row} steps in a row, up "
            f"to step {step.step}, and none of them changed the weights: look at the rows with the "
            f"largest terms ({uids}) with `trinity-buffer show UID`, lower the learning rate "
            f"({self._settings.learning_rate:g}), or go on from an older step with resume_from="
        )

    def _gradient(
        self, microbatch: MicroBatch, meter: StepMeter | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add to the gradient of the weights; return the loss and its metrics."""
        scores = self.state.policy.scores(microbatch)
        loss, metrics = self._algorithm.loss(
            scores.logprob,
            microbatch,
            entropy=scores.entropy,
            layout=microbatch.layout,
            weigh=None if meter is None else meter.weigh,
        )
        loss.backward()
        if meter is not None:
            meter.add(microbatch, scores)
        return loss.detach(), metrics

    def _critic_gradient(
        self, step: TrainStep, critic: Critic, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Number], Tensor]:
        """Return the metrics of the critic's loss, and the norm of its gradient."""
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
        return combined(parts, step.microbatches), self._clipped(critic, optimizer)

    def _clipped(self, model: Trainable, optimizer: torch.optim.Optimizer) -> Tensor:
        """Average the gradients over the ranks, scale them down to the limit, return their norm.

        Only those of weights that the optimizer holds: nothing would ever clear the others.
        """
        held = held_by(optimizer)
        weights = []
        for weight in model.parameters():
            if id(weight) in held:
                weights.append(weight)
            else:
                weight.grad = None
        self._processes.average_gradients(model, weights)
        limit = self._settings.max_gradient_norm
        return whole(torch.nn.utils.clip_grad_norm_(weights, limit).detach())

    def _remember(self, step: TrainStep) -> None:
        """Note what the weights went through: true from here on, committed or not."""
        self.state = replace(
            self.state,
            step=step.step,
            manifests=self.state.manifests.after(step.manifest.digest),
            coefficients=self._coefficients(),
            log_head=step.log_head,
        )

    def _coefficients(self) -> dict[str, float]:
        """Return the coefficients that adapt from step to step."""
        return {
            name: getattr(self._algorithm, name).kl_coef
            for name in ("kl_loss", "kl_penalty")
            if getattr(self._algorithm, name).adaptive
        }

    def _commit(self, step: TrainStep, metrics: dict[str, float]) -> bool:
        """Commit all steps up to ``step``; return whether that is done, or only begun."""
        skipped, self._skipped = self._skipped, {}
        environment = self._bits.environment
        return self._commits.commit(
            step, self.state, metrics=metrics, environment=environment, skipped=skipped
        )


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
