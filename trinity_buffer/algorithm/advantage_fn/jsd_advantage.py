"""Distillation by a generalized Jensen-Shannon divergence (GKD, arXiv:2306.13649)."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, TrainerAdvantage
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.advantage_fn.token_scores import row_statistics
from trinity_buffer.algorithm.arguments import POSITIVE, SHARE, checked, configured
from trinity_buffer.algorithm.functional import LOG_RATIO_LIMIT


def log_mixture(student: Tensor, teacher: Tensor, weight: float) -> Tensor:
    """Return ``log((1 - weight) exp(student) + weight exp(teacher))``."""
    return torch.logaddexp(student + math.log1p(-weight), teacher + math.log(weight))


def divergence_gradient(student: Tensor, teacher: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Return the advantage that descends the divergence, and an estimate of it, per sampled token.

    With ``S`` the student, ``T`` the teacher, ``w`` the weight and ``M = (1 - w) S + w T`` the
    divergence is ``w KL(T || M) + (1 - w) KL(S || M)``, an f-divergence of ``u = T / S`` under
    ``S``. Its gradient is ``E_S[(f(u) - u f'(u)) grad log S]``, which comes to ``-(1 - w) log(M /
    S)``; the estimate ``f(u)`` is never negative. ``w = 0`` is taken for the reverse divergence
    ``KL(S || T)``, ``w = 1`` for the forward one, ``KL(T || S)``.
    """
    log_ratio = (teacher - student).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    # At both ends the mixture is one of the two, and the logarithm of weight 0 is not finite.
    if weight == 0.0:
        return teacher - student, student - teacher
    if weight == 1.0:
        return ratio - 1.0, ratio * log_ratio - ratio + 1.0
    # Relative to the student, so that only ratios are exponentiated.
    mixed = log_mixture(torch.zeros_like(log_ratio), log_ratio, weight)
    estimate = weight * ratio * log_ratio - mixed.exp() * mixed
    return (1.0 - weight) * mixed, estimate


def sampled_log_ratios(student: Tensor, teacher: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Return minus the log-ratios of the sampled token, which the reference uses, and these.

    By Jensen's inequality they are never positive for ``0 < w < 1``, so that the advantage grows
    with the
    disagreement: it rewards the student for moving away from the teacher.
    """
    if weight in (0.0, 1.0):
        log_ratios = student - teacher if weight == 0.0 else teacher - student
    else:
        mixed = log_mixture(student, teacher, weight)
        log_ratios = weight * (teacher - mixed) + (1.0 - weight) * (student - mixed)
    return -log_ratios, log_ratios


@ADVANTAGE_FN.register_module("jsd")
@configured
class JSDAdvantage(TrainerAdvantage):
    """Advantages with which a policy gradient descends a divergence between student and teacher.

    Needs ``old_logprob`` (the student) and ``teacher_logprob``, of the tokens that the student
    sampled.

    Args:
        lambda_coef: weight of the teacher in the mixture; 0 is the reverse KL divergence, 1 the
            forward one.
        kl_coef: scale.
        temperature: divides the log-probabilities.
        chunk_size: accepted and of no effect: nothing here grows with the vocabulary, there is
            nothing to cut up.
        estimator: ``"gradient"`` of the divergence, or the reference's ``"log_ratio"``, of the
            wrong sign.
    """

    tensors = ("teacher_logprob",)
    reads_old_logprob = True
    reads_rewards = False
    reference_args = {"estimator": "log_ratio"}

    lambda_coef: float = checked(0.5, SHARE)
    kl_coef: float = 1.0
    temperature: float = checked(1.0, POSITIVE)
    chunk_size: int | None = None
    _: KW_ONLY
    estimator: Literal["gradient", "log_ratio"] = "gradient"

    @override
    def compute(self, rows: Rows) -> Result:
        """Return the scaled advantage of each action token."""
        student = rows["old_logprob"] / self.temperature
        teacher = rows["teacher_logprob"] / self.temperature
        formula = divergence_gradient if self.estimator == "gradient" else sampled_log_ratios
        gradient, divergence = formula(student, teacher, float(self.lambda_coef))
        advantages = (self.kl_coef * gradient).where(rows.mask, 0.0)
        metrics = row_statistics("jsd", divergence, rows)
        metrics["advantages/mean"] = advantages.sum(-1).mean()
        return Result(advantages, advantages.clone(), metrics)
