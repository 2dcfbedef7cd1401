"""How far the policy is from a reference, per token: as a loss, or as a penalty on rewards.

The estimators of KL(policy || reference) from sampled tokens are those of John Schulman's note
"Approximating KL Divergence" (2020).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import functional
from trinity_buffer.algorithm.advantage_fn.rows import as_mapping
from trinity_buffer.algorithm.arguments import POSITIVE, Configured, Registry, checked
from trinity_buffer.algorithm.functional import LOG_RATIO_LIMIT, Metrics
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import InvalidArgumentError

__all__ = [
    "KL_FN",
    "AbsFn",
    "CorrectedK3Fn",
    "DummyKLFn",
    "K1Fn",
    "K2Fn",
    "K3Fn",
    "KLFn",
    "LowVarKLFn",
]

Batch = TypeVar("Batch")
"""A mutable mapping, or a ``DataProto``."""


@dataclass(eq=False)
class KLFn(Configured, ABC):
    """A divergence and its coefficient; subclasses say what it is per token.

    Args:
        adaptive: adapt the coefficient to ``target_kl`` (Ziegler et al., arXiv:1909.08593).
        kl_coef: the coefficient to begin with.
        target_kl: divergence at which an adaptive coefficient stays what it is.
        horizon: rows after which an adaptive coefficient may have changed by a fifth.

    Attributes:
        reads_old_logprob: whether it weighs by the log-probabilities of the policy that sampled.
    """

    none_is_unset: ClassVar[bool] = True
    reads_old_logprob: ClassVar[bool] = False

    adaptive: bool = False
    kl_coef: float = 0.001
    target_kl: float | None = checked(None, POSITIVE)
    horizon: float | None = checked(None, POSITIVE)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive and (self.target_kl is None or self.horizon is None):
            raise InvalidArgumentError("an adaptive KL coefficient needs target_kl and horizon")

    @abstractmethod
    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        """Return the divergence of each token, with the shape of ``logprob``."""

    def calculate_kl_loss(
        self,
        logprob: Tensor,
        ref_logprob: Tensor | None,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        old_logprob: Tensor | None = None,
        *,
        layout: BatchLayout | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return ``kl_coef`` times the aggregated divergence, and what to log.

        Args:
            logprob: of the policy, ``[B, T]``, or ``[T]`` packed.
            ref_logprob: of the reference.
            response_mask: the action mask.
            loss_agg_mode: see `aggregate_loss`.
            old_logprob: of the policy that sampled, for `CorrectedK3Fn`.
            layout: boundaries and denominators of the step.

        Raises:
            InvalidArgumentError: there is no ``ref_logprob``.
        """
        if ref_logprob is None:
            raise InvalidArgumentError(
                f"{type(self).__name__} needs ref_logprob: run a reference policy, "
                "or use the KL function 'none'"
            )
        kl = self.calculate_kl(
            functional.keep(response_mask, logprob),
            functional.keep(response_mask, ref_logprob),
            None if old_logprob is None else functional.keep(response_mask, old_logprob),
        )
        loss = functional.aggregate_loss(kl, response_mask, loss_agg_mode, layout=layout)
        metrics = {"kl_loss": loss.detach(), "kl_coef": torch.as_tensor(self.kl_coef)}
        return loss * self.kl_coef, metrics

    def apply_kl_penalty_to_reward(
        self, batch: Batch, *, layout: BatchLayout | None = None
    ) -> tuple[Batch, Metrics]:
        """Set ``token_level_rewards`` to the scores minus ``kl_coef`` times the divergence.

        An adaptive coefficient then takes a step. Keys may be those of verl (``old_log_probs``,
        ``ref_log_prob``, ``response_mask``) or ours (``old_logprob``, ``ref_logprob``,
        ``action_mask``); scores are ``token_level_scores``, ``[B, T]``, or ``[T]`` packed. Rows of
        an ``expert_mask`` keep their scores and count nowhere: the policy did not sample them. A
        ``DataProto`` is changed in place and returned.

        Raises:
            InvalidArgumentError: names the tensor that is missing.
        """
        columns = as_mapping(batch)
        scores = _tensor(columns, "token_level_scores")
        mask = _tensor(columns, "response_mask", "action_mask")
        expert = functional.mask_of_rows(
            columns.get("expert_mask", torch.zeros_like(mask)), mask, layout
        )
        mask = mask * ~expert
        kl = self.calculate_kl(
            functional.keep(mask, _tensor(columns, "old_log_probs", "old_logprob")),
            functional.keep(mask, _tensor(columns, "ref_log_prob", "ref_logprob")),
        )
        # Masked again: an estimator of a user's own need not be 0 at 0.
        kl = functional.keep(mask, kl) * mask.to(kl.dtype)
        # The penalty is by the coefficient that the step began with; it adapts afterwards.
        columns["token_level_rewards"] = scores - self.kl_coef * kl
        rows = functional.row_means(kl, mask.to(kl.dtype), layout)
        rows = rows[functional.row_sums(expert.float(), layout) == 0]
        current = rows.mean() if len(rows) else rows.sum()
        metrics = {"kl": current.detach(), "kl_coef": torch.as_tensor(self.kl_coef)}
        self.update_kl_coef(current, len(rows))
        return batch, metrics

    def update_kl_coef(self, current_kl: float | Tensor, batch_size: int) -> None:
        """Move an adaptive coefficient towards its target; a fixed one stays.

        ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * rows / horizon``. Reads ``current_kl`` back
        from the device: call it once per step.

        Args:
            current_kl: mean divergence of the step.
            batch_size: rows of the step.
        """
        if not self.adaptive or self.target_kl is None or self.horizon is None:
            return
        # Bounded to a fifth: one odd step must not swing the coefficient.
        error = min(max(float(current_kl) / self.target_kl - 1.0, -0.2), 0.2)
        self.kl_coef *= 1.0 + error * batch_size / self.horizon


KL_FN: Registry[type[KLFn]] = Registry("kl_fn")


@KL_FN.register_module("none")
class DummyKLFn(KLFn):
    """No divergence: a loss of 0, rewards as they are."""

    @override
    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor | None, old_logprob: Tensor | None = None
    ) -> Tensor:
        """Return zeros; it takes no reference."""
        return torch.zeros_like(logprob)

    @override
    def calculate_kl_loss(self, logprob: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Metrics]:
        """Return 0 and nothing to log."""
        return torch.zeros((), device=logprob.device), {}

    @override
    def apply_kl_penalty_to_reward(
        self, batch: Batch, *, layout: BatchLayout | None = None
    ) -> tuple[Batch, Metrics]:
        """Set ``token_level_rewards`` to the scores."""
        columns = as_mapping(batch)
        columns["token_level_rewards"] = _tensor(columns, "token_level_scores")
        return batch, {}


class _OfRatio(KLFn):
    """A function of ``logprob - ref_logprob`` alone."""

    @abstractmethod
    def of_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the divergence of each token."""

    @override
    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        """Return that of the log-ratio."""
        return self.of_ratio(logprob - ref_logprob)


@KL_FN.register_module("k1")
class K1Fn(_OfRatio):
    """``logprob - ref_logprob``: unbiased, of any sign; as a loss its gradient is 0 on average."""

    @override
    def of_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the log-ratio."""
        return log_ratio


@KL_FN.register_module("k2")
class K2Fn(_OfRatio):
    """``(logprob - ref_logprob)^2 / 2``: its gradient is that of the KL divergence on average."""

    @override
    def of_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return half the squared log-ratio."""
        return 0.5 * log_ratio.square()


@KL_FN.register_module("k3")
class K3Fn(_OfRatio):
    """``exp(x) - 1 - x`` with ``x = ref_logprob - logprob``: unbiased and never negative (GRPO)."""

    @override
    def of_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return k3, without a limit to the exponent."""
        return functional.bounded_exp(-log_ratio) - 1.0 + log_ratio


@KL_FN.register_module("low_var_kl")
class LowVarKLFn(_OfRatio):
    """k3 with a log-ratio cut to ± 20 and a result cut to ± 10."""

    @override
    def of_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the limited k3."""
        limited = (-log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        # k3 grows as exp: without the second cut a single token outweighs the loss.
        return (limited.exp() - limited - 1.0).clamp(-10.0, 10.0)


@KL_FN.register_module("abs")
class AbsFn(_OfRatio):
    """``|logprob - ref_logprob|``: no divergence, a distance."""

    @override
    def of_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the absolute log-ratio."""
        return log_ratio.abs()


@KL_FN.register_module("corrected_k3")
class CorrectedK3Fn(K3Fn):
    """k3 times ``exp(logprob - old_logprob)`` cut to [0, 2]: unbiased for another policy's samples.

    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1.) Plain k3 without ``old_logprob``.
    """

    reads_old_logprob = True

    @override
    def calculate_kl(
        self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None
    ) -> Tensor:
        """Return the weighted k3; the gradient flows through the weight too."""
        kl = super().calculate_kl(logprob, ref_logprob)
        if old_logprob is None:
            return kl
        # Cut at 2: the weight of a token that has become likely is unbounded.
        return kl * functional.bounded_exp(logprob - old_logprob).clamp(0.0, 2.0)


def _tensor(batch: Mapping[str, Any], *names: str) -> Tensor:
    """Return the tensor that one of ``names`` names.

    Raises:
        InvalidArgumentError: none of them is there.
    """
    for name in names:
        if name in batch:
            tensor: Tensor = batch[name]
            return tensor
    raise InvalidArgumentError(f"the batch has no {' or '.join(names)}")
