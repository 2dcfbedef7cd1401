"""What is said where a strategy of the user's own goes wrong."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from typing_extensions import override

from tests.contract.making import group, opened
from tests.handles import Experiment
from trinity_buffer import run_strategy
from trinity_buffer.algorithm.add_strategy import (
    AddStrategy,
    GroupAdvantageStrategy,
    GRPOAddStrategy,
    RewardStrategy,
)
from trinity_buffer.algorithm.advantage_fn import GroupAdvantage
from trinity_buffer.algorithm.annotating import annotate
from trinity_buffer.algorithm.copies import copy_experience
from trinity_buffer.algorithm.group_scores import Rewards, ScoredGroups
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.experience import Experience, group_by
from trinity_buffer.pipeline.annotate.consumer import StrategyConsumer
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


class Grouped(GroupAdvantageStrategy):
    """Forgets the `return`, as the user's own may."""

    families: ClassVar[tuple[str, ...]] = ("light",)

    @override
    def group_experiences(self, exps: list[Experience]) -> dict[str, list[Experience]]:
        """Return the runs of each task."""
        return group_by(exps, "task")

    @override
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> Any:
        """Return nothing."""


class Advantages(GroupAdvantage):
    """The same as an advantage function."""

    families: ClassVar[tuple[str, ...]] = ("light",)

    @override
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> Any:
        """Return a number."""
        return 3


@pytest.mark.parametrize(("strategy", "kind"), [(Grouped, "None"), (Advantages, ".*type int")])
async def test_what_scores_a_group_and_returns_something_else_is_named(
    sqlite_url: str, strategy: Any, kind: str
) -> None:
    error = await failure(sqlite_url, strategy, len)
    said = f"`calculate_group_advantage` of {strategy.__name__} returned {kind}: it must return"
    with pytest.raises(TypeError, match=f"{said}.*`return exps, {{}}`"):
        raise error


@pytest.mark.parametrize("strategy", [Adding, Scoring])
@pytest.mark.parametrize("annotates", [True, False])
async def test_rows_without_advantages_are_warned_of_once(
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    strategy: Any,
    annotates: bool,
) -> None:
    monkeypatch.setattr(strategy, "annotates", annotates)
    answers = {Adding: lambda _: (2, {}), Scoring: lambda _: ScoredGroups()}
    monkeypatch.setattr(strategy, "answer", staticmethod(answers[strategy]), raising=False)
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        consumer = StrategyConsumer(experiment, strategy)
        for task in range(2):
            await experiment.writer("e0").write(group(task=task, runs=2))
            await consumer.run()
    said = [line for line in caplog.messages if "without advantages" in line]
    assert len(said) == annotates
    assert all(f"strategy '{strategy.__name__}' kept 2 experiences" in line for line in said)


@pytest.mark.parametrize(
    ("strategies", "is_warned"), [(["grpo", "opmd"], True), (["reward_variance", "opmd"], False)]
)
async def test_two_strategies_that_set_advantages_are_warned_of(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, strategies: list[str], is_warned: bool
) -> None:
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(task=0, runs=2))
        await run_strategy(experiment, strategies)
    said = "'grpo+opmd': each of grpo, opmd sets advantages, and those of opmd stay"
    assert (said in caplog.text) == is_warned == ("sets advantages" in caplog.text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([0.5] * 5, "advantages of type list, which is not a tensor: .* give \\[5\\]"),
        (0.5, "advantages of type float, which is not a tensor"),
        (np.ones(5, np.float32), "advantages of type ndarray, which is not a tensor"),
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


class Handing(AddStrategy):
    """Hands out views of memory that it uses again."""

    families: ClassVar[tuple[str, ...]] = ("light",)
    memory: ClassVar[torch.Tensor] = torch.zeros(2, 5)

    @override
    async def add(self, experiences: list[Experience], step: int) -> Any:
        """Write all."""
        self.memory[:] = 10.0 * step + torch.tensor([[one.reward] for one in experiences])
        for one, row in zip(experiences, self.memory, strict=True):
            one.advantages = one.returns = row
        await self.writer.write(experiences)
        return len(experiences), {}


class Masking(AddStrategy):
    """Drops a token from the mask that it was given."""

    families: ClassVar[tuple[str, ...]] = ("light",)

    @override
    async def add(self, experiences: list[Experience], step: int) -> Any:
        """Write all."""
        for one in experiences:
            one.action_mask = torch.tensor([True, True, False, True, True])
            annotate(one, 2.0)
        await self.writer.write(experiences)
        return len(experiences), {}


async def advantages(experiment: Experiment) -> list[list[float]]:
    """Return those of the only annotation set, in the order of the log."""
    async with experiment.train_stream(strategy="s", groups_per_step=9) as stream:
        (step,) = [step async for step in stream]
    found = [microbatch["advantages"][:, -5:] for microbatch in step.microbatches]
    rows: list[list[float]] = torch.cat(found).tolist()
    return rows


async def test_memory_that_a_strategy_uses_again_is_of_one_unit(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        for task in range(3):
            await experiment.writer("e0").write(group(task=task, runs=2))
        await run_strategy(experiment, Handing, name="s")
        found = [row[-1] for row in await advantages(experiment)]
        assert found == [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]


async def test_advantages_are_those_of_the_mask_that_is_stored(sqlite_url: str) -> None:
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(runs=2))
        await run_strategy(experiment, Masking, name="s")
        assert await advantages(experiment) == [[2.0, 2.0, 0.0, 2.0, 2.0]] * 2


def renamed(one: Experience, **changed: Any) -> Experience:
    one.eid = replace(one.eid, **changed)
    return one


MISNAMED: dict[str, tuple[Callable[[list[Experience]], list[Experience]], str]] = {
    "all twice": (lambda some: some * 2, "wrote b/0/0/0/ twice: a copy is made by"),
    "one twice": (lambda some: [*some, some[1]], "wrote b/0/1/0/ twice: a copy is made by"),
    "a copy of the same name": (lambda some: [*some, copy.copy(some[1])], "wrote b/0/1/0/ twice"),
    "another group": (
        lambda some: [renamed(one, task="other") for one in some],
        "wrote b/0/0/0/ as b/other/0/0/: what it keeps stays under its own address",
    ),
    "another run": (lambda some: [renamed(some[0], run=7)], "wrote b/0/0/0/ as b/0/7/0/"),
    "another row": (
        lambda some: [renamed(some[0], run=1), renamed(some[1], run=0)],
        "wrote b/0/0/0/ as b/0/1/0/",
    ),
    "a copy in a group of others": (
        lambda some: [*some, copy_experience(some[1], task=1, suffix="c1")],
        "wrote b/0/1/0/ as b/1/1/0/c1",
    ),
    "two copies of one name": (
        lambda some: [*some, *[copy_experience(some[1], task="0~c1", suffix="c1")] * 2],
        "wrote b/0~c1/1/0/c1 twice",
    ),
}


@pytest.mark.parametrize("name", MISNAMED)
async def test_who_is_written_twice_or_under_another_name_is_named(
    sqlite_url: str, name: str
) -> None:
    change, said = MISNAMED[name]

    class Misnaming(AddStrategy):
        families: ClassVar[tuple[str, ...]] = ("light",)

        @override
        async def add(self, experiences: list[Experience], step: int) -> Any:
            some = change(experiences) if step == 0 else experiences
            for one in some:
                annotate(one, 1.0)
            await self.writer.write(some)
            return len(some), {}

    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(task=0, runs=2) + group(task=1, runs=2))
        with pytest.raises(InvalidArgumentError, match=re.escape(f"'s' {said}")):
            await run_strategy(experiment, Misnaming, name="s")
        assert [e async for e in experiment.events(kinds=("ExperiencesAnnotated",))] == []


async def test_a_copy_under_a_name_of_its_own_is_written(sqlite_url: str) -> None:
    class Copying(AddStrategy):
        families: ClassVar[tuple[str, ...]] = ("light",)

        @override
        async def add(self, experiences: list[Experience], step: int) -> Any:
            copies = [copy_experience(one, task="0~c1", suffix="c1") for one in experiences]
            beside = copy_experience(experiences[0], task=0, suffix="c1")
            for number, one in enumerate((*experiences, beside, *copies)):
                annotate(one, float(number))
                await self.writer.write([one])
            return 5, {}

    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(runs=2))
        assert (await run_strategy(experiment, Copying, name="s")).annotated == 5
        found = [row[0] for row in await advantages(experiment)]
        assert sorted(found) == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_a_class_by_its_path_takes_its_place_in_a_list_of_strategies(store_url: str) -> None:
    path = "trinity_buffer.algorithm.add_strategy:GRPOAddStrategy"
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())
        for number, args in enumerate(({}, {path: {"epsilon": 0.5}})):
            strategies, name = ["reward_variance", path], f"set-{number}"
            report = await run_strategy(experiment, strategies, args, name=name)
            assert (report.annotated, report.rejected) == (4, 0)


class Shaping(AddStrategy):
    """Leaves the second half of each answer out, and shapes its reward."""

    in_place: ClassVar[bool] = True

    @override
    async def add(self, experiences: list[Experience], step: int) -> Any:
        """Write all."""
        for one in experiences:
            assert one.action_mask is not None
            if not self.in_place:
                one.action_mask = one.action_mask.clone()
            one.action_mask[2:] = False
            one.reward = 7.0
            one.advantages = one.returns = one.action_mask * 1.0
        await self.writer.write(experiences)
        return len(experiences), {}


@pytest.mark.parametrize("in_place", [True, False])
async def test_a_changed_mask_is_warned_of_and_its_advantages_are_stored(
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_place: bool,
) -> None:
    monkeypatch.setattr(Shaping, "in_place", in_place)
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(task=0, runs=2) + group(task=1, runs=2))
        await run_strategy(experiment, Shaping)
        async with experiment.train_stream(strategy="Shaping", consumer="t") as stream:
            step = await anext(stream)
    (microbatch,) = step.microbatches
    # Three tokens of the prompt, two that were kept, three that were not.
    assert microbatch["advantages"].tolist() == [[0.0] * 3 + [1.0] * 2 + [0.0] * 3] * 2
    said = [line for line in caplog.messages if "which is not stored" in line]
    assert len(said) == 1
    assert "strategy 'Shaping' changed action_mask and reward of what it keeps" in said[0]


async def test_a_strategy_may_run_in_inference_mode(sqlite_url: str) -> None:
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(runs=2))
        with torch.inference_mode():
            report = await run_strategy(experiment, Shaping)
        assert report.annotated == 2


class Editing(GRPOAddStrategy):
    """Changes one field of each row; it counts runs, and one row takes the reward of its run."""

    field: ClassVar[str] = ""
    by_numpy: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = ("light", "tokens")

    @override
    def calculate_group_advantage(
        self, group_id: str, exps: list[Experience]
    ) -> tuple[list[Experience], dict[str, float]]:
        for one in exps:
            if self.field == "reward":
                assert one.reward is not None
                one.reward -= 0.5
            elif self.field:
                edited = getattr(one, self.field)
                edited = edited.numpy() if self.by_numpy else edited
                edited += 1
        return super().calculate_group_advantage(group_id, exps)


@pytest.mark.parametrize("by_numpy", [False, True])
@pytest.mark.parametrize("field", ["", "logprobs", "tokens", "reward"])
async def test_a_field_that_is_changed_without_effect_is_warned_of(
    sqlite_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    field: str,
    by_numpy: bool,
) -> None:
    monkeypatch.setattr(Editing, "field", field)
    monkeypatch.setattr(Editing, "by_numpy", by_numpy)
    first, *others = group(task=0, runs=2)
    turn = copy_experience(first, task=0, suffix="")
    turn.eid, turn.info = replace(first.eid, step=1), {}
    first.reward = None
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write([first, turn, *others])
        assert (await run_strategy(experiment, Editing)).annotated == 3
    said = [line for line in caplog.messages if "which is not stored" in line]
    assert len(said) == bool(field)
    assert all(f"changed {field} of what it keeps" in line for line in said)


@pytest.mark.parametrize("last", ["grpo", "step_wise_grpo"])
async def test_a_penalty_takes_the_reward_of_the_run_too(sqlite_url: str, last: str) -> None:
    first, *others = group(task=0, runs=2)
    turn = copy_experience(first, task=0, suffix="")
    turn.eid, turn.info = replace(first.eid, step=1), {}
    first.reward = None
    args = {"overlong_penalty": {"max_length": 4, "cache_length": 2}}
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write([first, turn, *others])
        report = await run_strategy(experiment, ["overlong_penalty", last], args)
    assert (report.annotated, report.rejected) == (3, 0)


@pytest.mark.parametrize(
    ("strategies", "is_lost"),
    [
        (["grpo"], False),
        (["overlong_penalty", "grpo"], False),
        (["overlong_penalty", "outcome_gate"], True),
    ],
)
async def test_a_reward_that_a_list_hands_on_is_warned_of_if_nothing_is_computed_from_it(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, strategies: list[str], is_lost: bool
) -> None:
    every = {"overlong_penalty": {"max_length": 4, "cache_length": 2}}
    every["outcome_gate"] = {"min_correct": 0}
    args = {name: every.get(name, {}) for name in strategies if len(strategies) > 1}
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(task=0, runs=2))
        assert (await run_strategy(experiment, strategies, args)).annotated == 2
    assert ("changed reward of what it keeps, which is not stored" in caplog.text) == is_lost
