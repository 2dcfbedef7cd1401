"""Filters and reward shaping: what stands before a strategy that computes advantages.

None of them sets advantages; put them first in a list: ``["overlong_penalty",
"dapo_dynamic_sampling", "grpo"]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, field
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from trinity_buffer.algorithm import annotating, group_scores
from trinity_buffer.algorithm.add_strategy import add_strategy
from trinity_buffer.algorithm.annotating import Problem, reward_of
from trinity_buffer.algorithm.arguments import checked, configured, require
from trinity_buffer.algorithm.group_scores import CountsOver, Rewards, ScoredGroups
from trinity_buffer.experience import Experience, group_by

Metrics = dict[str, Any]


@add_strategy.ADD_STRATEGY.register_module("outcome_gate")
@configured
class OutcomeGateAddStrategy(CountsOver, add_strategy.AddStrategy):
    """Keeps the groups in which enough runs succeed, judged by a named metric, not the reward.

    A shaped reward differs between runs that all fail; a gate on its variance would keep such
    groups, a gate on the outcome does not.

    Args:
        writer: where the kept groups go.
        metric_key: the outcome, looked up in ``metrics``, then in ``info``; where it is in neither,
            of no row of a run, the reward counts.
        correct_threshold: a run succeeds if its outcome is above it.
        min_correct: groups with fewer successes are rejected as ``all_wrong``.
        min_wrong: groups with fewer failures are rejected as ``all_correct``.
        kwargs: of `CountsOver` and `AddStrategy`. Over runs, a run succeeds or fails by the mean
            outcome of its rows that have one.
    """

    families: ClassVar[tuple[str, ...]] = ("light",)
    annotates: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()

    metric_key: str = "accuracy"
    correct_threshold: float = 0.0
    _: KW_ONLY
    min_correct: int = 1
    min_wrong: int = 0

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        """Write the groups that pass, unchanged."""
        annotating.share_rewards(experiences, self.over)
        judged = self.sound(experiences, self._problems(experiences))
        groups = list(group_by(judged, "task").values())
        passing: list[list[Experience]] = []
        counts = {"all_wrong_groups": 0, "all_correct_groups": 0}
        for group in groups:
            reason = self._reason(group)
            if reason is None:
                passing.append(group)
            else:
                counts[f"{reason}_groups"] += 1
                self.reject(group, reason)
        metrics: Metrics = {"kept_groups": len(passing), **counts}
        return await self._write_groups(passing), metrics if groups else {}

    def _problems(self, experiences: Sequence[Experience]) -> Iterator[Problem]:
        for experience, outcome in self._judged(experiences):
            # A row without the metric is judged by its reward, and needs one then.
            if outcome is None:
                yield from annotating.problems_of([experience], ("reward",))
            elif not math.isfinite(outcome):  # a grader that broke has not found an answer wrong
                of_run = [e for e in experiences if e.eid.rid == experience.eid.rid]
                together = of_run if self.over == "runs" else [experience]
                yield Problem(together, experience, f"{self.metric_key} is {outcome}")

    def _judged(self, exps: Sequence[Experience]) -> list[tuple[Experience, float | None]]:
        """Return the rows by which ``exps`` are judged, each with its metric, if it has one."""
        rows = [(e, self._metric(e)) for e in exps]
        if self.over == "rows":
            return rows
        # Of a run often the last row alone is graded, which counts for all of them.
        graded = {e.eid.rid for e, metric in rows if metric is not None}
        return [(e, m) for e, m in rows if m is not None or e.eid.rid not in graded]

    def _metric(self, experience: Experience) -> float | None:
        outcome = experience.metrics.get(self.metric_key, experience.info.get(self.metric_key))
        return None if outcome is None else annotating.number_of(outcome)

    def _reason(self, group: Sequence[Experience]) -> str | None:
        """Return why ``group`` is left out, or None."""
        judged = self._judged(group)
        outcomes = np.array([reward_of(e) if m is None else m for e, m in judged], np.float64)
        runs = annotating.runs_of([e for e, _ in judged], self.over)
        of_runs = group_scores.run_means(outcomes, runs)
        correct = int((of_runs > self.correct_threshold).sum())
        if correct < self.min_correct:
            return "all_wrong"
        return "all_correct" if len(of_runs) - correct < self.min_wrong else None


@add_strategy.ADD_STRATEGY.register_module("dapo_dynamic_sampling")
@configured
class DynamicSamplingAddStrategy(OutcomeGateAddStrategy):
    """Keeps the groups in which some runs succeed and some fail (DAPO, arXiv:2503.14476).

    Args:
        writer: where the kept groups go.
        min_wrong: groups with fewer failures are rejected as ``all_correct``.
        kwargs: the options of `OutcomeGateAddStrategy`.
    """

    min_wrong: int = field(default=1, kw_only=True)


@add_strategy.ADD_STRATEGY.register_module("best_of_group")
@configured
class BestOfGroupAddStrategy(add_strategy.RewardFilter):
    """Keeps the runs with the largest reward of each group (RAFT, arXiv:2304.06767).

    Args:
        writer: where the kept runs go.
        num_kept: how many runs of a group are kept; of equal ones the earlier.
        min_reward: runs below it are never kept; None keeps the best, however bad.
        kwargs: of `RewardFilter`. Over runs, a run is kept by the mean reward of its rows.
    """

    num_kept: int = checked(1, (lambda value: value >= 1, "be at least 1"))
    _: KW_ONLY
    min_reward: float | None = None

    @override
    def score_groups(self, rewards: Rewards) -> ScoredGroups:
        """Return which runs are kept, by their rewards ``[k, R]``; of equal ones the earlier."""
        # Stable: of equal rewards the earlier run, whatever the platform.
        order = np.argsort(-rewards, axis=-1, kind="stable")[:, : self.num_kept]
        stays = np.zeros(rewards.shape, np.bool_)
        np.put_along_axis(stays, order, values=True, axis=-1)
        return ScoredGroups(
            kept=stays if self.min_reward is None else stays & (rewards >= self.min_reward)
        )


@add_strategy.ADD_STRATEGY.register_module("overlong_penalty")
@configured
class OverlongPenaltyAddStrategy(CountsOver, add_strategy.AddStrategy):
    """Lowers the reward of answers near the length limit (DAPO, arXiv:2503.14476).

    0 up to ``max_length - cache_length`` action tokens, falling linearly to ``-penalty`` at
    ``max_length``, and ``-penalty`` beyond. The stored reward stays; the strategies behind this one
    see the lowered one.

    Args:
        writer: where the experiences go.
        max_length: action tokens at which the penalty is whole.
        cache_length: length of the stretch before it in which the penalty grows.
        penalty: the largest penalty.
        kwargs: of `CountsOver` and `AddStrategy`. Over runs, a row without a reward has that of its
            run, less the penalty of its own length.
    """

    families: ClassVar[tuple[str, ...]] = ("light",)
    annotates: ClassVar[bool] = False

    max_length: int
    cache_length: int
    _: KW_ONLY
    penalty: float = 1.0

    @override
    def __post_init__(self) -> None:
        rule = f"lie between 1 and max_length={self.max_length}"
        is_part = 0 < self.cache_length <= self.max_length
        require(is_part, "cache_length", self.cache_length, rule)

    def penalty_of(self, length: int) -> float:
        """Return the penalty of an answer of ``length`` action tokens, 0 or negative."""
        over = length - (self.max_length - self.cache_length)
        return -self.penalty * min(max(over / self.cache_length, 0.0), 1.0)

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        """Write all groups, with the lowered rewards."""
        annotating.share_rewards(experiences, self.over)
        usable = self.usable(experiences)
        masks = (e.action_mask for e in usable)
        charges = [self.penalty_of(int((mask != 0).sum())) for mask in masks if mask is not None]
        for experience, charge in zip(usable, charges, strict=True):
            experience.reward = reward_of(experience) + charge
        metrics = {
            "overlong/penalized_count": sum(charge < 0 for charge in charges),
            "overlong/penalty_mean": sum(charges) / max(len(charges), 1),
        }
        count = await self._write_groups(group_by(usable, "task").values())
        return count, metrics if usable else {}
