"""Strategies: how a group of experiences gets its advantages, or is left out.

A strategy sees whole units (``unit``: a group, or a batch), sorted by (task, run, step). It hands
what it keeps to its writer, and rejects the rest with a reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from trinity_buffer.algorithm import annotating, arguments, group_scores
from trinity_buffer.algorithm.annotating import Problem, Scored
from trinity_buffer.algorithm.copies import left_out
from trinity_buffer.algorithm.group_scores import Rewards, RewardScorer, ScoredGroups, WholeUnits
from trinity_buffer.experience import Experience, group_by
from trinity_buffer.writer import BufferWriter, invalid

__all__ = [
    "ADD_STRATEGY",
    "AddStrategy",
    "GRPOAddStrategy",
    "GroupAdvantageStrategy",
    "OPMDAddStrategy",
    "RewardStrategy",
    "RewardVarianceAddStrategy",
    "group_by",
]


@arguments.configured
class AddStrategy(WholeUnits, arguments.Configured, ABC):
    """Takes experiences from an explorer, gives them to a writer: annotated, filtered, or both.

    Class attributes, which the consumer reads beside those of `WholeUnits`:
        annotates: whether `add` sets advantages (False: it only chooses).

    An experience without the fields that the class ``needs`` is rejected as ``invalid``.

    A class that needs nothing but rewards says so by a method ``score_groups(rewards)``, which gets
    the rewards of ``k`` groups of one size, ``[k, G]``, and returns `ScoredGroups`: what `add`
    would make of them. The consumer then makes no experiences. With ``over = "runs"`` the columns
    are runs, not rows (see `group_scores.scored_rows`).

    Args:
        writer: where the kept experiences go.
        on_unknown: ``"ignore"`` swallows misspelt arguments, as the reference does. Others are
            refused: subclasses can hand on what they do not know.

    Raises:
        InvalidArgumentError: an argument that no class in the line of inheritance declares.
    """

    families: ClassVar[tuple[str, ...]] = ("light", "tokens", "text")
    annotates: ClassVar[bool] = True
    # In a run ``over`` is ``"runs"``, unless it is said otherwise.
    runtime_args: ClassVar[tuple[str, ...]] = ("writer", "on_unknown", "rng", "over")

    writer: BufferWriter = field(repr=False)
    on_unknown: Literal["error", "ignore"] = field(default="error", kw_only=True)

    @abstractmethod
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write what is kept; return how many experiences were written, and metrics.

        All input is examined before the first write. ``step`` counts the calls.
        """

    @classmethod
    def takes_over(cls) -> bool:
        """Return whether the constructor can be told what counts once (``over``)."""
        return "over" in arguments.declared_arguments(cls)

    def reject(self, experiences: Sequence[Experience], reason: str) -> bool:
        """Tell the writer why ``experiences`` are left out; False if it is one that only takes.

        A reason is recorded with U+FFFD in place of NUL and surrogates, which no database stores.
        """
        record: Callable[[Sequence[Experience], str], None] | None = getattr(
            self.writer, "reject", None
        )
        if experiences and record is not None:
            record(experiences, reason)
        return record is not None

    def usable(
        self, experiences: Sequence[Experience], needs: Sequence[str] | None = None
    ) -> list[Experience]:
        """Return those that have the fields ``needs``, by default the class's.

        The others are rejected as ``invalid``, which names the field.

        Raises:
            InvalidExperienceError: one lacks a field and the writer cannot record a rejection.
        """
        fields = self.needs if needs is None else needs
        return self.sound(experiences, annotating.problems_of(experiences, fields))

    def sound(
        self, experiences: Sequence[Experience], problems: Iterable[Problem]
    ) -> list[Experience]:
        """Return the experiences without ``problems``; refuse the others."""
        # By identity: experiences are compared by their content, which tensors make slow.
        useless: set[int] = set()
        for problem in problems:
            self.refuse(problem)
            useless.update(map(id, problem.together))
        return [e for e in experiences if id(e) not in useless]

    async def _write_groups(self, groups: Iterable[list[Experience]]) -> int:
        """Write group by group; return how many experiences they have."""
        count = 0
        for group in groups:
            await self.writer.write_async(group)
            count += len(group)
        return count

    def refuse(self, problem: Problem) -> None:
        """Reject what ``problem`` makes useless as ``invalid``.

        Raises:
            InvalidExperienceError: the writer cannot record a rejection.
        """
        if not self.reject(problem.together, invalid(problem.field)):
            raise problem.error(type(self).__name__)


ADD_STRATEGY: arguments.Registry[type[AddStrategy]] = arguments.Registry("add_strategy")


class GroupAdvantageStrategy(AddStrategy):
    """Scores one group at a time: write `group_experiences` and `calculate_group_advantage`.

    Class attributes:
        left_out: the reason recorded for members that `calculate_group_advantage` does not return.
    """

    left_out: ClassVar[str] = "filtered"

    @abstractmethod
    def group_experiences(self, exps: list[Experience]) -> dict[str, list[Experience]]:
        """Return the groups by their id, in order of first appearance."""

    @abstractmethod
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> Scored:
        """Set the advantages of one group; return the members to write, and the group's metrics.

        Members that are not returned are rejected, for the reason `left_out`.
        """

    @override
    async def add(self, exps: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Score all groups, then write them one by one, in order of first appearance."""
        annotating.share_rewards(exps, self.over)
        # All input is examined before the first write: a refusal leaves nothing half written.
        groups = {
            group_id: self.usable(group, self.needs_of(group))
            for group_id, group in self.group_experiences(exps).items()
        }
        groups = {group_id: group for group_id, group in groups.items() if group}
        scored = [
            annotating.scored_group(self, self.calculate_group_advantage(group_id, list(group)))
            for group_id, group in groups.items()
        ]
        for group, (chosen, _) in zip(groups.values(), scored, strict=True):
            self.reject(left_out(group, chosen), self.left_out)
            if chosen:
                await self.writer.write_async(chosen)
        count = sum(len(chosen) for chosen, _ in scored)
        return count, annotating.gather_groups([metrics for _, metrics in scored])


@arguments.configured
class RewardStrategy(group_scores.CountsOver, GroupAdvantageStrategy):
    """Scores the runs of each task by their rewards alone: write `score_groups`, and it is done.

    Args:
        writer: where the scored groups go.
        kwargs: of `CountsOver` and `AddStrategy`.
    """

    families: ClassVar[tuple[str, ...]] = ("light",)
    deciding: ClassVar[tuple[str, ...]] = (
        *("add", "calculate_group_advantage", "group_experiences", "needs_of", "rewards_of"),
        *("refuse", "reject", "usable"),
    )

    @abstractmethod
    def score_groups(self, rewards: Rewards) -> ScoredGroups:
        """Return the scores of ``k`` groups of one size, given their finite rewards ``[k, G]``.

        Who is not kept is rejected, for the reason `left_out`.
        """

    @override
    def from_rewards(self) -> RewardScorer | None:
        """Return `score_groups` with the reason and the names of metrics that `add` gives."""
        score = super().from_rewards()
        return None if score is None else partial(group_scores.as_added, score, self.left_out)

    @override
    def group_experiences(self, exps: list[Experience]) -> dict[str, list[Experience]]:
        """Return the runs of each task."""
        return group_by(exps, "task")

    def rewards_of(self, exps: Sequence[Experience]) -> Rewards:
        """Return the rewards that enter the statistics, shape ``(G,)``."""
        return np.array([annotating.reward_of(e) for e in exps])

    @override
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> Scored:
        """Score one group; return the members that are kept."""
        return annotating.annotate_group(exps, self.rewards_of(exps), self.score_groups, self.over)


@arguments.configured
class RewardFilter(group_scores.CountsOver, AddStrategy):
    """Keeps rows of each task by their rewards alone, unchanged: write `score_groups`.

    Args:
        writer: where the kept groups go.
        kwargs: of `CountsOver` and `AddStrategy`.
    """

    families: ClassVar[tuple[str, ...]] = ("light",)
    annotates: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("reward",)
    deciding: ClassVar[tuple[str, ...]] = ("add", "choose", "refuse", "reject", "sound", "usable")

    @abstractmethod
    def score_groups(self, rewards: Rewards) -> ScoredGroups:
        """Return who is kept of ``k`` groups of one size, given their finite rewards ``[k, G]``."""

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write what is kept of each group; a metric is the sum over the groups."""
        _, chosen, metrics = self.choose(experiences)
        return await self._write_groups(chosen), metrics

    def choose(
        self, experiences: list[Experience]
    ) -> tuple[list[list[Experience]], list[list[Experience]], dict[str, Any]]:
        """Return the groups, what is kept of those of which anything is, and metrics.

        The others are rejected.
        """
        annotating.share_rewards(experiences, self.over)
        groups = list(group_by(self.usable(experiences), "task").values())
        chosen, metrics = list[list[Experience]](), dict[str, Any]()
        for group in groups:
            rewards = np.array([annotating.reward_of(e) for e in group])
            size, runs = np.array([len(group)]), annotating.runs_of(group, self.over)
            scored = group_scores.scored_rows(self.score_groups, self.over, rewards, size, runs)
            verdicts = (each.tolist() for each in scored.verdicts(len(group)))
            rows = list(zip(group, *verdicts, strict=True))
            for reason in dict.fromkeys(reason for _, stay, reason in rows if not stay):
                self.reject([e for e, stay, r in rows if not stay and r == reason], reason)
            chosen.append([e for e, stay, _ in rows if stay])
            for name, values in scored.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + float(values[0])
        return groups, list(filter(None, chosen)), metrics


@ADD_STRATEGY.register_module("grpo")
@arguments.configured
class GRPOAddStrategy(group_scores.NormalizedScores, RewardStrategy):
    """Group-relative advantages: ``(reward - mean) / (std + epsilon)`` (arXiv:2402.03300).

    Args:
        writer: where the scored groups go.
        epsilon: added to the deviation.
        std_threshold: groups with a deviation at or below it, and groups of one, are rejected; None
            keeps all.
        kwargs: the options of `DeviationOptions` and `RewardStrategy`.
    """

    left_out: ClassVar[str] = "zero_variance"
    reference_args = {"on_unknown": "ignore", "std_floor": 0.0, "over": "rows"}

    std_threshold: float | None = field(default=None, kw_only=True)

    @override
    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return the scores; groups whose deviation is at or below the threshold are left out."""
        scored = super().score_groups(rewards, weights)
        if self.std_threshold is None:
            return scored
        # A group of one deviates by the made-up 1 of the reference.
        alone = group_scores.statistics(rewards, weights).size == 1
        too_alike = (scored.metrics["reward_std"] <= self.std_threshold) | alone
        stays = np.broadcast_to(~too_alike[:, np.newaxis], rewards.shape)
        return replace(scored, kept=stays)


@ADD_STRATEGY.register_module("opmd")
@arguments.configured
class OPMDAddStrategy(RewardStrategy):
    """Online policy mirror descent: the reward less a baseline of its group (arXiv:2501.12599).

    Args:
        writer: where the scored groups go.
        opmd_baseline: ``"mean"`` or ``"logavgexp"``: ``tau log(mean(exp(reward / tau)))``.
        tau: temperature of the second.
        kwargs: of `RewardStrategy`.
    """

    reference_args = {"on_unknown": "ignore", "over": "rows"}

    opmd_baseline: str = "mean"
    tau: float = 1.0

    @override
    def __post_init__(self) -> None:
        group_scores.check_baseline(self.opmd_baseline, self.tau)

    @override
    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return the distance from the baseline."""
        reference = group_scores.baseline(rewards, self.opmd_baseline, self.tau, weights)
        scores = rewards - reference[:, np.newaxis]
        return ScoredGroups(scores=scores, metrics={"group_baseline": reference})


@ADD_STRATEGY.register_module("reward_variance")
@arguments.configured
class RewardVarianceAddStrategy(RewardFilter):
    """Keeps the groups whose rewards differ; the others have nothing to teach. Sets no advantages.

    Args:
        writer: where the kept groups go.
        variance_threshold: groups of one, or with a population variance up to it, are rejected.
        std_floor: deviations below this share of the largest reward are 0.
        kwargs: of `RewardFilter`.
    """

    reference_args = {"on_unknown": "ignore", "std_floor": 0.0, "over": "rows"}

    variance_threshold: float = 0.0
    _: KW_ONLY
    std_floor: float = group_scores.RELATIVE_FLOOR

    @override
    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return which groups are kept, and what the others lack."""
        size, _, spread = group_scores.statistics(rewards, weights, std_floor=self.std_floor)
        stays = (spread > self.variance_threshold) & (size > 1)
        reasons = np.where(spread > 0, "filtered", "zero_variance").astype(object)[:, np.newaxis]
        metrics = {"kept_groups": stays.astype(float), "filtered_groups": (~stays).astype(float)}
        rows = np.broadcast_to(stays[:, np.newaxis], rewards.shape)
        return ScoredGroups(kept=rows, reasons=reasons, metrics=metrics)
