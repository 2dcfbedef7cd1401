"""Solutions and pairs: data for `sft`, `cpt` and `dpo`, for teachers and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal

from trinity_buffer.demo.tasks import Problem, Task, Tokens, whole_draws
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import EID, Experience, Key

if TYPE_CHECKING:
    from trinity_buffer.algorithm import Algorithm

Data = Literal["rollouts", "solutions", "pairs"]


@dataclass(frozen=True, slots=True)
class Needs:
    """Data that an algorithm needs beside its configuration.

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
        """Whether the answers of the task must be known."""
        return self.data != "rollouts" or self.teacher or self.expert_groups > 0


def needs_of(algorithm: Algorithm, groups_per_step: int) -> Needs:
    """Return the needs of ``algorithm`` in steps of ``groups_per_step`` groups."""
    data: Data = "rollouts"
    if not algorithm.type.use_rollout:
        data = "pairs" if algorithm.type.schema == "dpo" else "solutions"
    advantage = algorithm.advantage
    return Needs(
        data,
        advantage is not None and "teacher_logprob" in advantage.tensors,
        algorithm.sample.plan(1, groups_per_step).expert,
    )


@dataclass(frozen=True, slots=True)
class SolutionSampler:
    """Makes recorded data instead of rollouts, for a `SamplingExplorer`; it loads no weights.

    Its data of a run depend on (seed, batch, task) alone.

    Attributes:
        task: whose problems.
        seed: of the experiment.
        pairs: beside each answer a wrong one.

    Raises:
        InvalidArgumentError: the task has no solutions.
    """

    task: Task
    seed: int
    pairs: bool = False

    def __post_init__(self) -> None:
        require_solutions(self.task)

    def load(self, uri: str) -> SolutionSampler:
        """Return itself."""
        del uri
        return self

    def rollout(
        self, pairs: Sequence[tuple[Key, int]], *, batch: Key, policy_version: int
    ) -> list[Experience]:
        """Return the solution, or the pair, of each (task, run) of ``batch``."""
        del policy_version
        return [self._example(EID(batch, index, run, 0)) for index, run in pairs]

    def _example(self, eid: EID) -> Experience:
        problem = self.task.problem(self.seed, eid.batch, eid.task)
        prompt, answer = list(problem.prompt), list(problem.answer)
        if self.pairs:
            wrong = list(self._wrong(problem, eid))
            return Experience(eid=eid, tokens=prompt, chosen=answer, rejected=wrong)
        return Experience(
            eid=eid,
            tokens=prompt + answer,
            prompt_length=len(prompt),
            prompt_text=self.task.text(prompt),
            response_text=self.task.text(answer),
        )

    def _wrong(self, problem: Problem, eid: EID) -> Tokens:
        """Return as many tokens as the answer has, drawn from those that answers are made of."""
        length = len(problem.answer)
        drawn = (
            whole_draws(length, 10, "wrong", self.seed, eid.batch, eid.task, attempt)
            for attempt in count()
        )
        return next(tokens for tokens in drawn if tokens != problem.answer)


def require_solutions(task: Task) -> None:
    """Raise InvalidArgumentError unless the prompt of a problem determines its answer."""
    if not task.has_solutions:
        raise InvalidArgumentError(
            f"task {task.name!r} has no solutions to learn from, its answers are hidden: whatever "
            "needs solutions, pairs, a teacher or an expert learns the task 'sort'"
        )
