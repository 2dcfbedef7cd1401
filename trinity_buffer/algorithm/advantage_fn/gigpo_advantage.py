"""Group-in-group policy optimization (GiGPO, arXiv:2505.10978): credit for runs and for steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

import numpy as np
from typing_extensions import override

from trinity_buffer.algorithm import annotating, group_scores
from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, PipelineAdvantage
from trinity_buffer.algorithm.annotating import Problem, StepsByRun
from trinity_buffer.algorithm.arguments import NOT_NEGATIVE, checked, configured
from trinity_buffer.algorithm.group_scores import Unit
from trinity_buffer.experience import Experience
from trinity_buffer.metrics import gather_metrics

Scores = dict[int, float]
"""id of an experience -> its score."""


@ADVANTAGE_FN.register_module("gigpo")
@configured
class GiGPOAdvantageFn(group_scores.Deviation, PipelineAdvantage):
    """``A = A_episode + omega A_step`` on every action token of a step.

    ``A_episode`` compares the rewards of the runs of a task; ``A_step`` compares the discounted
    returns of all steps that were taken in one state (an anchor), and is 0 where no other run was.

    Args:
        omega: weight of the step-level part.
        gamma: discount of a step.
        fnorm: ``"none"`` compares by difference, ``"std"`` also divides by the deviation.
        epsilon: added to the divisor.
        step_reward_key: key of ``info`` with the reward of a step; runs without it get their last
            step's ``reward``.
        env_state_hash_key: key of ``info`` that names the state in which a step was taken.
        missing_reward: what to do with a run without any reward: ``"refuse"`` it, or take it for
            ``"zero"``, as in the reference.
        anchor_scope: whose steps share an anchor: those of one ``"task"``, as published, or of the
            whole ``"batch"``, as in the reference.
        ddof: 1 for the sample deviation, 0 for the population's.
        std_floor: deviations below this share of the largest value are 0.
    """

    reference_args = {
        "on_unknown": "ignore",
        "std_floor": 0.0,
        "missing_reward": "zero",
        "anchor_scope": "batch",
    }

    omega: float = 1.0
    gamma: float = 1.0
    fnorm: Literal["none", "std"] = "none"
    epsilon: float = checked(1e-6, NOT_NEGATIVE)
    step_reward_key: str = "step_reward"
    env_state_hash_key: str = "env_state_hash"
    _: KW_ONLY
    missing_reward: Literal["refuse", "zero"] = "refuse"
    anchor_scope: Literal["task", "batch"] = "task"
    ddof: Literal[0, 1] = 1
    std_floor: float = checked(group_scores.RELATIVE_FLOOR, NOT_NEGATIVE)

    @classmethod
    @override
    def unit_for(cls, **arguments: Any) -> Unit:
        """Return ``"batch"`` if anchors reach across tasks."""
        return "batch" if arguments.get("anchor_scope") == "batch" else "group"

    @override
    def problems(self, exps: Sequence[Experience]) -> Iterator[Problem]:
        """Yield the runs that lack a mask on any step, or a reward, or have a broken one."""
        yield from annotating.run_problems(exps, self._rewarded)
        for runs in annotating.runs_by_task(exps).values():
            for steps in runs.values():
                rewards = ((e, e.info.get(self.step_reward_key, 0.0)) for e in steps)
                bad = next(
                    ((e, r) for e, r in rewards if not math.isfinite(annotating.number_of(r))), None
                )
                if bad is not None:
                    yield Problem(steps, bad[0], f"{self.step_reward_key} (a reward) is {bad[1]}")

    @override
    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """Score all runs and steps; the order stays."""
        if not exps:
            return [], {}
        self.check(exps)
        tasks = annotating.runs_by_task(exps)
        episode, returns = Scores(), Scores()
        metrics = [self._episodes(runs, episode, returns) for runs in tasks.values()]
        step, anchors = self._steps(exps, returns)
        for e in exps:
            annotating.annotate(e, episode[id(e)] + self.omega * step.get(id(e), 0.0))
        return exps, {
            **gather_metrics(metrics, "gigpo"),
            **anchors,
            "gigpo/mean_abs_A_E": _mean_abs(episode.values(), len(exps)),
            "gigpo/mean_abs_A_S": _mean_abs(step.values(), len(exps)),
            "experience_count": len(exps),
        }

    def _rewarded(self, steps: list[Experience]) -> Experience | None:
        """Return the step that must have a ``reward``; None if none must."""
        # Step rewards replace that of the run, which then need not be there.
        if self.missing_reward == "zero" or any(self.step_reward_key in e.info for e in steps):
            return None
        return _in_order(steps)[-1]

    def _episodes(self, runs: StepsByRun, episode: Scores, returns: Scores) -> dict[str, float]:
        """Fill in the score of each run, for all its steps, and their returns; return metrics."""
        totals = []
        ordered = [_in_order(steps) for steps in runs.values()]
        for steps in ordered:
            rewards = [float(step.info.get(self.step_reward_key, 0.0)) for step in steps]
            final = steps[-1]
            # Without step rewards all of it falls on the last.
            if not any(self.step_reward_key in step.info for step in steps):
                lacking = final.reward is None and self.missing_reward == "zero"
                rewards[-1] = 0.0 if lacking else annotating.reward_of(final)
            # Undiscounted: runs are compared by what they earned, steps by what was still to come.
            totals.append(float(sum(rewards)))
            running = 0.0
            for step, reward in zip(reversed(steps), reversed(rewards), strict=True):
                running = reward + self.gamma * running
                # By identity: two steps of a run may be equal.
                returns[id(step)] = running
        scores, mean, std = self._compared(totals)
        for steps, score in zip(ordered, scores, strict=True):
            episode.update((id(step), score) for step in steps)
        return {"episode_reward_mean": mean, "episode_reward_std": std}

    def _steps(
        self, exps: Sequence[Experience], returns: Scores
    ) -> tuple[Scores, dict[str, float]]:
        """Return the score of each step that shares its state with another, and metrics."""
        anchors: dict[tuple[str, str], list[Experience]] = {}
        for e in exps:
            state = e.info.get(self.env_state_hash_key)
            if state is not None:
                scope = e.eid.tid if self.anchor_scope == "task" else ""
                anchors.setdefault((scope, str(state)), []).append(e)
        # A state that one step alone has seen has nothing to be compared with.
        shared = [group for group in anchors.values() if len(group) > 1]
        scores: Scores = {}
        for group in shared:
            differences, _, _ = self._compared([returns[id(e)] for e in group])
            scores.update({id(e): score for e, score in zip(group, differences, strict=True)})
        return scores, {
            "gigpo/anchor_groups_total": len(anchors),
            "gigpo/anchor_groups_size_gt1": len(shared),
            "gigpo/anchor_group_hit_ratio": len(shared) / len(anchors) if anchors else 0.0,
        }

    def _compared(self, values: Sequence[float]) -> tuple[list[float], float, float]:
        """Return how each of ``values`` differs from their mean, the mean and the divisor."""
        mean, std = map(float, self.moments(values))
        divisor = std if self.fnorm == "std" else 1.0
        centred = np.asarray(values, np.float64) - mean
        return group_scores.scaled(centred, divisor, self.epsilon).tolist(), mean, divisor


def _in_order(steps: Sequence[Experience]) -> list[Experience]:
    """Return the steps of a run as they were taken."""
    return sorted(steps, key=lambda step: step.eid.step)


def _mean_abs(values: Any, size: int) -> float:
    """Return the mean size of ``values``, those that are missing being 0."""
    return float(np.abs(np.fromiter(values, dtype=np.float64)).sum()) / size
