"""What every advantage function is, and the two kinds there are.

On the pipeline's side (`PipelineAdvantage`) one looks at lists of experiences, before anything is
on a GPU; on the trainer's side (`TrainerAdvantage`) at the tensors of one gradient step, where
values and log-probabilities are known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import annotating, arguments, group_scores
from trinity_buffer.algorithm.advantage_fn.rows import Result, Rows
from trinity_buffer.algorithm.annotating import Problem, Scored
from trinity_buffer.algorithm.group_scores import CountsOver, Over, Rewards, ScoredGroups
from trinity_buffer.experience import Experience, group_by

__all__ = ["ADVANTAGE_FN", "AdvantageFn", "GroupAdvantage", "PipelineAdvantage", "TrainerAdvantage"]


@arguments.configured
class AdvantageFn(arguments.Configured, ABC):
    """Computes advantages and returns.

    Class attributes:
        reads_old_logprob: whether it reads the log-probabilities that the explorer recorded, which
            every row must have then.
        reads_rewards: the same of rewards, where the advantages are computed in the trainer.
        tensors: what it reads there beside these, such as ``values``.

    Args:
        on_unknown: ``"ignore"`` swallows misspelt arguments. Others are refused: subclasses can
            hand on what they do not know.

    Raises:
        InvalidArgumentError: an argument that no class in the line of inheritance declares.
    """

    reads_old_logprob: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = True
    tensors: ClassVar[tuple[str, ...]] = ()
    runtime_args: ClassVar[tuple[str, ...]] = ("on_unknown", "rng")

    on_unknown: Literal["error", "ignore"] = field(default="error", kw_only=True)

    @abstractmethod
    def __call__(self, exps: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return ``exps`` with their advantages, and metrics."""

    @classmethod
    @abstractmethod
    def compute_in_trainer(cls) -> bool:
        """Return whether this needs the tensors of the trainer."""


ADVANTAGE_FN: arguments.Registry[type[AdvantageFn]] = arguments.Registry("advantage_fn")


class PipelineAdvantage(group_scores.WholeUnits, AdvantageFn):
    """Computes advantages of lists of experiences; the strategy around it hands on its unit."""

    # In a run ``over`` is ``"runs"``, unless it is said otherwise.
    runtime_args: ClassVar[tuple[str, ...]] = ("on_unknown", "rng", "over")

    @classmethod
    @override
    def compute_in_trainer(cls) -> bool:
        """Return False."""
        return False

    def problems(self, exps: Sequence[Experience]) -> Iterator[Problem]:
        """Yield what keeps experiences from being scored."""
        return annotating.problems_of(exps, self.needs)

    def check(self, exps: Sequence[Experience]) -> None:
        """Raise unless all of ``exps`` can be scored.

        Raises:
            InvalidExperienceError: names the first experience and field that cannot.
        """
        for problem in self.problems(exps):
            raise problem.error(type(self).__name__)

    @abstractmethod
    def process(self, exps: list[Experience]) -> Scored:
        """Set the advantages of ``exps``; return those that are kept, and metrics."""

    @override
    def __call__(self, exps: list[Experience], **kwargs: Any) -> Scored:
        """Do what `process` does."""
        return self.process(exps)


@arguments.configured
class GroupAdvantage(CountsOver, PipelineAdvantage):
    """Scores one group at a time: write `group_experiences` and `calculate_group_advantage`.

    Args:
        kwargs: of `CountsOver` and `AdvantageFn`.
    """

    def group_experiences(self, exps: list[Experience]) -> dict[str, list[Experience]]:
        """Return the groups by their id, in order of first appearance: the runs of each task."""
        return group_by(exps, "task")

    @override
    def problems(self, exps: Sequence[Experience]) -> Iterator[Problem]:
        """Yield what keeps experiences from being scored, group by group.

        Where runs are what counts, rows without a reward are given that of their run before.
        """
        annotating.share_rewards(exps, self.over)
        for group in self.group_experiences(list(exps)).values():
            yield from annotating.problems_of(group, self.needs_of(group))

    @abstractmethod
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> Scored:
        """Set the advantages of one group; return the members that are kept, and its metrics."""

    @override
    def process(self, exps: list[Experience]) -> Scored:
        """Score all groups; the result is ordered by group."""
        # All rows are checked before the first is annotated.
        self.check(exps)
        scored = [
            annotating.scored_group(self, self.calculate_group_advantage(group_id, group))
            for group_id, group in self.group_experiences(exps).items()
        ]
        members = [experience for group, _ in scored for experience in group]
        return members, annotating.gather_groups([metrics for _, metrics in scored])


class RewardAdvantage(GroupAdvantage):
    """Scores the runs of each task by their rewards alone: write `score_groups`."""

    deciding: ClassVar[tuple[str, ...]] = (
        "process",
        "problems",
        "needs_of",
        "group_experiences",
        "calculate_group_advantage",
    )

    @abstractmethod
    def score_groups(self, rewards: Rewards) -> ScoredGroups:
        """Return the scores of ``k`` groups of one size, given their finite rewards ``[k, G]``."""

    @override
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> Scored:
        """Score one group."""
        rewards = np.array([annotating.reward_of(e) for e in exps])
        return annotating.annotate_group(exps, rewards, self.score_groups, self.over)


def less_baseline(rewards: Rewards, baselines: Rewards, weights: Rewards | None) -> ScoredGroups:
    """Return the distance of ``rewards`` ``[k, G]`` from the baseline of each group ``[k]``."""
    mean = group_scores.statistics(rewards, weights).mean
    metrics = {"group_baseline": baselines, "reward_mean": mean}
    return ScoredGroups(scores=rewards - baselines[:, np.newaxis], metrics=metrics)


class TrainerAdvantage(AdvantageFn):
    """Computes advantages of the tensors of one gradient step.

    The batch is a mutable mapping under the names of verl (``response_mask``, ``old_log_probs``,
    ``uid``, ...) or our own (``action_mask``, ``old_logprob``, ``group_index``, ...), padded ``[B,
    T]`` or packed with ``cu_seqlens``. It gets ``advantages`` and ``returns``; a function that
    drops tokens also replaces the mask.
    """

    @classmethod
    @override
    def compute_in_trainer(cls) -> bool:
        """Return True."""
        return True

    @abstractmethod
    def compute(self, rows: Rows) -> Result:
        """Return the advantages of ``rows``."""

    @override
    def __call__(
        self,
        exps: MutableMapping[str, Any],
        *,
        reduce: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[MutableMapping[str, Any], dict[str, Any]]:
        """Put ``advantages`` and ``returns`` into the batch; return it, and metrics.

        Args:
            exps: the batch, or verl's ``DataProto``; changed in place.
            reduce: sums a tensor over data-parallel ranks; statistics of the whole step need it
                where every rank holds a part of the step.
            kwargs: ignored.
        """
        rows = Rows(exps, reduce)
        result = self.compute(rows)
        rows.store(result)
        return exps, result.metrics


@arguments.configured
class GroupScoredAdvantage(CountsOver, TrainerAdvantage):
    """Scores each row of a group by the rewards of the group: write `score_groups`.

    Args:
        over: what counts once in the statistics: ``"runs"``, where the batch says which rows are
            one (``run_index``), or each of their ``"rows"``, as in the reference.
        kwargs: of `AdvantageFn`.
    """

    reference_args: ClassVar[Mapping[str, Any]] = {"over": "rows"}

    over: Over = field(default="runs", kw_only=True)

    @abstractmethod
    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return the scores of ``k`` groups of one size, given their rewards ``[k, G]``.

        Args:
            rewards: one for each run whose rows have equal ones, else one for each row.
            weights: of the rows, where they have rewards of their own.
        """

    @override
    def compute(self, rows: Rows) -> Result:
        """Return the score of each row on its action tokens."""
        sums = rows.scores()
        groups = rows.groups()
        order = [row for members in groups for row in members]
        # One transfer from the device: groups are few and small, and scored by the same functions
        # as lists of experiences.
        rewards = np.array(sums.tolist(), np.float64)[order]
        names = rows.runs() if self.over == "runs" else None
        runs = None if names is None else np.array(names, np.int64)[order]
        sizes = np.array([len(members) for members in groups], np.int64)
        scored = group_scores.scored_rows(self.score_groups, self.over, rewards, sizes, runs)
        scores = torch.zeros(len(rewards), dtype=torch.float64)
        if scored.scores is not None:
            scores[order] = torch.from_numpy(scored.scores)
        like = rows.raw("token_level_rewards")
        on_tokens = scores.to(sums.device).to(like.dtype).unsqueeze(-1).expand_as(like)
        advantages = on_tokens.where(rows.mask, 0.0)
        return Result(advantages, advantages.clone())
