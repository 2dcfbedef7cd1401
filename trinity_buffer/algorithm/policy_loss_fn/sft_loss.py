"""Supervised fine-tuning: the negative log-likelihood of recorded tokens."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, LikelihoodLossFn


@POLICY_LOSS_FN.register_module("sft")
class SFTLossFn(LikelihoodLossFn):
    """``-logprob``.

    Args:
        backend: whose names callers use.
        loss_agg_mode: see `aggregate_loss`.
    """

    loss_name = "sft_loss"

    @override
    def terms(self, logprob: Tensor) -> Tensor:
        """Return the negative log-likelihoods."""
        return -logprob
