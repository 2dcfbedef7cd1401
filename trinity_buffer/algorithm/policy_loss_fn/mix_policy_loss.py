"""MIX: the policy's own rollouts by PPO, an expert's by supervised fine-tuning, at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import aggregation_mode, mask_of_rows
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import (
    POLICY_LOSS_FN,
    LossAndMetrics,
    Metrics,
    PolicyLossFn,
    detached,
)
from trinity_buffer.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.sft_loss import SFTLossFn
from trinity_buffer.errors import InvalidArgumentError

RUN_TIME = frozenset(
    {
        "use_dynamic_bsz",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ngpus_trainer",
        "train_batch_size_usual",
        "train_batch_size_expert",
    }
)
"""Arguments of `RowScales`: they describe a run of the reference's trainer."""


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
        per_gpu = batch // self.ngpus_trainer
        if self.use_dynamic_bsz:
            per_row = (self.ppo_mini_batch_size // self.ngpus_trainer) / all_rows / per_gpu
        else:
            per_row = (self.ppo_mini_batch_size // self.ppo_micro_batch_size_per_gpu) / per_gpu
        return rows * per_row


class TwoKindsLoss:
    """PPO of the usual rows and a supervised loss of the expert's, each by its own denominators."""

    def __init__(self, usual: PolicyLossFn, expert: PolicyLossFn, scales: RowScales) -> None:
        self.usual = usual
        self.expert = expert
        self.scales = scales

    def parts(
        self, tensors: Mapping[str, Tensor], expert_mask: Tensor, layout: BatchLayout | None
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return the usual part, the expert part, and the metrics of both under prefixes.

        Args:
            tensors: ``logprob``, ``old_logprob``, ``action_mask`` and ``advantages``.
            expert_mask: bool, per row ``[N]`` or per token.
            layout: boundaries and denominators; without it the parts are scaled by `RowScales`.
        """
        if layout is None:
            return self._of_rows(tensors, expert_mask)
        mask = tensors["action_mask"]
        expert = mask_of_rows(expert_mask, tensors["logprob"], layout)
        usual_loss, usual_metrics = self.usual(
            **{**tensors, "action_mask": mask * ~expert}, layout=layout.part("usual")
        )
        expert_loss, expert_metrics = self.expert(
            logprob=tensors["logprob"], action_mask=mask * expert, layout=layout.part("expert")
        )
        return usual_loss, expert_loss, _prefixed(usual_metrics, expert_metrics)

    def _of_rows(
        self, tensors: Mapping[str, Tensor], expert_mask: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return the parts of a padded batch on its own, scaled as the reference does."""
        expert = expert_mask.reshape(len(expert_mask), -1).any(-1)
        ours = {name: tensor[~expert] for name, tensor in tensors.items()}
        theirs = {name: tensors[name][expert] for name in ("logprob", "action_mask")}
        results = []
        for loss_fn, rows, is_expert in ((self.usual, ours, False), (self.expert, theirs, True)):
            scale = self.scales.of(len(rows["logprob"]), len(expert), expert=is_expert)
            loss, metrics = loss_fn(**rows)
            results.append((loss * scale, {name: m * scale for name, m in metrics.items()}))
        (usual_loss, usual_metrics), (expert_loss, expert_metrics) = results
        return usual_loss, expert_loss, _prefixed(usual_metrics, expert_metrics)


def _prefixed(usual: Metrics, expert: Metrics) -> Metrics:
    return {f"usual/{name}": value for name, value in usual.items()} | {
        f"expert/{name}": value for name, value in expert.items()
    }


@POLICY_LOSS_FN.register_module("mix")
class MIXPolicyLossFn(PolicyLossFn):
    """``(1 - mu) PPO(usual rows) + mu SFT(expert rows)``.

    With a layout each part is divided by the step's counts of its own kind. Without one it is
    scaled as the reference does (`RowScales`), from the six arguments that describe a run of that.

    Args:
        backend: whose names callers use.
        mu: share of the expert part.
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
    run_time = RUN_TIME

    def __init__(
        self,
        backend: str = "verl",
        mu: float = 0.1,
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
        self.mu = mu
        usual = PPOPolicyLossFn(
            "trinity",
            clip_range,
            clip_range_low,
            clip_range_high,
            loss_agg_mode=aggregation_mode(grpo_loss_agg_mode, loss_agg_mode),
        )
        expert = SFTLossFn("trinity", aggregation_mode(sft_loss_agg_mode, loss_agg_mode))
        scales = RowScales(
            bool(use_dynamic_bsz),
            ppo_mini_batch_size,
            ppo_micro_batch_size_per_gpu,
            ngpus_trainer,
            train_batch_size_usual,
            train_batch_size_expert,
        )
        self.kinds = TwoKindsLoss(usual, expert, scales)

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
        usual, expert, metrics = self.kinds.parts(tensors, expert_mask, layout)
        loss = (1.0 - self.mu) * usual + self.mu * expert
        return loss, detached({**metrics, "loss": loss})
