"""Clip-B (arXiv:2602.03392): GRPO without the tokens of bad answers that move entropy most."""

from __future__ import annotations

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn import token_scores
from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN
from trinity_buffer.algorithm.advantage_fn.grpo_advantage import GRPOAdvantageFn
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.arguments import configured


@ADVANTAGE_FN.register_module("clipb")
@configured
class ClipBAdvantageFn(GRPOAdvantageFn):
    """Drops tokens with A < 0 and ``S - mean(S) < -mu std(S)`` from the action mask.

    ``S = p (H + log p)``. Needs ``rollout_logprob`` and ``entropy``. Mean and (population)
    deviation are over all action tokens.

    Args:
        epsilon: added to the deviation of the rewards.
        mu: how many deviations are tolerated.
        kwargs: the options of `GRPOAdvantageFn`.
    """

    tensors = ("entropy", "rollout_logprob")
    reads_old_logprob = True

    mu: float = 2.5

    @override
    def compute(self, rows: Rows) -> Result:
        """Return the advantages, and the mask without what is dropped."""
        advantages = super().compute(rows).advantages
        change = token_scores.entropy_change(rows["rollout_logprob"], rows["entropy"])
        # Over all ranks: which tokens go must not depend on how rows are dealt.
        _, mean, variance = rows.moments(change)
        std = variance.sqrt()
        far = (change.to(mean.dtype) - mean) < -self.mu * std
        # Good answers are never held: only what lowers a probability may be dropped.
        dropped = rows.mask & (advantages < 0) & far & (std >= token_scores.NEGLIGIBLE_STD)
        trained = (rows.raw("action_mask") != 0) & ~dropped
        metrics = token_scores.clipped_fractions(dropped, advantages, rows)
        metrics |= {"ES": mean, "varS": variance}
        return Result(advantages, advantages.clone(), metrics, trained)
