"""The models of a trainer: those beside its policy, and what all say of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trinity_buffer.algorithm import Algorithm
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.microbatch import MicroBatch
from trinity_buffer.pipeline.streaming.train_step import Reduce, TrainStep
from trinity_buffer.trainer.parallel import is_sharded
from trinity_buffer.trainer.policy import Critic, Policy, in_eval_mode
from trinity_buffer.trainer.token_scores import stand_in


@dataclass(slots=True)
class Models:
    """The policy and those beside it.

    Attributes:
        policy: what is trained.
        critic: trained beside it, where the algorithm uses one.
        reference: frozen; by default the policy of version 0.
        teacher: frozen; None: teachers' log-probabilities come with the data, or are not needed.
    """

    policy: Policy
    critic: Critic | None = None
    reference: Policy | None = None
    teacher: Policy | None = None


def require_models(algorithm: Algorithm, models: Models) -> None:
    """Refuse ``models`` that lack one that the algorithm needs.

    Raises:
        InvalidArgumentError: names the one that is missing.
    """
    lacking = [
        name
        for name, needed in (
            ("critic", algorithm.type.use_critic),
            ("reference", algorithm.needs_reference),
        )
        if needed and getattr(models, name) is None
    ]
    if lacking:
        raise InvalidArgumentError(f"algorithm {algorithm.name!r} needs a {lacking[0]} model")


def require_trained(policy: Policy, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise unless steps of ``optimizer`` can change ``policy``, and a checkpoint keeps the change.

    Args:
        policy: what is trained.
        optimizer: that was given, None if none was.

    Raises:
        InvalidArgumentError: they cannot; says what to give.
    """
    weights = list(policy.parameters())
    if any(map(is_sharded, weights)) and not hasattr(policy, "held"):
        raise InvalidArgumentError(
            f"ranks hold the weights of a {type(policy).__name__} in parts (FSDP2), and it does "
            "not say what a checkpoint keeps of them: give the Trainer the model of transformers "
            "itself, or train in a loop of your own"
        )
    if any(map(is_sharded, weights)) and not all(map(is_sharded, weights)):
        raise InvalidArgumentError(
            "ranks hold some weights of the model in parts (FSDP2) and others whole: call "
            "fully_shard on the model itself, too, after its layers"
        )
    if not any(weight.requires_grad for weight in weights):
        raise InvalidArgumentError(
            "no parameter of the model requires a gradient, so that nothing can be trained: call "
            "model.requires_grad_(), or add an adapter"
        )
    own = {id(weight) for weight in weights}
    held = own if optimizer is None else _held_of(optimizer, weights)
    unsaved: Mapping[str, Tensor] = getattr(policy, "unsaved", dict)()
    if lost := [name for name, weight in unsaved.items() if id(weight) in held]:
        raise InvalidArgumentError(
            f"a checkpoint keeps the active adapter alone, and {len(lost)} weights outside it "
            f"would be trained and lost, such as {lost[0]}: name their modules in modules_to_save "
            "of the adapter's configuration, freeze them (requires_grad_(False)), or leave them "
            "out of optimizer="
        )


def _held_of(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]) -> set[int]:
    """Return the ``id`` of what ``optimizer`` holds, if that is some of the model's weights."""
    if not hasattr(optimizer, "param_groups"):
        raise InvalidArgumentError(
            f"optimizer={optimizer!r:.80} is no optimizer: make one of the model's parameters, "
            "such as torch.optim.AdamW(model.parameters(), lr=1e-6)"
        )
    held = held_by(optimizer)
    if not any(id(weight) in held and weight.requires_grad for weight in weights):
        raise InvalidArgumentError(
            "optimizer= holds no parameter of this model that requires a gradient, so that its "
            "steps would change nothing: make it of model.parameters() of the very model that the "
            "Trainer is given"
        )
    if foreign := held - {id(weight) for weight in weights}:
        raise InvalidArgumentError(
            f"optimizer= holds {len(foreign)} parameters that are not this model's, which no "
            "checkpoint would keep: make it of model.parameters(), all or some of them"
        )
    return held


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ``id`` of every weight that ``optimizer`` steps."""
    return {id(weight) for group in optimizer.param_groups for weight in group["params"]}


def new_critic(policy: Policy) -> Critic:
    """Return a fresh critic that reads what ``policy`` reads.

    Raises:
        InvalidArgumentError: this policy cannot make one.
    """
    make = getattr(policy, "new_critic", None)
    if make is None:
        raise InvalidArgumentError(
            f"the algorithm trains a critic, and {type(policy).__name__} has no method "
            "`new_critic()`: add it, or choose an algorithm without a critic, such as grpo"
        )
    return make()  # type: ignore[no-any-return]  # found by its name


def values_of(critic: Critic, microbatch: MicroBatch) -> Tensor:
    """Return the value of every token of a micro-batch."""
    ids = microbatch["input_ids"]
    read = microbatch if ids.numel() else stand_in(microbatch)
    found = critic.values(
        read["input_ids"], cu_seqlens=read.get("cu_seqlens"), max_seqlen=read.get("max_seqlen")
    )
    if ids.numel():
        return found
    return found[:0] if ids.dim() == 1 else found[:0, : ids.shape[1]]


def prepare(
    step: TrainStep,
    algorithm: Algorithm,
    models: Models,
    *,
    noted: Callable[[MicroBatch], AbstractContextManager[object]] = nullcontext,
    reduce: Reduce | None = None,
    recompute_old_logprob: bool = False,
) -> dict[str, Any]:
    """Put everything into the micro-batches that the loss reads and the store does not hold.

    Log-probabilities of the policy before the step, of reference and teacher, and values, all of
    them without dropout; then, over the whole step, the penalty on rewards and the advantages.

    Args:
        step: changed in place.
        algorithm: what is trained.
        models: of the trainer.
        noted: what is done with a micro-batch is done inside this context.
        reduce: sums a tensor over data-parallel ranks.
        recompute_old_logprob: whatever the explorers recorded.

    Raises:
        InvalidArgumentError: a tensor is missing; the message names it.
    """
    with in_eval_mode(models.policy, models.critic, models.reference, models.teacher):
        for microbatch in step.microbatches:
            if recompute_old_logprob:
                microbatch.drop("old_logprob")
            with noted(microbatch):
                _score(microbatch, algorithm, models, recompute_old_logprob=recompute_old_logprob)
    metrics: dict[str, Any] = {}
    if algorithm.choices["kl_penalty_fn"].name != "none":
        metrics |= step.apply(lambda batch, layout: _penalize(algorithm, batch, layout))
    if algorithm.advantage is not None:
        metrics |= step.compute(algorithm.advantage, reduce=reduce)
    return metrics


@torch.no_grad()
def _score(
    microbatch: MicroBatch, algorithm: Algorithm, models: Models, *, recompute_old_logprob: bool
) -> None:
    wanted = algorithm.tensors | _read_by_advantages(algorithm)
    # Where nobody recorded any, both keys are absent: to compute them unasked would say that the
    # rollouts were made by these very weights.
    left_to_us = recompute_old_logprob or "rollout_logprob" in microbatch
    before = "old_logprob" not in microbatch and left_to_us
    if before or "entropy" in wanted:
        scores = models.policy.scores(microbatch)
        microbatch["entropy"] = scores.entropy
        if before:
            microbatch["old_logprob"] = scores.logprob
    if "necs" in wanted:
        microbatch["necs"] = _necs(models.policy, microbatch)
    if models.reference is not None and algorithm.needs_reference:
        microbatch["ref_logprob"] = models.reference.scores(microbatch).logprob
    if models.teacher is not None:
        microbatch["teacher_logprob"] = models.teacher.scores(microbatch).logprob
    if "teacher_logprob" in wanted and "teacher_logprob" not in microbatch:
        raise InvalidArgumentError(
            f"algorithm {algorithm.name!r} needs teacher_logprob: store teacher_logprobs with the "
            "experiences, or give the trainer a teacher policy"
        )
    if models.critic is not None and algorithm.type.use_critic:
        microbatch["values"] = values_of(models.critic, microbatch)


def _necs(policy: Policy, microbatch: MicroBatch) -> Tensor:
    """Return the expected change of entropy at every token, 0 where nothing was acted."""
    changes = getattr(policy, "entropy_changes", None)
    if changes is None:
        raise InvalidArgumentError(
            f"{type(policy).__name__} has no method `entropy_changes(microbatch)`, and the "
            "algorithm needs the expected change of entropy: add it (`token_scores.py` has one "
            "for any hidden states), or choose another advantage function"
        )
    found: Tensor = changes(microbatch)
    return found.where(microbatch["action_mask"], 0.0)


def _read_by_advantages(algorithm: Algorithm) -> frozenset[str]:
    return frozenset(() if algorithm.advantage is None else algorithm.advantage.tensors)


def _penalize(
    algorithm: Algorithm, batch: dict[str, Any], layout: BatchLayout
) -> dict[str, Tensor]:
    """Take the divergence from the reference off the rewards; return metrics."""
    scored = {**batch, "token_level_scores": batch["token_level_rewards"]}
    changed, metrics = algorithm.kl_penalty.apply_kl_penalty_to_reward(scored, layout=layout)
    batch["token_level_rewards"] = changed["token_level_rewards"]
    return {f"penalty/{name}": value for name, value in metrics.items()}
