"""Entropy bonuses: what the trainer *subtracts* from the loss, to keep the policy exploring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.arguments import Configured, Registry
from trinity_buffer.algorithm.functional import Metrics, aggregate_loss, mask_of_rows
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import InvalidArgumentError

__all__ = [
    "ENTROPY_LOSS_FN",
    "DefaultEntropyLossFn",
    "DummyEntropyLossFn",
    "EntropyLossFn",
    "MixEntropyLossFn",
]


@dataclass(eq=False)
class EntropyLossFn(Configured):
    """An aggregated entropy and its coefficient.

    Args:
        entropy_coef: what the entropy is multiplied by.

    Attributes:
        usual_rows_only: whether it must be told which rows are an expert's.
    """

    usual_rows_only: ClassVar[bool] = False

    entropy_coef: float = 0.0

    def __call__(
        self,
        entropy: Tensor,
        action_mask: Tensor,
        expert_mask: Tensor | None = None,
        loss_agg_mode: str = "token-mean",
        *,
        layout: BatchLayout | None = None,
        **_: Any,
    ) -> tuple[Tensor, Metrics]:
        """Return ``entropy_coef`` times the aggregated entropy, and what to log.

        Args:
            entropy: of the policy at each token, ``[B, T]``, or ``[T]`` packed.
            action_mask: what counts.
            expert_mask: bool, per row ``[N]`` or per token; only `MixEntropyLossFn` looks at it.
            loss_agg_mode: see `aggregate_loss`.
            layout: boundaries and denominators of the step.
            _: other tensors of the batch, which a trainer may offer to every loss.
        """
        counted = self.counted(entropy, action_mask, expert_mask, layout)
        loss = aggregate_loss(*counted[:2], loss_agg_mode, layout=counted[2])
        return loss * self.entropy_coef, {"entropy_loss": loss.detach()}

    def counted(
        self, entropy: Tensor, mask: Tensor, expert_mask: Tensor | None, layout: BatchLayout | None
    ) -> tuple[Tensor, Tensor, BatchLayout | None]:
        """Return the entropies that count, their mask, and the layout with their denominators."""
        return entropy, mask, layout


ENTROPY_LOSS_FN: Registry[type[EntropyLossFn]] = Registry("entropy_loss_fn")


@ENTROPY_LOSS_FN.register_module("default")
class DefaultEntropyLossFn(EntropyLossFn):
    """The entropy of all action tokens."""


@ENTROPY_LOSS_FN.register_module("mix")
class MixEntropyLossFn(EntropyLossFn):
    """The entropy of the usual rows: an expert's tokens are no exploration. 0 if there are none."""

    usual_rows_only = True

    @override
    def counted(
        self, entropy: Tensor, mask: Tensor, expert_mask: Tensor | None, layout: BatchLayout | None
    ) -> tuple[Tensor, Tensor, BatchLayout | None]:
        """Return those of the usual rows.

        Raises:
            InvalidArgumentError: there is no ``expert_mask``.
        """
        if expert_mask is None:
            raise InvalidArgumentError("MixEntropyLossFn needs expert_mask, it is None")
        if layout is None:
            # Rows leave the batch, so that a mean over sequences does not count them.
            usual = ~expert_mask.bool().reshape(len(expert_mask), -1).any(-1)
            return entropy[usual], mask[usual], None
        # With a layout the shape stays, and the denominator is the step's count of usual rows.
        usual = ~mask_of_rows(expert_mask, entropy, layout)
        return entropy, mask * usual, layout.part("usual")


@ENTROPY_LOSS_FN.register_module("none")
class DummyEntropyLossFn(EntropyLossFn):
    """No entropy bonus."""

    @override
    def __call__(self, entropy: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Metrics]:
        """Return 0 and nothing to log."""
        return torch.zeros((), device=entropy.device), {}
