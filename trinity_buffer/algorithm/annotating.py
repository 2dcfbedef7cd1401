"""What strategies and advantage functions do to experiences: examine, score, group into runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.algorithm import group_scores
from trinity_buffer.algorithm.group_scores import Over, Rewards, Runs, ScoredGroups
from trinity_buffer.errors import InvalidExperienceError
from trinity_buffer.experience import Experience, group_by
from trinity_buffer.metrics import gather_metrics
from trinity_buffer.user_code import kind_of

Scored = tuple[list[Experience], dict[str, Any]]
"""The experiences that are kept, and metrics."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why experiences cannot be scored.

    Attributes:
        together: the experiences that are of no use because of it.
        culprit: the one of them that it is about.
        text: the field, and behind it what is wrong with it.
    """

    together: list[Experience]
    culprit: Experience
    text: str

    @property
    def field(self) -> str:
        """What is wrong, by its name."""
        return self.text.partition(" ")[0]

    def error(self, user: str) -> InvalidExperienceError:
        """Return the error that says what ``user`` cannot use, and why."""
        uid = self.culprit.eid.uid
        return InvalidExperienceError(f"{uid}: {user} cannot use it, its {self.text}")


def annotate(experience: Experience, score: float) -> None:
    """Set advantages and returns to ``score`` on the tokens of the action mask, 0 elsewhere."""
    mask = experience.action_mask
    if mask is None:
        raise InvalidExperienceError(
            f"{experience.eid.uid}: advantages need an action_mask, it is None"
        )
    # A mask selects: 255 and -1, which older stores may hold, are no weights. A bool mask times a
    # Python number is float32; one of 16 bits would round the score.
    chosen = mask if mask.dtype == torch.bool else mask != 0
    if mask.is_floating_point():
        chosen = chosen.to(torch.promote_types(mask.dtype, torch.float32))
    experience.advantages = chosen * score
    # A clone: a strategy behind this one may change either in place.
    experience.returns = experience.advantages.clone()


class LastStepScores(group_scores.DeviationOptions):
    """Scores each run by its last step, as GRPO does, for a class that gives them to all steps.

    Attributes:
        enable_step_norm: divide the advantages of a run by its number of steps.
    """

    enable_step_norm: bool

    def score_runs(
        self, exps: Mapping[str, Experience], std: float | None = None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the score of each run, given its last step, and the metrics of the task.

        Args:
            exps: the last step of each run.
            std: what divides, in place of the deviation of their rewards.
        """
        rewards = np.array([reward_of(e) for e in exps.values()])
        mean, own = self.moments(rewards)
        scores = self.normalized(rewards, mean, own if std is None else np.asarray(std))
        metrics = {"reward_mean": float(mean), "reward_std": float(own)}
        return dict(zip(exps, scores.tolist(), strict=True)), metrics

    def broadcast_advantages(self, run_exps: StepsByRun, scores: Mapping[str, float]) -> StepsByRun:
        """Set the advantages of every step of every run to the run's score; return the runs."""
        for run, steps in run_exps.items():
            for step in steps:
                annotate(step, scores[run] / (len(steps) if self.enable_step_norm else 1))
        return run_exps


def runs_of(exps: Sequence[Experience], over: Over) -> Runs | None:
    """Return the number of the run of each of a group's rows; None where each counts for one."""
    return group_scores.numbered([e.eid.rid for e in exps]) if over == "runs" else None


def num_runs(exps: Sequence[Experience], over: Over) -> int:
    """Return how many runs a group has; where rows count, how many rows."""
    return len({e.eid.rid for e in exps}) if over == "runs" else len(exps)


def rank_penalized(
    exps: Sequence[Experience], rewards: Rewards, penalty: float, over: Over
) -> Rewards:
    """Return ``r (1 - penalty x rank)``: likely answers earn less (arXiv:2506.02355, section 4).

    The factor also shrinks negative rewards, so that for these likelihood is a bonus. The
    likelihood of a run is the mean over its rows. A run alone has none to be ranked against.
    """
    if num_runs(exps, over) == 1:
        return rewards
    likelihoods = np.array([likelihood_of(e) for e in exps])
    runs = runs_of(exps, over)
    # Ranked by run: the rows of one run must not compete with each other.
    ranks = group_scores.likelihood_ranks(group_scores.run_means(likelihoods, runs))
    return rewards * (1.0 - (ranks if runs is None else ranks[runs]) * penalty)


def share_rewards(exps: Sequence[Experience], over: Over) -> None:
    """Give rows without a reward that of the last row of their run, where runs are what counts."""
    if over == "rows" or all(e.reward is not None for e in exps):
        return
    # Later rows overwrite earlier ones, so that each run keeps its last reward.
    last = {e.eid.rid: e.reward for e in exps}
    for experience in exps:
        if experience.reward is None:
            experience.reward = last[experience.eid.rid]


def annotate_group(
    exps: Sequence[Experience], rewards: Rewards, score: Callable[..., ScoredGroups], over: Over
) -> Scored:
    """Annotate one group with what ``score`` makes of it; return who is kept, and its metrics.

    Args:
        exps: the group.
        rewards: of its members, finite, ``[G]``.
        score: a ``score_groups``.
        over: what counts once.
    """
    sizes, runs = np.array([len(exps)]), runs_of(exps, over)
    scored = group_scores.scored_rows(score, over, rewards, sizes, runs)
    if scored.scores is not None:
        for experience, value in zip(exps, scored.scores.tolist(), strict=True):
            annotate(experience, value)
    stays, _ = scored.verdicts(len(exps))
    members = [experience for experience, stay in zip(exps, stays.tolist(), strict=True) if stay]
    return members, {name: float(values[0]) for name, values in scored.metrics.items()}


def scored_group(scorer: object, answer: Any) -> Scored:
    """Return the checked members and metrics of ``calculate_group_advantage``.

    Raises:
        TypeError: it is something else.
    """
    if not (isinstance(answer, Sequence) and len(answer) == 2 and isinstance(answer[1], Mapping)):
        raise TypeError(
            f"`calculate_group_advantage` of {type(scorer).__name__} returned {kind_of(answer)}: "
            "it must return the experiences to keep and a mapping of metrics, as in "
            "`return exps, {}`"
        )
    return answer[0], dict(answer[1])


def unusable(experience: Experience, fields: Sequence[str]) -> str | None:
    """Return which of ``fields`` is missing or broken, in words, or None."""
    for field in fields:
        value = getattr(experience, field)
        if value is None:
            return f"{field} is None"
        if isinstance(value, Tensor):
            if field == "logprobs" and not (value.numel() and bool(torch.isfinite(value).all())):
                return f"{field} are empty or not finite"
        elif isinstance(value, int | float) and not math.isfinite(value):
            return f"{field} is {value}"
    return None


def problems_of(exps: Sequence[Experience], fields: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each experience that lacks one of ``fields``; the others can be used."""
    for experience in exps:
        text = unusable(experience, fields)
        if text is not None:
            yield Problem([experience], experience, text)


def reward_of(experience: Experience) -> float:
    """Return the reward as a float.

    Raises:
        InvalidExperienceError: there is none.
    """
    if experience.reward is None:
        raise InvalidExperienceError(f"{experience.eid.uid}: its reward is None")
    return float(experience.reward)


def number_of(value: Any) -> float:
    """Return ``value``, which a grader recorded, as a float, or NaN."""
    try:
        return float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return math.nan


def likelihood_of(experience: Experience) -> float:
    """Return the mean of all recorded log-probabilities of the response.

    Raises:
        InvalidExperienceError: there are none.
    """
    if experience.logprobs is None or not experience.logprobs.numel():
        raise InvalidExperienceError(
            f"{experience.eid.uid}: its likelihood needs logprobs, there are none"
        )
    return float(experience.logprobs.mean())


StepsByRun = dict[str, list[Experience]]
"""Run id -> its steps."""


def runs_by_task(exps: Sequence[Experience]) -> dict[str, StepsByRun]:
    """Return the steps of every run of every task, each in order of first appearance."""
    return {task: group_by(group, "run") for task, group in group_by(list(exps), "task").items()}


def run_problems(
    exps: Sequence[Experience], rewarded: Callable[[list[Experience]], Experience | None]
) -> Iterator[Problem]:
    """Yield what keeps runs from being scored; ``rewarded`` names the step whose reward counts.

    All steps need a mask; the steps of a run are of use together or not at all.
    """
    for steps in chain.from_iterable(runs.values() for runs in runs_by_task(exps).values()):
        counts = rewarded(steps)
        for step in steps:
            needs = ("reward", "action_mask") if step is counts else ("action_mask",)
            text = unusable(step, needs)
            if text is not None:
                yield Problem(steps, step, text)
                break


def gather_groups(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of groups as ``group_advantages/<name>/{mean,max,min}``."""
    return gather_metrics(metrics, "group_advantages") if metrics else {}
