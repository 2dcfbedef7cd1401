"""The tasks: what they ask, and what they pay."""

from __future__ import annotations

import pytest

from trinity_buffer.cli.run_config import resolved
from trinity_buffer.demo.tasks import HELD_OUT, TASKS, GuessNumber, Problem, SortDigits
from trinity_buffer.errors import InvalidArgumentError

HIGHER, LOWER, OPENING = 8, 9, 10


def test_digits_are_paid_by_the_right_positions() -> None:
    task = SortDigits(digits=3)
    problem = Problem(prompt=(7, 1, 4, SortDigits.EQUALS), answer=(1, 4, 7))
    rewards = [task.judge(problem, said, 0).reward for said in ((1, 4, 7), (1, 7, 4), (7, 1, 4))]
    assert rewards == [1.0, 1 / 3, 0.0]
    assert [task.judge(problem, s, 0).solved for s in ((1, 4, 7), (1, 4, 4))] == [True, False]
    assert task.judge(problem, (1, 4, 7), 0).reply is None


def test_the_answer_of_a_problem_is_its_prompt_in_order() -> None:
    task = SortDigits(digits=5)
    for index in range(20):
        problem = task.problem(1, "e0-1", index)
        assert problem.prompt[-1] == SortDigits.EQUALS
        assert list(problem.answer) == sorted(problem.prompt[:-1])


def test_guesses_are_answered_by_higher_and_lower() -> None:
    task, problem = GuessNumber(numbers=8, turns=3), Problem(prompt=(OPENING,), answer=(5,))
    assert task.judge(problem, (4,), 0).reply == (HIGHER,)
    assert task.judge(problem, (6,), 1).reply == (LOWER,)
    assert task.judge(problem, (6,), 2).reply is None
    assert not task.judge(problem, (6,), 2).solved


def test_a_late_find_is_paid_as_an_early_one() -> None:
    task, problem = GuessNumber(numbers=8, turns=4), Problem((OPENING,), (5,))
    found = [task.judge(problem, (5,), turn) for turn in range(4)]
    assert [verdict.reward for verdict in found] == [1.0] * 4
    assert all(verdict.solved and verdict.reply is None for verdict in found)


@pytest.mark.parametrize("word", [HIGHER, LOWER, OPENING])
def test_a_guess_that_is_no_number_ends_the_run_unpaid(word: int) -> None:
    verdict = GuessNumber(numbers=8).judge(Problem((OPENING,), (5,)), (word,), 0)
    assert (verdict.reward, verdict.solved, verdict.reply) == (0.0, False, None)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_problems_depend_on_seed_batch_and_index_alone(name: str) -> None:
    task = TASKS[name]()
    problems = [task.problem(1, "e0-1", index) for index in range(50)]
    assert problems == [task.problem(1, "e0-1", str(index)) for index in range(50)]
    for others in (
        [task.problem(2, "e0-1", index) for index in range(50)],
        [task.problem(1, "e0-2", index) for index in range(50)],
        [task.problem(1, index, stream=HELD_OUT) for index in range(50)],
    ):
        assert problems != others


@pytest.mark.parametrize("task", [SortDigits(3), SortDigits(5), GuessNumber(8), GuessNumber(16, 5)])
def test_problems_cover_everything_that_may_be_asked(task: SortDigits | GuessNumber) -> None:
    highest = 9 if isinstance(task, SortDigits) else task.numbers - 1
    asked = {token for index in range(300) for token in task.problem(0, "b", index).answer}
    assert asked == set(range(highest + 1))
    assert task.vocab_size > highest


def test_tokens_can_be_read_by_people() -> None:
    assert SortDigits().text((7, 1, 4, SortDigits.EQUALS)) == "7 1 4 ="
    assert GuessNumber(numbers=8).text((OPENING, 3, HIGHER, 6, LOWER)) == "guess 3 higher 6 lower"


@pytest.mark.parametrize(
    ("task", "wrong"), [("sort", {"digits": 0}), ("guess", {"numbers": 1}), ("guess", {"turns": 0})]
)
def test_an_impossible_task_is_refused(task: str, wrong: dict[str, int]) -> None:
    ((key, value),) = wrong.items()
    with pytest.raises(InvalidArgumentError, match=f"task.{key}={value}: it must be an integer"):
        resolved({"task": {"name": task, **wrong}})
