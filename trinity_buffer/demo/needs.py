"""What an algorithm needs beside its configuration: read off the algorithm, stated nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trinity_buffer.algorithm import Algorithm

Data = Literal["rollouts", "solutions", "pairs"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be made for a run.

    Attributes:
        data: ``"rollouts"`` of the policy itself, or recorded data: ``"solutions"`` (prompts with
            answers) or ``"pairs"`` (the answer, and a wrong one).
        teacher: a policy to distil.
        expert_groups: solutions of an expert, per gradient step.
    """

    data: Data
    teacher: bool
    expert_groups: int

    @property
    def solutions(self) -> bool:
        """Whether somebody must know the answers."""
        return self.data != "rollouts" or self.teacher or self.expert_groups > 0


def needs_of(algorithm: Algorithm, groups_per_step: int) -> Needs:
    """Return what ``algorithm`` needs in steps of ``groups_per_step`` groups."""
    data: Data = "rollouts"
    if not algorithm.type.use_rollout:
        data = "pairs" if algorithm.type.schema == "dpo" else "solutions"
    advantage = algorithm.advantage
    return Needs(
        data,
        advantage is not None and "teacher_logprob" in advantage.tensors,
        algorithm.sample.plan(1, groups_per_step).expert,
    )
