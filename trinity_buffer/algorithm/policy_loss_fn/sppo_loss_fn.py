"""sPPO: a policy gradient inside a trust region, simpler than PPO (arXiv:2108.05828)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.arguments import NOT_NEGATIVE, checked
from trinity_buffer.algorithm.functional import Metrics, Tokens, bounded_exp, inside
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, TokenLossFn


@POLICY_LOSS_FN.register_module("sppo")
@dataclass(eq=False)
class sPPOPolicyLossFn(TokenLossFn):  # noqa: N801 - the documented name
    """``-A (logprob - old_logprob)`` where the ratio is within ``[1 / (1 + e), 1 + e]``, else 0.

    Args:
        backend: whose names callers use.
        epsilon: half-width ``e`` of the region, not negative.
        loss_agg_mode: see `aggregate_loss`.
    """

    epsilon: float = checked(0.3, NOT_NEGATIVE)

    @override
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the weighted log-ratios inside the region."""
        difference = tokens.logprob - tokens.old_logprob
        # The region is decided by data: its edge must not contribute a gradient.
        ratio = bounded_exp(difference.detach())
        within = inside(ratio, 1.0 / (1.0 + self.epsilon), 1.0 + self.epsilon).to(ratio)
        losses = -tokens.advantages * difference * within
        return losses, {"pg_clipfrac": tokens.mean(1.0 - within)}
