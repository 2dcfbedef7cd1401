"""The loss with which a critic is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_buffer.algorithm.functional import aggregate_loss, keep
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import InvalidArgumentError

Metrics = dict[str, Tensor]


class ValueLossFn:
    """Half the squared error between values and returns, on action tokens.

    ``clip_range`` keeps new values near the old ones, as in PPO's first implementations: the worse
    of the two errors counts. The algorithms' descriptions name no such range, so there is none by
    default.

    Args:
        clip_range: how far a value may move from the one of the step's beginning; None: any way.
        loss_agg_mode: see `aggregate_loss`.
    """

    def __init__(self, clip_range: float | None = None, loss_agg_mode: str = "token-mean") -> None:
        if clip_range is not None and clip_range <= 0:
            raise InvalidArgumentError(f"value_clip_range={clip_range}: it must be positive")
        self.clip_range = clip_range
        self.loss_agg_mode = loss_agg_mode

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
