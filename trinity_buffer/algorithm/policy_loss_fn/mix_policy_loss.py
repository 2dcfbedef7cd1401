"""MIX: the policy's own rollouts by PPO, an expert's by supervised fine-tuning, at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.arguments import POSITIVE, checked
from trinity_buffer.algorithm.functional import Metrics, aggregation_mode, mask_of_rows
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn import policy_loss_fn
from trinity_buffer.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.sft_loss import SFTLossFn
from trinity_buffer.errors import InvalidArgumentError


@dataclass(eq=False)
class TwoKindsLossFn(policy_loss_fn.PolicyLossFn):
    """PPO of the usual rows and a supervised loss of the expert's, each by its own denominators.

    With a layout each part is divided by the step's counts of its own kind. Without one it is
    scaled as the reference does, by ``rows * micro-batches / batch``: that cannot know the step, so
    that users state its six numbers, all 1 at first, and the parts are multiplied by their rows.

    Args:
        backend: whose names callers use.
        clip_range: see `PPOPolicyLossFn`.
        clip_range_low: see there.
        clip_range_high: see there.
        use_dynamic_bsz: the reference's micro-batches are cut by tokens.
        ppo_mini_batch_size: rows of a step of the reference.
        ppo_micro_batch_size_per_gpu: rows of a micro-batch, where they are cut by rows.
        ngpus_trainer: its GPUs.
        train_batch_size_usual: the policy's own rows of a batch.
        train_batch_size_expert: the expert's.
        loss_agg_mode: of both parts, see `aggregate_loss`.
        sft_loss_agg_mode: of the expert part.
        grpo_loss_agg_mode: of the usual part.
    """

    tuned = {"clip_range": 0.2}
    runtime_args = (
        *("backend", "use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"),
        *("ngpus_trainer", "train_batch_size_usual", "train_batch_size_expert"),
    )

    _: KW_ONLY
    clip_range: float | None = None
    clip_range_low: float | None = None
    clip_range_high: float | None = None
    use_dynamic_bsz: bool | None = None
    ppo_mini_batch_size: int = 1
    ppo_micro_batch_size_per_gpu: int = checked(1, POSITIVE)
    ngpus_trainer: int = 1
    train_batch_size_usual: int = 1
    train_batch_size_expert: int = 1
    loss_agg_mode: str = "token-mean"
    sft_loss_agg_mode: str | None = None
    grpo_loss_agg_mode: str | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        limits = (self.clip_range, self.clip_range_low, self.clip_range_high)
        mode = aggregation_mode(self.grpo_loss_agg_mode, self.loss_agg_mode)
        self.usual = PPOPolicyLossFn("trinity", *limits, loss_agg_mode=mode)
        mode = aggregation_mode(self.sft_loss_agg_mode, self.loss_agg_mode)
        self.expert: policy_loss_fn.LikelihoodLossFn = SFTLossFn("trinity", mode)
        for name in ("train_batch_size_usual", "train_batch_size_expert"):
            batch = getattr(self, name)
            if self.ngpus_trainer < 1 or batch < self.ngpus_trainer:
                raise InvalidArgumentError(
                    f"{name} ({batch}) must be at least ngpus_trainer ({self.ngpus_trainer}), "
                    "and that positive"
                )

    def parts(
        self, tensors: Sequence[Tensor], expert_mask: Tensor, layout: BatchLayout | None
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return the usual part, the expert part, and the metrics of both under prefixes.

        Args:
            tensors: log-probabilities, those of the policy that sampled, mask and advantages.
            expert_mask: bool, per row ``[N]`` or per token.
            layout: boundaries and denominators of the step.
        """
        logprob, old_logprob, action_mask, advantages = tensors
        if layout is not None:
            is_expert = mask_of_rows(expert_mask, logprob, layout)
            # Masked rather than taken out: the shape stays, and so do compiled graphs.
            usual_mask, mask = action_mask * ~is_expert, action_mask * is_expert
            usual, usual_metrics = self.usual(
                logprob, old_logprob, usual_mask, advantages, layout=layout.part("usual")
            )
            expert, expert_metrics = self.expert(logprob, mask, layout=layout.part("expert"))
        else:
            is_expert = expert_mask.reshape(len(expert_mask), -1).any(-1)
            ours = [tensor[~is_expert] for tensor in tensors]
            theirs = [tensor[is_expert] for tensor in (logprob, action_mask)]
            usual, usual_metrics = self._scaled(self.usual, ours, len(is_expert))
            expert, expert_metrics = self._scaled(self.expert, theirs, len(is_expert))
        metrics = {f"usual/{name}": value for name, value in usual_metrics.items()}
        metrics |= {f"expert/{name}": value for name, value in expert_metrics.items()}
        return usual, expert, metrics

    def _scaled(
        self, loss_fn: policy_loss_fn.PolicyLossFn, tensors: list[Tensor], all_rows: int
    ) -> policy_loss_fn.LossAndMetrics:
        """Return the loss of some rows of a padded batch, scaled as the reference does."""
        loss, metrics = loss_fn(*tensors)
        is_expert = loss_fn is self.expert
        batch = self.train_batch_size_expert if is_expert else self.train_batch_size_usual
        # As the reference divides: whole rows for each GPU.
        per_gpu = batch // self.ngpus_trainer
        if self.use_dynamic_bsz:
            per_row = (self.ppo_mini_batch_size // self.ngpus_trainer) / all_rows / per_gpu
        else:
            per_row = (self.ppo_mini_batch_size // self.ppo_micro_batch_size_per_gpu) / per_gpu
        scale = len(tensors[0]) * per_row
        return loss * scale, {name: metric * scale for name, metric in metrics.items()}


@policy_loss_fn.POLICY_LOSS_FN.register_module("mix")
@dataclass(eq=False)
class MIXPolicyLossFn(TwoKindsLossFn):
    """``(1 - mu) PPO(usual rows) + mu SFT(expert rows)``.

    Args:
        backend: whose names callers use.
        mu: share of the expert part.
        kwargs: the options of `TwoKindsLossFn`.
    """

    mu: float = 0.1

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
    ) -> policy_loss_fn.LossAndMetrics:
        """Return the loss; inputs ``[B, T]`` or packed ``[T]``, ``expert_mask`` by row or token."""
        tensors = (logprob, old_logprob, action_mask, advantages)
        usual, expert, metrics = self.parts(tensors, expert_mask, layout)
        loss = (1.0 - self.mu) * usual + self.mu * expert
        return loss, policy_loss_fn.detached({**metrics, "loss": loss})
