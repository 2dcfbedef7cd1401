"""Group-relative advantages (arXiv:2402.03300), with the options that others found useful."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

import numpy as np
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import annotating, group_scores
from trinity_buffer.algorithm.advantage_fn import advantage_fn
from trinity_buffer.algorithm.arguments import configured
from trinity_buffer.algorithm.copies import copy_group
from trinity_buffer.algorithm.group_scores import Rewards, Unit
from trinity_buffer.experience import Experience

Group = list[Experience]


@advantage_fn.ADVANTAGE_FN.register_module("grpo")
@configured
class GRPOGroupedAdvantage(group_scores.DeviationOptions, advantage_fn.GroupAdvantage):
    """``(reward - mean) / (std + epsilon)`` on every action token of a group.

    Args:
        epsilon: added to the deviation.
        std_threshold: groups whose deviation is at or below it, and groups of one, are left out;
            None keeps all.
        duplicate_experiences: with ``std_threshold``, replace each group that is left out by a copy
            of a random one that is kept (POLARIS, https://hkunlp.github.io/blog/2025/Polaris).
        rank_penalty: shrink rewards with the rank of the answer's likelihood (arXiv:2506.02355);
            None does not.
        std_cal_level: whose deviation divides: of the ``"group"``, or of the whole ``"batch"``
            (arXiv:2508.08221).
        rank_scores: with ``rank_penalty``, what is compared with the mean of the penalized rewards:
            the ``"penalized"`` reward, so that advantages sum to 0, or the ``"raw"`` one, as the
            reference does.
        seed: of the choice of copies; None draws from the global generator.
        kwargs: the options of `DeviationOptions` and `GroupAdvantage`.
    """

    reference_args = {"rank_scores": "raw", "std_floor": 0.0, "over": "rows"}

    std_threshold: float | None = None
    duplicate_experiences: bool = False
    rank_penalty: float | None = None
    std_cal_level: Unit = "group"
    _: KW_ONLY
    rank_scores: Literal["penalized", "raw"] = "penalized"
    seed: int | None = 0

    @classmethod
    @override
    def unit_for(cls, **arguments: Any) -> Unit:
        """Return ``"batch"`` if the deviation or the copies need one."""
        whole = arguments.get("std_cal_level") == "batch" or arguments.get("duplicate_experiences")
        return "batch" if whole else "group"

    @classmethod
    @override
    def families_for(cls, **arguments: Any) -> tuple[str, ...]:
        """Return the light family, and the tokens' if likelihoods are ranked."""
        return ("light",) if arguments.get("rank_penalty") is None else ("light", "tokens")

    @override
    def needs_of(self, exps: Sequence[Experience]) -> Sequence[str]:
        """Return the usual fields, and logprobs where likelihoods are ranked."""
        ranked = self.rank_penalty is not None and annotating.num_runs(exps, self.over) > 1
        return (*self.needs, "logprobs") if ranked else self.needs

    @override
    def calculate_group_advantage(
        self, group_id: str, exps: Group, precomputed_std: float | Tensor | None = None
    ) -> tuple[Group, dict[str, Any]]:
        """Score one group, by ``precomputed_std`` if given; return nothing if it is left out."""
        raw, compared = self._rewards(exps)
        values, weights = group_scores.by_run(compared, annotating.runs_of(exps, self.over))
        mean, std = map(float, self.moments(values, weights))
        metrics = {"reward_mean": mean, "reward_std": std}
        alone = group_scores.statistics(values, weights).size == 1
        if self.std_threshold is not None and (alone or std <= self.std_threshold):
            return [], metrics
        scored = raw if self.rank_scores == "raw" else compared
        used = std if precomputed_std is None else float(precomputed_std)
        if alone and self.single_member == "zero":
            scores = np.zeros_like(scored)
        else:
            # Raw scores differ even where the penalized rewards are equal: no zero for a deviation
            # of 0.
            raw_scale = used + self.epsilon, 0.0
            scale = raw_scale if self.rank_scores == "raw" else (used, self.epsilon)
            scores = group_scores.scaled(scored - mean, *scale)
        for experience, score in zip(exps, scores, strict=True):
            annotating.annotate(experience, float(score))
        return exps, metrics

    @override
    def process(self, exps: Group) -> tuple[Group, dict[str, Any]]:
        """Score all groups, leave out those below the threshold, copy others in their place."""
        self.check(exps)
        groups = self.group_experiences(exps)
        # Before any group is scored: the deviation is of all of them.
        std = None
        if self.std_cal_level == "batch" and exps:
            index = 0 if self.rank_scores == "raw" else 1
            rewards = np.concatenate([self._rewards(group)[index] for group in groups.values()])
            runs = annotating.runs_of([e for group in groups.values() for e in group], self.over)
            std = float(self.moments(*group_scores.by_run(rewards, runs))[1])
        scored = [self.calculate_group_advantage(name, g, std) for name, g in groups.items()]
        groups_left = [group for group, _ in scored if group]
        filtered = len(exps) - sum(len(group) for group in groups_left)
        if self.std_threshold is not None and self.duplicate_experiences:
            groups_left += self._copies(groups_left, list(groups.values()))
        metrics = annotating.gather_groups([of_group for _, of_group in scored])
        return [e for group in groups_left for e in group], {**metrics, "filtered_count": filtered}

    def _rewards(self, exps: Group) -> tuple[Rewards, Rewards]:
        """Return the raw rewards, and those that enter mean and deviation."""
        raw = np.array([annotating.reward_of(e) for e in exps])
        if self.rank_penalty is None:
            return raw, raw
        return raw, annotating.rank_penalized(exps, raw, self.rank_penalty, self.over)

    def _copies(self, sources: Sequence[Group], groups: Sequence[Group]) -> list[Group]:
        """Return a copy of a random kept group for each one that was left out."""
        if not sources:
            return []
        key = f"{self.seed}/{groups[0][0].eid.tid}"
        # Seeded by the batch: a restarted consumer draws what the first one drew.
        draw = random.choice if self.seed is None else random.Random(key).choice
        taken = {group[0].eid.tid for group in groups}
        lacking = len(groups) - len(sources)
        return [copy_group(draw(list(sources)), taken) for _ in range(lacking)]


@advantage_fn.ADVANTAGE_FN.register_module("grpo_verl")
@configured
class GRPOAdvantageFn(group_scores.NormalizedScores, advantage_fn.GroupScoredAdvantage):
    """Group-relative advantages of the rows' summed token-level rewards.

    Args:
        epsilon: added to the deviation.
        kwargs: the options of `DeviationOptions` and `GroupScoredAdvantage`.
    """

    reference_args = {"std_floor": 0.0, "over": "rows"}
