"""Importance-sampling correction: the engine that sampled is not the model that trains.

Rollout engines and trainers compute different log-probabilities for the same weights and tokens
(kernels, precision, sampling filters), so that even fresh data are off-policy by
``exp(old_logprob - rollout_logprob)``. A correction turns that ratio into one weight per token. It
is a choice of its own: the trainer multiplies the advantages by the weights, whatever the loss.

That is the same as weighting the loss of a token wherever the loss is proportional to the size of
the advantage. It is not for REC: its ``advantage`` weight has the weighted advantage in the
exponent too, and its regularizers are not weighted. Nor for Clip-Cov and KL-Cov, which choose
tokens by the weighted advantages, and KL-Cov's penalty is not weighted; nor for GMPO, which sees a
sequence's mean advantage; nor for TOPR with an ``advantage_threshold`` other than 0, which the
weighted advantages are compared with. Tokens with weight 0 stay in the denominators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import functional
from trinity_buffer.algorithm.arguments import POSITIVE, Configured, Registry, checked
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import InvalidArgumentError

__all__ = [
    "IMPORTANCE_CORRECTION",
    "IcePop",
    "ImportanceCorrection",
    "NoCorrection",
    "SequenceMIS",
    "SequenceTIS",
    "TokenMIS",
    "TokenTIS",
]


class ImportanceCorrection(Configured, ABC):
    """A correction: a class that says which weight a ratio becomes."""

    by_sequence = False
    """True if the ratio is that of the whole sequence, the product over its tokens."""

    @abstractmethod
    def weigh(self, ratio: Tensor) -> Tensor:
        """Return the weight of each ratio."""

    def __call__(
        self,
        old_logprob: Tensor,
        rollout_logprob: Tensor,
        action_mask: Tensor,
        *,
        layout: BatchLayout | None = None,
    ) -> tuple[Tensor, functional.Metrics]:
        """Return a weight per token, 0 outside the mask and without a gradient, and what to log.

        Args:
            old_logprob: as the trainer computes it before the step, ``[B, T]``, or ``[T]`` packed.
            rollout_logprob: as the rollout engine recorded it.
            action_mask: which tokens the policy generated.
            layout: boundaries of packed sequences.

        Raises:
            InvalidArgumentError: both are one tensor, as where the trainer computed none itself:
                every weight would be 1.
        """
        if old_logprob is rollout_logprob:
            raise InvalidArgumentError(
                f"{type(self).__name__} compares the trainer's log-probabilities with those of the "
                "rollouts, and old_logprob is what the rollouts recorded: set "
                "recompute_old_logprob=True, so that the trainer computes its own before the step"
            )
        # Weights are data. Through them the loss would learn to make its own weight small.
        with torch.no_grad():
            old = functional.keep(action_mask, old_logprob)
            rollout = functional.keep(action_mask, rollout_logprob)
            difference = functional.log_ratio(old, rollout)
            if self.by_sequence:
                summed = functional.row_sums((old - rollout) * (action_mask != 0), layout)
                # A product over thousands of tokens leaves the range of any float.
                limited = summed.clamp(-functional.LOG_RATIO_LIMIT, functional.LOG_RATIO_LIMIT)
                difference = functional.spread(limited, difference, layout)
            ratio = difference.exp()
            weights = functional.keep(action_mask, self.weigh(ratio))
            changed = (weights != ratio).to(ratio)
            logged = {"weight": weights, "changed_frac": changed, "kl": rollout - old}
            return weights, {
                f"rollout_is/{name}": functional.masked_mean(values, action_mask)
                for name, values in logged.items()
            }


IMPORTANCE_CORRECTION: Registry[type[ImportanceCorrection]] = Registry("importance_correction")


@IMPORTANCE_CORRECTION.register_module("none")
class NoCorrection(ImportanceCorrection):
    """Weights of 1: what the engine recorded is believed."""

    @override
    def weigh(self, ratio: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(ratio)


@dataclass(eq=False)
class _Capped(ImportanceCorrection):
    """A correction with a largest ratio.

    Args:
        cap: positive.
    """

    cap: float = checked(2.0, POSITIVE)


@IMPORTANCE_CORRECTION.register_module("token_tis")
class TokenTIS(_Capped):
    """Truncated importance sampling: ``min(ratio, cap)`` (Ionides 2008; Yao et al. 2025)."""

    @override
    def weigh(self, ratio: Tensor) -> Tensor:
        """Return the ratio, at most ``cap``."""
        return ratio.clamp(max=self.cap)


@IMPORTANCE_CORRECTION.register_module("sequence_tis")
class SequenceTIS(TokenTIS):
    """``min(ratio, cap)`` of the whole sequence: less bias than by token, more variance."""

    by_sequence = True


@IMPORTANCE_CORRECTION.register_module("token_mis")
class TokenMIS(_Capped):
    """Masked importance sampling: the ratio up to ``cap``, and 0 beyond."""

    @override
    def weigh(self, ratio: Tensor) -> Tensor:
        """Return the ratio, or 0 above ``cap``."""
        return torch.where(ratio <= self.cap, ratio, 0.0)


@IMPORTANCE_CORRECTION.register_module("sequence_mis")
class SequenceMIS(TokenMIS):
    """Masked importance sampling by the ratio of the whole sequence."""

    by_sequence = True


@IMPORTANCE_CORRECTION.register_module("icepop")
@dataclass(eq=False)
class IcePop(ImportanceCorrection):
    """The ratio within ``[low, high]``, and 0 on both sides (Ring-1T, arXiv:2510.18855).

    Args:
        low: smallest ratio that still learns, not negative.
        high: largest one.
    """

    low: float = 0.5
    high: float = 5.0

    @override
    def __post_init__(self) -> None:
        if not 0.0 <= self.low < self.high:
            raise InvalidArgumentError(
                f"low must be at least 0 and below high; they are {self.low} and {self.high}"
            )

    @override
    def weigh(self, ratio: Tensor) -> Tensor:
        """Return the ratio, or 0 outside the interval."""
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)
