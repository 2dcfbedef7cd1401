"""TOPR: importance weights for the failures alone (arXiv:2503.14286)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import Metrics, Tokens, bounded_exp
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, TokenLossFn


@POLICY_LOSS_FN.register_module("topr")
@dataclass(eq=False)
class TOPRPolicyLossFn(TokenLossFn):
    """``-sg(alpha) A logprob``: alpha is 1 for successes, the ratio cut to [0, 1] for failures.

    The ratio is the token's, as in the reference; the paper's is the sequence's.

    Args:
        backend: whose names callers use.
        advantage_threshold: a token succeeds if its advantage is above it.
        loss_agg_mode: see `aggregate_loss`.
    """

    loss_name = "topr_loss"

    advantage_threshold: float = 0.0

    @override
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the weighted log-probabilities."""
        # Detached: alpha weighs the update and is no part of it.
        ratio = bounded_exp((tokens.logprob - tokens.old_logprob).detach())
        failed = tokens.advantages <= self.advantage_threshold
        # Cut at 1: a failure that has become likely must not be pushed down ever harder.
        alpha = torch.where(failed, ratio.clamp(0.0, 1.0), 1.0)
        losses = -alpha * tokens.advantages * tokens.logprob
        return losses, {"avg_alpha": tokens.mean(alpha), "avg_ratio": tokens.mean(ratio)}
