"""What is said where a strategy of the user's own goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from typing_extensions import override

from tests.contract.making import group, opened
from trinity_buffer.algorithm.add_strategy import AddStrategy, RewardStrategy
from trinity_buffer.algorithm.group_scores import Rewards
from trinity_buffer.algorithm.reward_scores import ScoredGroups
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.annotating.strategy_consumer import run_strategy
from trinity_buffer.writer import StagedWriter


def fail(_: object) -> Any:
    raise KeyError("no judge")


class Adding(AddStrategy):
    """Returns what it is told to."""

    families: ClassVar[tuple[str, ...]] = ("light",)
    answer: ClassVar[Callable[[Any], Any]]

    @override
    async def add(self, experiences: list[Experience], step: int) -> Any:
        """Write all."""
        await self.writer.write(experiences)
        return type(self).answer(experiences)


class Scoring(RewardStrategy):
    """Returns what it is told to."""

    answer: ClassVar[Callable[[Any], Any]]

    @override
    def score_groups(self, rewards: Rewards) -> Any:
        """Score."""
        return type(self).answer(rewards)


class ScoringInAdd(Scoring):
    """The same by way of `add`."""

    @override
    def rewards_of(self, exps: Any) -> Any:
        """Change nothing, which nobody can know."""
        return super().rewards_of(exps)


class Shortening(AddStrategy):
    """Takes out of its list what it leaves out."""

    @override
    async def add(self, experiences: list[Experience], step: int) -> Any:
        """Write one."""
        del experiences[1:]
        for one in experiences:
            one.advantages = one.returns = torch.ones(5)
        await self.writer.write(experiences)
        return 1, {}


@pytest.mark.parametrize("chained", [False, True])
async def test_what_a_strategy_takes_out_of_its_list_is_left_out(
    store_url: str, chained: bool
) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group(task=0) + group(task=1))
        report = await run_strategy(experiment, [Shortening, "grpo"] if chained else Shortening)
        assert (report.annotated, report.rejected, report.waiting) == (2, 6, 0)


async def failure(store_url: str, strategy: Any, answer: Callable[[Any], Any]) -> Exception:
    """Return the error of a strategy that answers so to two groups of two."""
    strategy.answer = staticmethod(answer)
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(task=0, runs=2) + group(task=1, runs=2))
        with pytest.raises((InvalidArgumentError, TypeError, KeyError)) as caught:
            await run_strategy(experiment, [strategy, "grpo"] if answer is fail else strategy)
        assert [event async for event in experiment.events(kinds=("ExperiencesAnnotated",))] == []
    return caught.value


@pytest.mark.parametrize(
    "wrong",
    [None, 3, int, ["grpo", None], Adding(StagedWriter())],
    ids=["None", "int", "class", "list", "instance"],
)
async def test_what_is_no_strategy_is_named(sqlite_url: str, wrong: Any) -> None:
    async with opened(sqlite_url) as experiment:
        with pytest.raises(UnknownNameError, match="is not an AddStrategy") as caught:
            await run_strategy(experiment, wrong)
    assert ("give its class" in str(caught.value)) == isinstance(wrong, AddStrategy)


@pytest.mark.parametrize("strategy", [Adding, Scoring, ScoringInAdd])
async def test_an_error_names_the_strategy_and_what_it_was_given(
    sqlite_url: str, strategy: type
) -> None:
    error = await failure(sqlite_url, strategy, fail)
    (note,) = error.__notes__
    assert f"in strategy '{strategy.__name__}+grpo', which was given b/0/0/0/ first" in note


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda _: None, "returned None: it must return how many"),
        (len, "returned int 2: it must"),
        (lambda _: (2, 0.5), r"returned tuple \(2, 0.5\): it must"),
        (lambda _: (2, {"mean": None}), "returned None as metric 'mean': it must be a number"),
        (lambda _: (2, {"mean": "x"}), "returned str 'x' as metric 'mean': it must be a number"),
    ],
)
async def test_what_add_returns_is_checked(
    sqlite_url: str, answer: Callable[[Any], Any], said: str
) -> None:
    error = await failure(sqlite_url, Adding, answer)
    assert error.__notes__
    with pytest.raises(TypeError, match=said):
        raise error


@pytest.mark.parametrize("strategy", [Scoring, ScoringInAdd])
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda r: r, "returned ndarray, it must return `ScoredGroups`"),
        (lambda r: ScoredGroups(scores=r.mean(1)), r"scores of shape .* must have \[., 2\]"),
        (lambda r: ScoredGroups(scores=r[:, :1]), r"scores of shape .* must have \[., 2\]"),
        (lambda r: ScoredGroups(kept=r[0] > 0), r"kept of shape \[2\]: it must have \[., 2\]"),
        (lambda r: ScoredGroups(scores=r, metrics={"m": np.array(1.0)}), r"metric 'm' of shape"),
    ],
)
async def test_what_score_groups_returns_is_checked_on_both_roads(
    sqlite_url: str, strategy: type, answer: Callable[[Any], Any], said: str
) -> None:
    error = await failure(sqlite_url, strategy, answer)
    assert error.__notes__
    with pytest.raises(InvalidArgumentError, match=said):
        raise error


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([0.5] * 5, "advantages of type list, which is no tensor: .* give \\[5\\]"),
        (0.5, "advantages of type float, which is no tensor"),
        (np.ones(5, np.float32), "advantages of type ndarray, which is no tensor"),
        (torch.ones(5, dtype=torch.complex64), "advantages of dtype torch.complex64"),
        (torch.ones(5).to_sparse(), "advantages of .* layout torch.sparse_coo"),
        (torch.ones(4), r"advantages of shape \[4\]"),
    ],
)
async def test_advantages_that_are_no_numbers_for_each_token_are_refused(
    sqlite_url: str, given: Any, said: str
) -> None:
    def answer(experiences: list[Experience]) -> tuple[int, dict[str, float]]:
        experiences[0].advantages = given
        return 2, {}

    error = await failure(sqlite_url, Adding, answer)
    with pytest.raises(InvalidArgumentError, match=f"'Adding' gave b/0/0/0/ {said}"):
        raise error


@pytest.mark.parametrize("strategy", [Scoring, ScoringInAdd])
@pytest.mark.parametrize("reason", [5, None, b"late"])
async def test_a_reason_that_is_no_text_is_refused(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, strategy: type, reason: Any
) -> None:
    monkeypatch.setattr(strategy, "left_out", reason)
    error = await failure(sqlite_url, strategy, lambda r: ScoredGroups(kept=r > 2))
    with pytest.raises(InvalidArgumentError, match=f"rejects with the reason {reason!r}: it must"):
        raise error
