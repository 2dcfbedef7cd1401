"""A policy gradient weighted by the importance ratio, without any clip."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.functional import Metrics, Tokens, log_ratio
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, TokenLossFn


@POLICY_LOSS_FN.register_module("importance_sampling")
class ImportanceSamplingLossFn(TokenLossFn):
    """``-A r`` with ``r = exp(logprob - old_logprob)``.

    Args:
        backend: whose names callers use.
        loss_agg_mode: see `aggregate_loss`.
    """

    @override
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the weighted advantages."""
        # Cut to ± 20 before exp: one wild token would otherwise be the whole step.
        difference = log_ratio(tokens.logprob, tokens.old_logprob)
        ratio = difference.exp()
        metrics = {"ratio/mean": tokens.mean(ratio), "approx_kl": tokens.mean(-difference)}
        return -tokens.advantages * ratio, metrics
