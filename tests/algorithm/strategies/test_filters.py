from __future__ import annotations

import math
from typing import Any

import pytest

from tests.algorithm.strategies.rollouts import (
    PlainWriter,
    group,
    rejected,
    rollout,
    scores,
    written,
)
from trinity_buffer.algorithm.add_strategy import (
    BestOfGroupAddStrategy,
    DynamicSamplingAddStrategy,
    OutcomeGateAddStrategy,
    OverlongPenaltyAddStrategy,
    compose,
)
from trinity_buffer.errors import InvalidExperienceError
from trinity_buffer.experience import Experience
from trinity_buffer.writer import StagedWriter


def graded(outcomes: list[Any], task: Any, rewards: list[float] | None = None) -> list[Experience]:
    """Return a group with an ``accuracy`` in the metrics of each run."""
    exps = group(rewards or outcomes, task)
    for e, outcome in zip(exps, outcomes, strict=True):
        e.metrics["accuracy"] = outcome
    return exps


async def test_dynamic_sampling_keeps_groups_with_successes_and_failures() -> None:
    writer = StagedWriter()
    exps = [*graded([1, 1], "all"), *graded([0, 0], "none"), *graded([0, 1], "some")]
    count, metrics = await DynamicSamplingAddStrategy(writer).add(exps, 0)
    assert count == 2
    assert {e.eid.task for e in written(writer)} == {"some"}
    assert {uid.split("/")[1]: why for uid, why in rejected(writer)} == {
        "all": "all_correct",
        "none": "all_wrong",
    }
    assert metrics == {"kept_groups": 1, "all_wrong_groups": 1, "all_correct_groups": 1}


async def test_an_outcome_gate_drops_failures_that_a_shaped_reward_tells_apart() -> None:
    writer = StagedWriter()
    exps = [*graded([0, 0], "failed", [0.1, 0.4]), *graded([1, 1], "solved", [1.0, 0.8])]
    await OutcomeGateAddStrategy(writer).add(exps, 0)
    assert {e.eid.task for e in written(writer)} == {"solved"}
    assert {reason for _, reason in rejected(writer)} == {"all_wrong"}


async def test_the_outcome_may_be_in_info_and_the_reward_stands_in_for_it() -> None:
    writer = StagedWriter()
    exps = [*group([0.0, 0.0], "info"), *group([-1.0, 2.0], "reward")]
    exps[0].info["pass"] = 1.0
    exps[1].info["pass"] = 0.0
    await DynamicSamplingAddStrategy(writer, metric_key="pass").add(exps, 0)
    assert {e.eid.task for e in written(writer)} == {"info", "reward"}


@pytest.mark.parametrize(
    "outcome", [math.nan, math.inf, "yes", [1.0], pytest.param(10**400, id="huge")]
)
async def test_an_outcome_that_is_no_number_is_neither_success_nor_failure(outcome: Any) -> None:
    writer = StagedWriter()
    await DynamicSamplingAddStrategy(writer).add(graded([outcome, 0], "broken", [1.0, 0.0]), 0)
    assert [why for _, why in rejected(writer)] == ["invalid: accuracy", "all_wrong"]


def turns(outcomes: list[Any], task: str) -> list[Experience]:
    """Return runs of three rows, of which the last has a shaped reward and the ``accuracy``."""
    rows = [
        [rollout(task, run, reward, step=step) for step, reward in enumerate((None, None, 0.3))]
        for run in range(len(outcomes))
    ]
    for of_run, outcome in zip(rows, outcomes, strict=True):
        of_run[-1].metrics["accuracy"] = outcome
    return [e for of_run in rows for e in of_run]


async def test_the_outcome_of_the_last_row_is_that_of_its_run() -> None:
    writer = StagedWriter()
    exps = [*turns([0.0, 0.0], "failed"), *turns([0.0, 1.0], "some"), *turns([1.0, None], "one")]
    exps += turns([math.nan, 1.0, 0.0], "broken")
    await DynamicSamplingAddStrategy(writer, over="runs").add(exps, 0)
    reasons = [(uid.split("/")[1:3], why) for uid, why in rejected(writer)]
    assert reasons == [
        *[(["broken", "0"], "invalid: accuracy")] * 3,
        *[(["failed", run], "all_wrong") for run in "000111"],
        *[(["one", run], "all_correct") for run in "000111"],
    ]
    assert len(written(writer)) == 12


async def test_neither_outcome_nor_reward_is_refused() -> None:
    with pytest.raises(InvalidExperienceError, match="reward"):
        await DynamicSamplingAddStrategy(PlainWriter()).add([rollout(reward=None)], 0)


async def test_the_best_run_of_each_group_is_kept() -> None:
    writer = StagedWriter()
    exps = [*group([0.0, 2.0, 2.0], "a"), *group([-1.0, -3.0], "b")]
    await BestOfGroupAddStrategy(writer, min_reward=0.0).add(exps, 0)
    assert [e.eid.uid for e in written(writer)] == ["b/a/1/0/"]
    assert {reason for _, reason in rejected(writer)} == {"filtered"}
    assert len(writer.rejections) == 4


@pytest.mark.parametrize(
    ("length", "charge"), [(6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (99, -1.0)]
)
def test_the_overlong_penalty_grows_linearly_before_the_limit(length: int, charge: float) -> None:
    strategy = OverlongPenaltyAddStrategy(PlainWriter(), max_length=10, cache_length=4)
    assert strategy.penalty_of(length) == charge


async def test_the_overlong_penalty_reaches_the_advantages_of_the_strategy_behind_it() -> None:
    writer = StagedWriter()
    exps = [rollout(0, 0, 1.0, mask=(1,) * 2), rollout(0, 1, 1.0, mask=(1,) * 8)]
    strategy = compose(
        writer,
        ["overlong_penalty", "grpo"],
        {"overlong_penalty": {"max_length": 8, "cache_length": 4}, "grpo": {"epsilon": 0.0}},
    )
    _, metrics = await strategy.add(exps, 0)
    assert scores(written(writer)) == pytest.approx([2**-0.5, -(2**-0.5)])
    assert metrics["overlong/penalized_count"] == 1


@pytest.mark.parametrize(
    ("order", "warnings"),
    [
        (["grpo", "overlong_penalty"], 1),
        (["grpo", "overlong_penalty", "opmd"], 0),
        (["overlong_penalty", "grpo", "best_of_group"], 0),
    ],
)
async def test_a_penalty_behind_what_makes_the_advantages_is_warned_of_once(
    order: list[str], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    args = {"overlong_penalty": {"max_length": 8, "cache_length": 4}}
    strategy = compose(StagedWriter(), order, args)
    await strategy.add([rollout(mask=(1,) * 2)], 0)
    assert not caplog.messages  # nothing was penalized
    for _ in range(2):
        await strategy.add([rollout(mask=(1,) * 8)], 0)
    assert len(caplog.messages) == warnings
    assert all("put 'overlong_penalty' before 'grpo'" in each for each in caplog.messages)
