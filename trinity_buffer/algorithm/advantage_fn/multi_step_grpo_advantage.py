"""Group-relative advantages for rollouts of several steps: the last step's reward scores all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from trinity_buffer.algorithm import annotating
from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, PipelineAdvantage
from trinity_buffer.algorithm.annotating import LastStepScores, Problem
from trinity_buffer.algorithm.arguments import configured
from trinity_buffer.algorithm.group_scores import Unit
from trinity_buffer.experience import Experience


@ADVANTAGE_FN.register_module("step_wise_grpo")
@configured
class StepWiseGRPOAdvantageFn(LastStepScores, PipelineAdvantage):
    """Scores each run by its last step, as GRPO does, and gives the score to all its steps.

    Args:
        epsilon: added to the deviation.
        enable_step_norm: divide the advantages of a run by its number of steps.
        std_cal_level: whose deviation divides: of the runs of a ``"group"``, or of the whole
            ``"batch"``.
        std_threshold: groups whose deviation is at or below it, and groups of one run, are left
            out; None keeps all.
        kwargs: the options of `DeviationOptions`.
    """

    reference_args = {"on_unknown": "ignore", "std_floor": 0.0}

    enable_step_norm: bool = False
    std_cal_level: Unit = "group"
    std_threshold: float | None = None

    @classmethod
    @override
    def unit_for(cls, **arguments: Any) -> Unit:
        """Return ``"batch"`` if the deviation needs one."""
        return "batch" if arguments.get("std_cal_level") == "batch" else "group"

    @override
    def problems(self, exps: Sequence[Experience]) -> Iterator[Problem]:
        """Yield the runs that lack a mask on any step, or a reward on the last."""
        return annotating.run_problems(exps, lambda steps: steps[-1])

    def calculate_group_advantage(
        self, exps: Mapping[str, Experience], precomputed_std: float | None = None
    ) -> tuple[dict[str, float], dict[str, float], bool]:
        """Return the score of each run by its last step, metrics, and whether to leave it out."""
        scores, metrics = self.score_runs(exps, precomputed_std)
        threshold = self.std_threshold
        skip = threshold is not None and (len(exps) == 1 or metrics["reward_std"] <= threshold)
        return scores, metrics, skip

    @override
    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """Score all tasks; the result is ordered by task and run."""
        if not exps:
            return [], {}
        self.check(exps)
        tasks = list(annotating.runs_by_task(exps).values())
        std = None
        if self.std_cal_level == "batch":
            rewards = [annotating.reward_of(steps[-1]) for runs in tasks for steps in runs.values()]
            std = float(self.moments(rewards)[1])
        scored: list[Experience] = []
        metrics, skipped = [], 0
        for runs in tasks:
            last = {run: steps[-1] for run, steps in runs.items()}
            scores, of_task, skip = self.calculate_group_advantage(last, std)
            metrics.append(of_task)
            skipped += skip
            if not skip:
                self.broadcast_advantages(runs, scores)
                scored += [step for steps in runs.values() for step in steps]
        counts = {
            "experience_count": len(scored),
            "filtered_count": len(exps) - len(scored),
            "skipped_group_ratio": skipped / len(tasks),
        }
        return scored, {**annotating.gather_groups(metrics), **counts}
