"""Group-relative advantages for rollouts of several steps: the last one's reward scores all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal

from typing_extensions import override

from trinity_buffer.algorithm import annotating
from trinity_buffer.algorithm.add_strategy.add_strategy import ADD_STRATEGY, AddStrategy
from trinity_buffer.algorithm.arguments import configured
from trinity_buffer.experience import Experience


@ADD_STRATEGY.register_module("step_wise_grpo")
@configured
class StepWiseGRPOStrategy(annotating.LastStepScores, AddStrategy):
    """Scores each run by its last step, as GRPO does, and gives the score to all its steps.

    Inspired by rLLM (https://github.com/rllm-org/rllm). One write per run.

    Args:
        writer: where the scored runs go.
        epsilon: added to the deviation.
        enable_step_norm: divide the advantages of a run by its number of steps.
        last_step: which step is the last: ``"list"``, the one that comes last (the consumer
            delivers runs sorted by step), or ``"step"``, the one with the largest ``eid.step``,
            whatever the order.
        kwargs: the options of `DeviationOptions` and `AddStrategy`.
    """

    families: ClassVar[tuple[str, ...]] = ("light",)
    reference_args: ClassVar[Mapping[str, Any]] = {"on_unknown": "ignore", "std_floor": 0.0}

    enable_step_norm: bool = False
    _: KW_ONLY
    last_step: Literal["list", "step"] = "list"

    def calculate_group_advantage(
        self, exps: dict[str, Experience]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the score of each run, given its last step, and the metrics of the task."""
        return self.score_runs(exps)

    @override
    async def add(self, exps: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Score all tasks, then write run by run, in order of first appearance."""
        tasks = annotating.runs_by_task(
            self.sound(exps, annotating.run_problems(exps, self._last))
        ).values()
        metrics = []
        for runs in tasks:
            scores, of_task = self.calculate_group_advantage(
                {run: self._last(steps) for run, steps in runs.items()}
            )
            self.broadcast_advantages(runs, scores)
            metrics.append(of_task)
        count = await self._write_groups(steps for runs in tasks for steps in runs.values())
        return count, annotating.gather_groups(metrics)

    def _last(self, steps: list[Experience]) -> Experience:
        """Return the step that carries the reward of its run."""
        # By position, as in the reference: the consumer delivers runs sorted by step.
        return steps[-1] if self.last_step == "list" else max(steps, key=lambda e: e.eid.step)
