"""What strategies and advantage functions do to single experiences: examine one, score one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.algorithm.group_scores import Rewards
from trinity_buffer.algorithm.reward_scores import RewardScorer, asked
from trinity_buffer.errors import InvalidExperienceError
from trinity_buffer.experience import Experience


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
        return InvalidExperienceError(
            f"{self.culprit.eid.uid}: {user} cannot use it, its {self.text}"
        )


def annotate(experience: Experience, score: float) -> None:
    """Set advantages and returns to ``score`` on the tokens of the action mask, 0 elsewhere."""
    mask = experience.action_mask
    if mask is None:
        raise InvalidExperienceError(
            f"{experience.eid.uid}: advantages need an action_mask, it is None"
        )
    # A mask selects: 255 and -1, which older stores may hold, are no weights. A bool mask times a
    # Python number is float32; a float mask keeps its own type.
    chosen = mask if mask.dtype == torch.bool else mask != 0
    experience.advantages = (chosen.to(mask.dtype) if mask.is_floating_point() else chosen) * score
    experience.returns = experience.advantages.clone()


def annotate_group(
    exps: Sequence[Experience], rewards: Rewards, score: RewardScorer
) -> tuple[list[Experience], dict[str, float]]:
    """Annotate one group with what ``score`` says; return who is kept, and the group's metrics.

    Args:
        exps: the group.
        rewards: of its members, finite, ``[G]``.
    """
    found = asked(score, rewards[np.newaxis])
    if found.scores is not None:
        for experience, value in zip(exps, found.scores[0].tolist(), strict=True):
            annotate(experience, value)
    kept = [True] * len(exps) if found.kept is None else found.kept[0].tolist()
    members = [experience for experience, stays in zip(exps, kept, strict=True) if stays]
    return members, {name: float(values[0]) for name, values in found.metrics.items()}


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


def run_problem(steps: list[Experience], rewarded: Experience | None) -> Problem | None:
    """Return what keeps a run from being scored, or None.

    All steps need a mask, and ``rewarded`` a reward; the steps of a run are of use together or not
    at all.
    """
    for step in steps:
        needs = ("reward", "action_mask") if step is rewarded else ("action_mask",)
        found = unusable(step, needs)
        if found is not None:
            return Problem(steps, step, found)
    return None


def reward_of(experience: Experience) -> float:
    """Return the reward as a float.

    Raises:
        InvalidExperienceError: there is none.
    """
    if experience.reward is None:
        raise InvalidExperienceError(f"{experience.eid.uid}: its reward is None")
    return float(experience.reward)


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
