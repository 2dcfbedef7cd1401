"""On-policy distillation (arXiv:2306.13649): a teacher scores what the student sampled."""

from __future__ import annotations

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, TrainerAdvantage
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.advantage_fn.token_scores import row_statistics
from trinity_buffer.algorithm.arguments import configured


@ADVANTAGE_FN.register_module("on_policy_distill")
@configured
class OnPolicyDistillAdvantage(TrainerAdvantage):
    """``kl_coef (teacher - student)``, in log-probabilities: descends the reverse divergence.

    Needs ``old_logprob`` (the student) and ``teacher_logprob``.

    Args:
        kl_coef: scale.
    """

    tensors = ("teacher_logprob",)
    reads_old_logprob = True
    reads_rewards = False

    kl_coef: float = 1.0

    @override
    def compute(self, rows: Rows) -> Result:
        """Return the scaled log-ratio of each action token."""
        gap = rows["teacher_logprob"] - rows["old_logprob"]
        advantages = self.kl_coef * gap
        metrics = row_statistics("kl", -gap, rows)
        metrics["advantages/mean"] = advantages.sum(-1).mean()
        return Result(advantages, advantages.clone(), metrics)
