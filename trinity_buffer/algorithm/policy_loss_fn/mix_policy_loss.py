"""MIX: the policy's own rollouts by PPO, an expert's by supervised fine-tuning, at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import aggregation_mode, mask_of_rows
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import (
    POLICY_LOSS_FN,
    LikelihoodLossFn,
    LossAndMetrics,
    Metrics,
    PolicyLossFn,
    detached,
)
from trinity_buffer.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.sft_loss import SFTLossFn
from trinity_buffer.errors import InvalidArgumentError


@dataclass(frozen=True)
class RowScales:
    """How the reference scales the two parts of a micro-batch: ``rows * micro-batches / batch``.

    It cannot know the step, so that users state its numbers, all 1 at first: the parts are then
    multiplied by their rows. With a layout none of this applies.
    """

    use_dynamic_bsz: bool
    ppo_mini_batch_size: int
    ppo_micro_batch_size_per_gpu: int
    ngpus_trainer: int
    train_batch_size_usual: int
    train_batch_size_expert: int

    def __post_init__(self) -> None:
        """Refuse numbers that would divide by zero.

        Raises:
            InvalidArgumentError: names them.
        """
        for name, batch in (
            ("train_batch_size_usual", self.train_batch_size_usual),
            ("train_batch_size_expert", self.train_batch_size_expert),
        ):
            if self.ngpus_trainer < 1 or batch < self.ngpus_trainer:
                raise InvalidArgumentError(
                    f"{name} ({batch}) must be at least ngpus_trainer ({self.ngpus_trainer}), "
                    "and that positive"
                )
        if self.ppo_micro_batch_size_per_gpu < 1:
            raise InvalidArgumentError(
                "ppo_micro_batch_size_per_gpu must be positive, "
                f"it is {self.ppo_micro_batch_size_per_gpu}"
            )

    def of(self, rows: int, all_rows: int, *, expert: bool) -> float:
        """Return what the loss of ``rows`` out of ``all_rows`` is multiplied by."""
        batch = self.train_batch_size_expert if expert else self.train_batch_size_usual
        # As the reference divides: whole rows for each GPU.
        per_gpu = batch // self.ngpus_trainer
        if self.use_dynamic_bsz:
            per_row = (self.ppo_mini_batch_size // self.ngpus_trainer) / all_rows / per_gpu
        else:
            per_row = (self.ppo_mini_batch_size // self.ppo_micro_batch_size_per_gpu) / per_gpu
        return rows * per_row


class TwoKindsLossFn(PolicyLossFn):
    """PPO of the usual rows and a supervised loss of the expert's, each by its own denominators.

    With a layout each part is divided by the step's counts of its own kind. Without one it is
    scaled as the reference does (`RowScales`), from the six arguments that describe a run of that.

    Args:
        backend: whose names callers use.
        clip_range: see `PPOPolicyLossFn`.
        clip_range_low: see there.
        clip_range_high: see there.
        use_dynamic_bsz: see `RowScales`.
        ppo_mini_batch_size: see there.
        ppo_micro_batch_size_per_gpu: see there.
        ngpus_trainer: see there.
        train_batch_size_usual: see there.
        train_batch_size_expert: see there.
        loss_agg_mode: of both parts, see `aggregate_loss`.
        sft_loss_agg_mode: of the expert part.
        grpo_loss_agg_mode: of the usual part.
    """

    tuned = {"clip_range": 0.2}
    run_time = frozenset(field.name for field in fields(RowScales))

    def __init__(
        self,
        backend: str = "verl",
        *,
        clip_range: float | None = None,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        use_dynamic_bsz: bool | None = None,
        ppo_mini_batch_size: int = 1,
        ppo_micro_batch_size_per_gpu: int = 1,
        ngpus_trainer: int = 1,
        train_batch_size_usual: int = 1,
        train_batch_size_expert: int = 1,
        loss_agg_mode: str = "token-mean",
        sft_loss_agg_mode: str | None = None,
        grpo_loss_agg_mode: str | None = None,
    ) -> None:
        super().__init__(backend)
        self.usual = PPOPolicyLossFn(
            "trinity",
            clip_range,
            clip_range_low,
            clip_range_high,
            loss_agg_mode=aggregation_mode(grpo_loss_agg_mode, loss_agg_mode),
        )
        expert_mode = aggregation_mode(sft_loss_agg_mode, loss_agg_mode)
        self.expert: LikelihoodLossFn = SFTLossFn("trinity", expert_mode)
        self.scales = RowScales(
            bool(use_dynamic_bsz),
            ppo_mini_batch_size,
            ppo_micro_batch_size_per_gpu,
            ngpus_trainer,
            train_batch_size_usual,
            train_batch_size_expert,
        )

    def parts(
        self, tensors: dict[str, Tensor], expert_mask: Tensor, layout: BatchLayout | None
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return the usual part, the expert part, and the metrics of both under prefixes.

        Args:
            tensors: ``logprob``, ``old_logprob``, ``action_mask`` and ``advantages``.
            expert_mask: bool, per row ``[N]`` or per token.
            layout: boundaries and denominators; without it the parts are scaled by `RowScales`.
        """
        if layout is not None:
            mask = tensors["action_mask"]
            expert = mask_of_rows(expert_mask, tensors["logprob"], layout)
            # Masked rather than taken out: the shape stays, and so do compiled graphs.
            ours = {**tensors, "action_mask": mask * ~expert}
            theirs = {"logprob": tensors["logprob"], "action_mask": mask * expert}
            usual_loss, usual_metrics = self.usual(**ours, layout=layout.part("usual"))
            expert_loss, expert_metrics = self.expert(**theirs, layout=layout.part("expert"))
        else:
            expert = expert_mask.reshape(len(expert_mask), -1).any(-1)
            ours = {name: tensor[~expert] for name, tensor in tensors.items()}
            theirs = {name: tensors[name][expert] for name in ("logprob", "action_mask")}
            usual_loss, usual_metrics = self._scaled(self.usual, ours, len(expert))
            expert_loss, expert_metrics = self._scaled(self.expert, theirs, len(expert))
        metrics = {f"usual/{name}": value for name, value in usual_metrics.items()}
        metrics |= {f"expert/{name}": value for name, value in expert_metrics.items()}
        return usual_loss, expert_loss, metrics

    def _scaled(
        self, loss_fn: PolicyLossFn, rows: dict[str, Tensor], all_rows: int
    ) -> LossAndMetrics:
        """Return the loss of some rows of a padded batch, scaled as the reference does."""
        loss, metrics = loss_fn(**rows)
        is_expert = loss_fn is self.expert
        scale = self.scales.of(len(rows["logprob"]), all_rows, expert=is_expert)
        return loss * scale, {name: metric * scale for name, metric in metrics.items()}


@POLICY_LOSS_FN.register_module("mix")
class MIXPolicyLossFn(TwoKindsLossFn):
    """``(1 - mu) PPO(usual rows) + mu SFT(expert rows)``.

    Args:
        backend: whose names callers use.
        mu: share of the expert part.
        kwargs: the options of `TwoKindsLossFn`.
    """

    def __init__(self, backend: str = "verl", mu: float = 0.1, **kwargs: Any) -> None:
        super().__init__(backend, **kwargs)
        self.mu = mu

    @override
    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
        *,
        layout: BatchLayout | None = None,
    ) -> LossAndMetrics:
        """Return the loss; inputs ``[B, T]`` or packed ``[T]``, ``expert_mask`` by row or token."""
        tensors = {
            "logprob": logprob,
            "old_logprob": old_logprob,
            "action_mask": action_mask,
            "advantages": advantages,
        }
        usual, expert, metrics = self.parts(tensors, expert_mask, layout)
        loss = (1.0 - self.mu) * usual + self.mu * expert
        return loss, detached({**metrics, "loss": loss})
