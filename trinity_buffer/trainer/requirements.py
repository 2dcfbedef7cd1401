"""What an algorithm asks of a train stream."""

from __future__ import annotations

from typing import Any

from trinity_buffer.algorithm import Algorithm

READ_BY_ADVANTAGES = frozenset({"on_policy_distill", "jsd", "clipb", "clipv"})
"""Advantage functions that compare with what the explorer's policy said."""


def strategy_of(algorithm: Algorithm) -> str | None:
    """Return the name of the algorithm's annotation set; None: trained as recorded."""
    return "+".join(choice.name for choice in algorithm.strategies) or None


def strategies_of(algorithm: Algorithm) -> tuple[list[str], dict[str, Any]]:
    """Return names and arguments with which `run_strategy` runs the algorithm's strategies."""
    choices = algorithm.strategies
    if len(choices) == 1:
        return [choices[0].name], dict(choices[0].args)
    return [choice.name for choice in choices], {c.name: dict(c.args) for c in choices}


def stream_options(
    algorithm: Algorithm, *, recompute_old_logprob: bool = False, teacher: bool = False
) -> dict[str, Any]:
    """Return the options of `open_train_stream` that follow from an algorithm.

    Args:
        algorithm: what is trained.
        recompute_old_logprob: the trainer computes ``old_logprob`` itself.
        teacher: the trainer has a teacher policy, so that none need be stored.
    """
    needs = []
    if algorithm.needs_advantages:
        needs.append("advantages")
    if _reads_rollouts(algorithm, recomputed=recompute_old_logprob):
        needs.append("logprobs")
    if not teacher and algorithm.advantage is not None:
        needs += ["teacher_logprobs"] * ("teacher_logprob" in algorithm.advantage.tensors)
    sampling = algorithm.choices["sample_strategy"]
    options: dict[str, Any] = {
        name: sampling.args[name]
        for name in ("max_staleness", "expert_data_ratio")
        if name in sampling.args
    }
    return {
        "sample_strategy": sampling.name,
        "recompute_old_logprob": recompute_old_logprob,
        "needs": tuple(needs),
        **options,
    }


def _reads_rollouts(algorithm: Algorithm, *, recomputed: bool) -> bool:
    """Return whether something compares with the log-probabilities that the explorer recorded."""
    if algorithm.choices["importance_correction"].name != "none":
        return True
    if recomputed:
        return False
    advantage = algorithm.choices.get("advantage_fn")
    by_advantage = advantage is not None and advantage.name in READ_BY_ADVANTAGES
    return by_advantage or "old_logprob" in algorithm.tensors
