"""Supervised fine-tuning: the negative log-likelihood of recorded tokens."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import (
    aggregate_loss,
    aggregation_mode,
    keep,
)
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import (
    POLICY_LOSS_FN,
    LossAndMetrics,
    PolicyLossFn,
    detached,
)


@POLICY_LOSS_FN.register_module("sft")
class SFTLossFn(PolicyLossFn):
    """``-logprob``.

    Args:
        backend: whose names callers use.
        loss_agg_mode: see `aggregate_loss`.
    """

    def __init__(self, backend: str = "verl", loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend)
        self.loss_agg_mode = aggregation_mode(loss_agg_mode)

    @override
    def __call__(
        self, logprob: Tensor, action_mask: Tensor, *, layout: BatchLayout | None = None
    ) -> LossAndMetrics:
        """Return the loss; inputs ``[B, T]``, or ``[T]`` packed."""
        losses = -keep(action_mask, logprob)
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode, layout=layout)
        return loss, detached({"sft_loss": loss})
