"""GSPO: one importance ratio per sequence (arXiv:2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import functional
from trinity_buffer.algorithm.functional import Metrics, Tokens
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, ClippedLossFn


@POLICY_LOSS_FN.register_module("gspo")
@dataclass(eq=False)
class GSPOLossFn(ClippedLossFn):
    """``max(-A s, -A clip(s, 1 - low, 1 + high))``, ``s = exp(mean_t(logprob - old_logprob))``.

    The value of ``s`` is the sequence's, its gradient flows through each token's own probability
    (``sg(s) p / sg(p)``, equation 14): equal to the gradient of equation 5 where all tokens of a
    sequence have one advantage, and defined where they have not.

    Args:
        backend: whose names callers use.
        clip_range: both limits at once; the two below win.
        clip_range_low: how far the ratio may fall below 1.
        clip_range_high: how far it may rise above 1.
        loss_agg_mode: see `aggregate_loss`; the paper's is the default.
    """

    tuned = {"clip_range_low": 3e-4, "clip_range_high": 4e-4}
    row_metrics = ("ppo_kl_seq",)

    usual_mode = "seq-mean-token-mean"

    loss_agg_mode: str | None = field(default=usual_mode, kw_only=True)

    @override
    def terms(self, tokens: Tokens) -> tuple[Tensor, Metrics]:
        """Return the clipped objective of the sequence's ratio."""
        logprob, old_logprob, advantages, mask, layout, _ = tokens
        difference = (logprob - old_logprob).detach()
        # The mean, not the sum: otherwise long sequences would always be clipped.
        log_ratios = functional.row_means(difference, mask, layout)
        own = logprob - logprob.detach()  # 0, with the gradient of the token
        ratio = functional.bounded_exp(own + functional.spread(log_ratios, logprob, layout))
        plain = -advantages * ratio
        clipped = functional.clipped_objective(ratio, advantages, self.low, self.high)
        return torch.maximum(plain, clipped), {
            "pg_clipfrac": tokens.mean(clipped > plain),
            "ppo_kl": tokens.mean(-difference),
            "ppo_kl_seq": (-log_ratios).mean(),
        }


@POLICY_LOSS_FN.register_module("gspo_token")
class GSPOTokenLossFn(GSPOLossFn):
    """GSPO-token (arXiv:2507.18071, section 4.3): the sequence's ratio with an advantage per token.

    `GSPOLossFn` already is written this way; the name says that the advantages may differ within a
    sequence, as those of a critic or of token-level rewards do.
    """
