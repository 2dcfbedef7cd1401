"""DPO: prefer the chosen answer of a pair to the rejected one (arXiv:2305.18290)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid
from typing_extensions import override

from trinity_buffer.algorithm.functional import aggregate_rows, keep, row_sums
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn import policy_loss_fn
from trinity_buffer.errors import InvalidArgumentError


@policy_loss_fn.POLICY_LOSS_FN.register_module("dpo")
@dataclass(eq=False)
class DPOLossFn(policy_loss_fn.PolicyLossFn):
    """``-log sigmoid(beta ((chosen - ref) - (rejected - ref)))``, the mean over pairs.

    Rows 0, 2, ... are chosen, rows 1, 3, ... the rejected ones of the same pairs; a pair lies in
    one micro-batch. The reference adds up the log-ratios of the whole batch before the sigmoid, so
    that it compares one huge pair.

    Args:
        backend: whose names callers use.
        beta: how much a nat of log-ratio counts.
        label_smoothing: probability that a pair is labelled the wrong way round (cDPO).
        per_pair: False compares the batch as one pair, as the reference does.
    """

    pairs = True
    row_metrics = ("chosen_reward", "rejected_reward", "accuracy_mean")
    reference_args = {"per_pair": False}

    beta: float = 0.1
    label_smoothing: float = 0.0
    per_pair: bool = True

    @override
    def __call__(
        self,
        logprob: Tensor,
        ref_logprob: Tensor,
        action_mask: Tensor,
        *,
        layout: BatchLayout | None = None,
    ) -> policy_loss_fn.LossAndMetrics:
        """Return the loss; inputs ``[2 x pairs, T]``, or ``[T]`` packed."""
        ratios = keep(action_mask, logprob) - keep(action_mask, ref_logprob)
        # Summed, not averaged: the likelihood of an answer is the product over its tokens.
        rewards = self.beta * row_sums(ratios * action_mask.to(ratios), layout)
        chosen, rejected = self._pairs(rewards, layout)
        margin = chosen - rejected
        right, wrong = 1.0 - self.label_smoothing, self.label_smoothing
        # logsigmoid, since log(sigmoid(x)) is -inf for large negative margins.
        losses = -right * logsigmoid(margin) - wrong * logsigmoid(-margin)
        # A step counts rows, and two of them are a pair.
        loss = aggregate_rows(losses, layout, rows_per_value=2)
        metrics = {
            "chosen_reward": chosen.mean(),
            "rejected_reward": rejected.mean(),
            "accuracy_mean": (chosen > rejected).to(margin).mean(),
            "dpo_loss": loss,
        }
        return loss, policy_loss_fn.detached(metrics)

    def _pairs(self, rewards: Tensor, layout: BatchLayout | None) -> tuple[Tensor, Tensor]:
        """Return the rewards of the chosen and of the rejected rows, one per pair."""
        chosen, rejected = rewards[0::2], rewards[1::2]
        if not self.per_pair:
            if layout is not None:
                raise InvalidArgumentError(
                    "per_pair=False compares all that it is given as one pair, whatever the step "
                    "holds: it works without a layout only"
                )
            return chosen.sum(0, keepdim=True), rejected.sum(0, keepdim=True)
        if len(chosen) != len(rejected):
            raise InvalidArgumentError(
                "DPO needs pairs of rows, chosen and rejected in turn; "
                f"there are {len(rewards)} rows"
            )
        return chosen, rejected
