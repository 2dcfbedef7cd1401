"""Policy losses: from log-probabilities to one number that an optimizer can lower."""

from __future__ import annotations

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import functional
from trinity_buffer.algorithm.arguments import Configured, Registry, did_you_mean
from trinity_buffer.algorithm.functional import Metrics, Tokens
from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import UnknownNameError

_logger = logging.getLogger(__name__)

LossAndMetrics = tuple[Tensor, Metrics]
"""The loss, shape ``[]``, and what to log about it: detached tensors of shape ``[]``."""

BACKEND_NAMES: Mapping[str, Mapping[str, str]] = {
    "trinity": {},
    "tinker": {},
    "verl": {
        "logprob": "log_prob",
        "old_logprob": "old_log_probs",
        "ref_logprob": "ref_log_prob",
        "action_mask": "response_mask",
    },
}
"""What each training framework calls the tensors; other names are the same everywhere."""

OFFERED = frozenset({
    "action_mask",
    "advantages",
    "attention_mask",
    "expert_mask",
    "input_ids",
    "old_logprob",
    "position_ids",
    "ref_logprob",
    "returns",
    "rollout_logprob",
    "teacher_logprob",
    "token_level_rewards",
    "values",
})  # fmt: skip
"""Tensors of a batch: a trainer may offer them to a loss that does not look at them."""

NOT_SELECTED = frozenset({"logprob", "layout"})
"""The trainer computes the one; the other is no tensor of the batch."""


@dataclass(eq=False)
class PolicyLossFn(Configured, ABC):
    """A policy loss: a class whose ``__call__`` names the tensors that it needs.

    Subclasses write ``__call__(self, logprob, ..., *, layout=None)`` with the names that this
    package uses (`old_logprob`, `ref_logprob`, `action_mask`, `advantages`, ...). Callers may use
    these or those of the backend. ``layout`` carries the denominators of the step: hand it to
    `aggregate_loss`.

    Metrics whose name ends in ``loss`` are shares of the step's loss: with a layout they add up
    over micro-batches. Of one that ends in ``_max`` or ``_min`` the largest or smallest is told, of
    all others the mean, weighted by action tokens, or by rows if `row_metrics` names them.

    Options are fields of a dataclass, or arguments of a constructor that calls this one.

    Args:
        backend: whose names callers may use.

    Attributes:
        per_microbatch: True if the loss looks at the micro-batch as a whole, so that cutting a step
            differently changes its gradient.
        row_metrics: names of the metrics that are means over rows.
        pairs: True if rows are the chosen and the rejected answers of pairs, in turn.
    """

    runtime_args: ClassVar[tuple[str, ...]] = ("backend",)
    none_is_unset: ClassVar[bool] = True
    per_microbatch: ClassVar[bool] = False
    row_metrics: ClassVar[tuple[str, ...]] = ()
    pairs: ClassVar[bool] = False
    _tensors: ClassVar[tuple[str, ...]] = ()

    backend: str = "verl"

    @override
    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Read the tensors off the signature, and let callers use the backend's names for them."""
        super().__init_subclass__(**kwargs)
        if "__call__" not in vars(cls):
            return
        parameters = list(inspect.signature(cls.__call__).parameters.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        cls._tensors = tuple(p.name for p in named)
        # The one place where names are translated: subclasses are asked for a plain `__call__`.
        cls.__call__ = _with_backend_names(  # type: ignore[method-assign]
            cls.__call__, named, any(p.kind is p.VAR_KEYWORD for p in parameters)
        )

    @override
    def __post_init__(self) -> None:
        """Refuse options that cannot be right.

        Raises:
            UnknownNameError: an unknown backend.
        """
        super().__post_init__()
        if self.backend not in BACKEND_NAMES:
            raise UnknownNameError(
                f"no backend {self.backend!r}{did_you_mean(self.backend, BACKEND_NAMES)} "
                f"(there are: {', '.join(sorted(BACKEND_NAMES))})"
            )

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> LossAndMetrics:
        """Return the loss and its metrics; subclasses name the tensors they need."""

    @property
    def select_keys(self) -> list[str]:
        """Names, in the backend's words, of the tensors that a call takes beside ``logprob``."""
        names = BACKEND_NAMES[self.backend]
        return [names.get(name, name) for name in self._tensors if name not in NOT_SELECTED]


POLICY_LOSS_FN: Registry[type[PolicyLossFn]] = Registry("policy_loss_fn")


def detached(metrics: Mapping[str, Tensor]) -> Metrics:
    """Return the metrics without their graphs."""
    return {name: value.detach() for name, value in metrics.items()}


def _with_backend_names(
    call: Callable[..., LossAndMetrics], named: Sequence[inspect.Parameter], open_ended: bool
) -> Callable[..., LossAndMetrics]:
    """Return ``call`` taking the backend's names too, and naming what is unknown or missing."""
    accepted = {p.name for p in named}
    required = [p.name for p in named if p.default is p.empty]

    @functools.wraps(call)
    def translated(self: PolicyLossFn, *args: Any, **tensors: Any) -> LossAndMetrics:
        theirs = BACKEND_NAMES[self.backend]
        ours = {name: ours for ours, name in theirs.items()}
        # Ours and the backend's names may be mixed: a trainer adds columns of its own.
        by_our_name = {ours.get(name, name): value for name, value in tensors.items()}
        owner = type(self).__name__
        for name in by_our_name:
            if name not in accepted | OFFERED and not open_ended:
                if name == "layout":
                    raise TypeError(
                        f"{owner} takes no layout: add `layout=None` to its parameters, and hand "
                        "it to aggregate_loss(), which divides by the counts of the whole step"
                    )
                known = ["logprob", *self.select_keys, *({"layout"} & accepted)]
                raise TypeError(
                    f"{owner} takes no tensor {name!r}{did_you_mean(name, known)} "
                    f"(it takes: {', '.join(known)})"
                )
        # Checked by name here: Python would name the parameter, not the backend's tensor.
        for name in required[len(args) :]:
            if name not in by_our_name:
                raise TypeError(
                    f"{owner} needs the tensor {theirs.get(name, name)!r}, it was not given"
                )
        layout = by_our_name.get("layout")
        if not open_ended:
            by_our_name = {name: value for name, value in by_our_name.items() if name in accepted}
        elif layout is not None and "layout" not in accepted and not torch.compiler.is_compiling():
            limits, logprob = layout.cu_seqlens, [*args, by_our_name.get("logprob")][0]
            rows = len(logprob) if limits is None else len(limits) - 1
            if rows != layout.total.sequences:
                _warn_of_part(owner)
        return call(self, *args, **by_our_name)

    return translated


@functools.cache
def _warn_of_part(loss: str) -> None:
    """Say, once for each loss, that it may divide by the counts of a part of a step."""
    _logger.warning(
        "%s takes **kwargs, names no layout among its parameters, and is given a part of a step: "
        "unless it hands kwargs['layout'] on to aggregate_loss(), it divides by the tokens and "
        "rows of this part, and the gradients of all parts add up to a multiple of the step's; add "
        "`layout=None` to its parameters, and hand it on",
        loss,
    )


@dataclass(eq=False)
class AggregatedLossFn(PolicyLossFn):
    """A loss that is one term per token, aggregated.

    Args:
        backend: whose names callers use.
        loss_agg_mode: see `aggregate_loss`.

    Attributes:
        loss_name: name of the loss among the metrics.
        usual_mode: how it is aggregated where ``loss_agg_mode`` is None.
        mode: how it is aggregated.
    """

    loss_name: ClassVar[str] = "pg_loss"
    usual_mode: ClassVar[str] = "token-mean"

    loss_agg_mode: str | None = field(default="token-mean", kw_only=True)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.mode = functional.aggregation_mode(self.loss_agg_mode, self.usual_mode)

    def aggregated(
        self,
        losses: Tensor,
        mask: Tensor,
        layout: BatchLayout | None,
        metrics: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> LossAndMetrics:
        """Return the loss of ``losses`` under ``mask``, and ``metrics`` with it."""
        loss = functional.aggregate_loss(losses, mask, self.mode, layout=layout)
        return loss, detached({**metrics, self.loss_name: loss})


class ComparingLossFn(PolicyLossFn):
    """A loss that compares the policy with the one that sampled: subclasses write `loss_of`."""

    @abstractmethod
    def loss_of(self, tokens: Tokens) -> LossAndMetrics:
        """Return the loss, and what to log."""

    @override
    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        *,
        layout: BatchLayout | None = None,
    ) -> LossAndMetrics:
        """Return the loss; inputs ``[B, T]``, or ``[T]`` packed."""
        # Masked before any arithmetic: a NaN behind the mask must not reach the gradient.
        own = functional.keep(action_mask, logprob)
        old = functional.keep(action_mask, old_logprob)
        scores = functional.keep(action_mask, advantages)
        return self.loss_of(Tokens(own, old, scores, action_mask, layout, advantages))


class TokenLossFn(ComparingLossFn, AggregatedLossFn):
    """A comparing loss that is one term per token, aggregated: subclasses write `terms`."""

    @abstractmethod
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the loss of each token, and what to log beside the aggregated loss."""

    @override
    def loss_of(self, tokens: Tokens) -> LossAndMetrics:
        """Return the aggregated terms."""
        losses, metrics = self.terms(tokens)
        return self.aggregated(losses, tokens.mask, tokens.layout, metrics)


@dataclass(eq=False)
class ClippedLossFn(TokenLossFn):
    """A loss that clips the ratio of the two policies, as PPO does.

    Args:
        backend: whose names callers use.
        clip_range: both limits at once; the two below win.
        clip_range_low: how far the ratio may fall below 1.
        clip_range_high: how far it may rise above 1.
        loss_agg_mode: see `aggregate_loss`.
    """

    tuned: ClassVar[Mapping[str, Any]] = {"clip_range": 0.2}

    clip_range: float | None = None
    clip_range_low: float | None = None
    clip_range_high: float | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        limits = functional.clip_limits(self.clip_range, self.clip_range_low, self.clip_range_high)
        self.low, self.high = limits


@dataclass(eq=False)
class LikelihoodLossFn(AggregatedLossFn):
    """A loss of recorded tokens that no policy has to have sampled: subclasses write `terms`."""

    loss_agg_mode: str | None = "token-mean"

    @abstractmethod
    def terms(self, logprob: Tensor) -> Tensor:
        """Return the loss of each token."""

    @override
    def __call__(
        self, logprob: Tensor, action_mask: Tensor, *, layout: BatchLayout | None = None
    ) -> LossAndMetrics:
        """Return the loss; inputs ``[B, T]``, or ``[T]`` packed."""
        losses = self.terms(functional.keep(action_mask, logprob))
        return self.aggregated(losses, action_mask, layout)
