"""Generalized advantage estimation (arXiv:1506.02438), for PPO with a critic."""

from __future__ import annotations

from dataclasses import KW_ONLY

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, TrainerAdvantage
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.advantage_fn.token_scores import generalized_advantages, whitened
from trinity_buffer.algorithm.arguments import SHARE, checked, configured
from trinity_buffer.algorithm.functional import masked_whiten
from trinity_buffer.algorithm.group_scores import CountsOver, Over


@configured
class WhitenedAdvantage(CountsOver, TrainerAdvantage):
    """Advantages that are whitened over the whole step: what PPO and REINFORCE++ share.

    Args:
        gamma: discount of a time step, which is an action token.
        mask_aware: time runs over action tokens alone; False takes every column for a time step, as
            the reference does.
        over: what counts once when advantages are whitened: ``"runs"``, where the batch says which
            rows are one (``run_index``), or each of their ``"rows"``, as in the reference.
    """

    reference_args = {"mask_aware": False, "over": "rows"}

    gamma: float = checked(1.0, SHARE)
    _: KW_ONLY
    mask_aware: bool = True
    over: Over = "runs"


@ADVANTAGE_FN.register_module("ppo")
@configured
class PPOAdvantageFn(WhitenedAdvantage):
    """Whitened generalized advantages of ``values`` and ``token_level_rewards``.

    Returns are the unwhitened advantages plus the values. The reference, which is not aware of the
    mask, leaves whitened numbers outside it.

    Args:
        gamma: discount of a time step.
        lam: decay of the estimator.
        kwargs: the options of `WhitenedAdvantage`.
    """

    tensors = ("values",)

    lam: float = checked(1.0, SHARE)

    @override
    def compute(self, rows: Rows) -> Result:
        """Return whitened advantages, and returns from the unwhitened ones."""
        rewards = rows.raw("token_level_rewards")
        if not self.mask_aware:
            values = rows.raw("values")
            raw = generalized_advantages(rewards, values, self.gamma, self.lam)
            # As the reference: whitened outside the mask too.
            return Result(masked_whiten(raw, rows.mask), raw + values)
        values = rows["values"]
        raw = generalized_advantages(rewards, values, self.gamma, self.lam, rows.mask)
        # The critic learns unwhitened returns: their scale is that of the rewards.
        return Result(whitened(raw, rows, over=self.over).where(rows.mask, 0.0), raw + values)
