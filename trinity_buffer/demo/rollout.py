"""Rollouts, many runs at once, each from random numbers of its own; and recorded data.

What a run draws depends on (seed, policy version, batch, task, run) alone. So generating only the
missing pairs gives the same rollouts for them as generating all pairs.

Solutions and pairs are data for `sft`, `cpt` and `dpo`, for teachers and experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.demo.tasks import HELD_OUT, Problem, Task, Tokens, Verdict, draws, whole_draws
from trinity_buffer.errors import InvalidArgumentError, NonFiniteError
from trinity_buffer.experience import EID, Experience, Key

if TYPE_CHECKING:
    from trinity_buffer.algorithm import Algorithm


Pairs: TypeAlias = Sequence[tuple[Key, int]]
"""Task and run of each experience that is wanted."""

Draws: TypeAlias = NDArray[np.float64] | None
"""Random numbers of each run, ``[runs, tokens]``; None: the likeliest token is taken."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn: the tokens before it, the response, its log-probs, the verdict."""

    context: Tokens
    response: Tokens
    logprobs: Tensor
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class TaskSampler:
    """Samples rollouts of a task from a policy, for a `SamplingExplorer`.

    Attributes:
        seed: of the experiment; problems and rollouts follow from it.
    """

    policy: TransformerPolicy
    task: Task
    seed: int

    def load(self, uri: str) -> TaskSampler:
        """Return a sampler with the policy at ``uri``."""
        return replace(self, policy=TransformerPolicy.load(uri))

    def rollout(self, pairs: Pairs, *, batch: Key, policy_version: int) -> list[Experience]:
        """Return the experiences of the runs ``pairs`` of ``batch``, run by run in the given order.

        A run of several turns gives one experience per turn, ``eid.step`` counts them. Log-probs
        are those of `token_scores` at temperature 1, which is what is sampled at.

        Args:
            pairs: (task, run); the task is the index of the problem in the batch.
            batch: id of the batch.
            policy_version: names the weights; recorded as ``info["model_version"]``.

        Raises:
            NonFiniteError: the policy's log-probabilities are NaN or infinite; nothing is returned.
        """
        torch.set_num_threads(1)
        task, seed = self.task, self.seed
        indices = dict.fromkeys(index for index, _ in pairs)
        problems = {index: task.problem(seed, batch, index) for index in indices}
        needed = task.turns * task.response_length
        numbers = [draws(needed, "run", seed, policy_version, batch, *pair) for pair in pairs]
        asked = [problems[index] for index, _ in pairs]
        played = _play(self.policy, task, asked, np.array(numbers))
        logprobs = [turn.logprobs for turns in played for turn in turns]
        if logprobs and not bool(torch.cat(logprobs).isfinite().all()):
            raise NonFiniteError(
                f"policy version {policy_version} has log-probabilities that are NaN or infinite: "
                "its weights are too large; lower optimizer.learning_rate, and go on from an older "
                "step with `train --resume-from`"
            )
        return [
            Experience(
                eid=EID(batch, index, run, step),
                tokens=[*turn.context, *turn.response],
                prompt_length=len(turn.context),
                logprobs=turn.logprobs,
                reward=turn.verdict.reward,
                info={"model_version": policy_version, "solved": turn.verdict.solved},
                prompt_text=task.text(turn.context),
                response_text=task.text(turn.response),
            )
            for (index, run), turns in zip(pairs, played, strict=True)
            for step, turn in enumerate(turns)
        ]


def evaluate(policy: TransformerPolicy, task: Task, problems: int, *, seed: int) -> float:
    """Return the fraction of ``problems`` fresh problems that the policy solves, being greedy."""
    asked = [task.problem(seed, index, stream=HELD_OUT) for index in range(problems)]
    played = _play(policy, task, asked, None)
    return sum(turns[-1].verdict.solved for turns in played) / problems


@torch.no_grad()
def _play(
    policy: TransformerPolicy, task: Task, problems: Sequence[Problem], numbers: Draws
) -> list[list[_Turn]]:
    """Return the turns of one run per problem; without ``numbers`` decoding is greedy."""
    played: list[list[_Turn]] = [[] for _ in problems]
    contexts = {run: problem.prompt for run, problem in enumerate(problems)}
    for turn in range(task.turns):
        going_on: dict[int, Tokens] = {}
        first = turn * task.response_length
        by_length: dict[int, list[int]] = {}  # contexts of one length need no padding
        for run, context in contexts.items():
            by_length.setdefault(len(context), []).append(run)
        for runs in by_length.values():
            begun = [contexts[run] for run in runs]
            mine = None if numbers is None else numbers[runs, first : first + task.response_length]
            spoken = zip(begun, *_speak(policy, begun, task.response_length, mine), strict=True)
            for run, (context, response, logprobs) in zip(runs, spoken, strict=True):
                verdict = task.judge(problems[run], response, turn)
                played[run].append(_Turn(context, response, logprobs, verdict))
                reply = verdict.reply
                going_on |= {} if reply is None else {run: (*context, *response, *reply)}
        contexts = going_on
    return played


def _speak(
    policy: TransformerPolicy, contexts: Sequence[Tokens], length: int, numbers: Draws
) -> tuple[list[Tokens], Tensor]:
    """Return ``length`` tokens for each context, and their log-probs ``[runs, length]``."""
    # The runs of a group share their prompt: it is read once, then its cache is copied. With the
    # cache, 16 x 16 runs of three tokens take a quarter of the time of reading everything anew.
    distinct = {context: row for row, context in enumerate(dict.fromkeys(contexts))}
    cache, device = policy.new_cache(), policy.head.weight.device
    logits = policy.read(torch.tensor(list(distinct), device=device), cache)
    rows = torch.tensor([distinct[context] for context in contexts], device=device)
    logits, cache = logits[rows], cache.take(rows)
    tokens: list[Tensor] = []
    scores: list[Tensor] = []
    for place in range(length):
        if place:
            logits = policy.read(tokens[-1], cache)
        logprobs = torch.log_softmax(logits.float(), -1)
        chosen = logprobs.argmax(-1, keepdim=True)
        if numbers is not None:
            # One token per row: where its number falls in the distribution.
            steps = logprobs.double().exp().cumsum(-1)
            wanted = torch.from_numpy(numbers[:, place]).unsqueeze(-1) * steps[:, -1:]
            # right=True: a token of probability 0 is never chosen, not even by the number 0.
            chosen = torch.searchsorted(steps, wanted, right=True).clamp(max=steps.shape[-1] - 1)
        tokens.append(chosen)
        scores.append(logprobs.gather(-1, chosen))
    return [tuple(row) for row in torch.cat(tokens, -1).tolist()], torch.cat(scores, -1)


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
    teacher = advantage is not None and "teacher_logprob" in advantage.tensors
    return Needs(data, teacher, algorithm.sample.plan(1, groups_per_step).expert)


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

    def rollout(self, pairs: Pairs, *, batch: Key, policy_version: int) -> list[Experience]:
        """Return the solution, or the pair, of each (task, run) of ``batch``."""
        del policy_version
        examples = []
        for index, run in pairs:
            eid, problem = EID(batch, index, run, 0), self.task.problem(self.seed, batch, index)
            prompt, answer = list(problem.prompt), list(problem.answer)
            if self.pairs:
                # As many tokens as the answer has, drawn from those that answers are made of.
                keys = (("wrong", self.seed, batch, index, attempt) for attempt in count())
                drawn = (list(whole_draws(len(answer), 10, *key)) for key in keys)
                wrong = next(tokens for tokens in drawn if tokens != answer)
                example = Experience(eid=eid, tokens=prompt, chosen=answer, rejected=wrong)
            else:
                example = Experience(eid=eid, tokens=prompt + answer, prompt_length=len(prompt))
                example.prompt_text = self.task.text(prompt)
                example.response_text = self.task.text(answer)
            examples.append(example)
        return examples


def require_solutions(task: Task) -> None:
    """Raise InvalidArgumentError unless the prompt of a problem determines its answer."""
    if not task.has_solutions:
        raise InvalidArgumentError(
            f"task {task.name!r} has no solutions to learn from, its answers are hidden: whatever "
            "needs solutions, pairs, a teacher or an expert learns the task 'sort'"
        )
