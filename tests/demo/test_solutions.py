"""Recorded data: answers that are right, pairs whose second answer is wrong, the same always."""

from __future__ import annotations

import pytest

from trinity_buffer.demo.rollout import SolutionSampler
from trinity_buffer.demo.tasks import GuessNumber, SortDigits
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience

RUNS = [(index, 0) for index in range(40)]


def made(*, pairs: bool = False, digits: int = 1, seed: int = 0) -> list[Experience]:
    sampler = SolutionSampler(SortDigits(digits), seed, pairs=pairs)
    return sampler.load("nowhere").rollout(RUNS, batch="e0-0", policy_version=7)


def test_a_solution_is_a_prompt_with_its_answer() -> None:
    task = SortDigits(3)
    for index, one in enumerate(made(digits=3)):
        problem = task.problem(0, "e0-0", index)
        assert one.tokens.tolist() == [*problem.prompt, *problem.answer]
        assert one.prompt_length == len(problem.prompt)
        assert one.reward is None
        assert one.logprobs is None


def test_the_second_answer_of_a_pair_is_never_the_first() -> None:
    for one in made(pairs=True):  # of one digit: a draw hits the answer every tenth time
        assert one.chosen is not None
        assert one.rejected is not None
        assert len(one.chosen) == len(one.rejected)
        assert one.chosen.tolist() != one.rejected.tolist()


def test_data_that_are_made_again_are_the_same() -> None:
    once, again, other = made(pairs=True), made(pairs=True), made(pairs=True, seed=1)
    assert [str(e.rejected) for e in once] == [str(e.rejected) for e in again]
    assert [str(e.tokens) for e in once] != [str(e.tokens) for e in other]


def test_a_task_whose_answers_are_hidden_has_no_solutions() -> None:
    with pytest.raises(InvalidArgumentError, match="task 'guess' has no solutions"):
        SolutionSampler(GuessNumber(), 0)
