"""REC: off-policy REINFORCE as a box of clips, weights and regularizers (arXiv:2509.24203)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import functional
from trinity_buffer.algorithm.arguments import NOT_NEGATIVE, POSITIVE, UP_TO_1, checked, one_of
from trinity_buffer.algorithm.functional import Metrics, Tokens
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, TokenLossFn

CLIP_MODES = ("none", "one-side", "gspo-one-side", "two-side", "ring")
WEIGHTS = ("none", "importance_sampling", "gspo_importance_sampling", "advantage")
REGULARIZERS = ("none", "k2", "forward-kl")


@POLICY_LOSS_FN.register_module("rec")
@dataclass(eq=False)
class RECPolicyLossFn(TokenLossFn):
    """``-A w K logprob`` plus a regularizer: K says which tokens learn, w how much.

    With ``r`` the token's ratio and ``s`` that of its sequence (as in GSPO), both detached:

    - ``one-side``: as PPO, tokens stop learning where they moved far enough already;
      ``gspo-one-side`` the same on ``s``; ``two-side``: r within the limits; ``ring``: two-side,
      and beyond the primed limits where the update leads back.
    - ``importance_sampling``: w = r; ``gspo_importance_sampling``: w = s, for every clip mode
      (the reference crashes for all but one); ``advantage``: w = exp(A / temp).
    - ``k2`` adds ``coef (logprob - old_logprob)^2`` to all tokens, ``forward-kl`` adds
      ``-coef logprob``.

    Args:
        backend: whose names callers use.
        epsilon_low: how far a ratio may fall below 1, in (0, 1].
        epsilon_high: how far it may rise above 1, positive.
        epsilon_low_prime: lower limit of the ring's inner edge, in [0, 1].
        epsilon_high_prime: upper limit of the ring's outer edge.
        clip_mode: which tokens learn.
        weight: how much they learn.
        regularizer: what holds the policy back.
        regularizer_coef: how strongly, not negative.
        temp: temperature of the ``advantage`` weight, positive.
        loss_agg_mode: see `aggregate_loss`; None: ``seq-mean-token-mean`` for ``gspo-one-side``,
            ``token-mean`` for the others.
    """

    tuned = {"epsilon_low_prime": 0.6, "epsilon_high_prime": 2.0}

    epsilon_low: float = checked(0.2, UP_TO_1)
    epsilon_high: float = checked(0.2, POSITIVE)
    epsilon_low_prime: float = checked(0.4, UP_TO_1)
    epsilon_high_prime: float = checked(0.4, POSITIVE)
    clip_mode: str = "none"
    weight: str = "none"
    regularizer: str = "none"
    regularizer_coef: float = checked(0.0, NOT_NEGATIVE)
    temp: float = checked(1.0, POSITIVE)
    loss_agg_mode: str | None = field(default=None, kw_only=True)

    @override
    def __post_init__(self) -> None:
        one_of("clip_mode", self.clip_mode, CLIP_MODES)
        one_of("weight", self.weight, WEIGHTS)
        one_of("regularizer", self.regularizer, REGULARIZERS)
        by_sequence = self.clip_mode == "gspo-one-side"
        default = "seq-mean-token-mean" if by_sequence else "token-mean"
        self.loss_agg_mode = functional.aggregation_mode(self.loss_agg_mode, default)
        super().__post_init__()

    @override
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the weighted log-probabilities, and the regularizer."""
        logprob, old_logprob, advantages, action_mask, layout, _ = tokens
        difference = logprob - old_logprob
        ratio = functional.bounded_exp(difference.detach())
        # The ninth digit: in the one mode that the reference computes, the mean's 1e-8 is added
        # to a float32 count; elsewhere to a count in the dtype of the values.
        by_sequence = self.clip_mode == "gspo-one-side"
        mask = action_mask if by_sequence else action_mask.to(ratio)
        means = functional.row_means(difference.detach(), mask, layout)
        sequence_ratio = functional.spread(functional.bounded_exp(means), ratio, layout)

        learns = self._learns(ratio, sequence_ratio, advantages).to(ratio)
        weighted = advantages * self._weights(ratio, sequence_ratio, advantages)
        losses = -weighted * learns * logprob + self._penalties(logprob, difference)
        return losses, {"pg_clipfrac": tokens.mean(1.0 - learns)}

    def _learns(self, ratio: Tensor, sequence_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return K, bool."""
        low, high = 1.0 - self.epsilon_low, 1.0 + self.epsilon_high
        match self.clip_mode:
            case "none":
                return torch.ones_like(ratio, dtype=torch.bool)
            case "one-side" | "gspo-one-side":
                r = ratio if self.clip_mode == "one-side" else sequence_ratio
                return ((advantages >= 0) & (r <= high)) | ((advantages <= 0) & (r >= low))
            case "two-side":
                return functional.inside(ratio, low, high)
            case _:
                # Outside the ring only updates that lead back to it are let through.
                up = (advantages >= 0) & (ratio <= 1.0 - self.epsilon_low_prime)
                down = (advantages <= 0) & (ratio >= 1.0 + self.epsilon_high_prime)
                return functional.inside(ratio, low, high) | up | down

    def _weights(self, ratio: Tensor, sequence_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return w, one number per token."""
        match self.weight:
            case "importance_sampling":
                return ratio
            case "gspo_importance_sampling":
                return sequence_ratio
            case "advantage":
                return functional.bounded_exp(advantages / self.temp)
            case _:
                return torch.ones_like(ratio)

    def _penalties(self, logprob: Tensor, difference: Tensor) -> Tensor:
        """Return the regularizer of each token."""
        match self.regularizer:
            case "k2":
                return self.regularizer_coef * difference.square()
            case "forward-kl":
                return -self.regularizer_coef * logprob
            case _:
                return torch.zeros_like(logprob)
