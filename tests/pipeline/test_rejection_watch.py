"""A consumer that rejects everything says so, and ends where the rows are at fault."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.handles import Experiment, Store
from tests.sample_run import rollout
from trinity_buffer import open_store, run_strategy
from trinity_buffer.errors import TrainingError
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.coordination.waiting import RejectionWatch


def rows(tasks: int, *, reward: float | None = None) -> list[Experience]:
    made = [rollout("b0", task, run, 1.0) for task in range(tasks) for run in range(2)]
    for one in made:
        one.logprobs, one.reward = None, reward
    return made


async def recorded(store: Store, made: list[Experience], **config: Any) -> Experiment:
    experiment = await store.experiment("run", config={"rollouts_per_group": 2, **config})
    await experiment.writer("test").write(made)
    return experiment


async def test_a_trainer_whose_rows_all_lack_a_column_ends_and_names_the_first(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, rows(9, reward=1.0), max_rejected_steps=5)
        options: dict[str, Any] = {"strategy": None, "needs": ("logprobs",)}
        with caplog.at_level(logging.WARNING):
            async with experiment.train_stream(**options) as stream:
                with pytest.raises(
                    TrainingError, match=r"5 steps in a row as invalid: logprobs \(first b0/"
                ):
                    await anext(stream)
    (warning,) = [record for record in caplog.records if "coordination.waiting" in record.name]
    assert "'trainer' has rejected everything of 3 steps in a row" in warning.getMessage()


async def test_one_row_that_can_be_trained_begins_the_count_anew(store_url: str) -> None:
    made = rows(12, reward=1.0)
    for run, one in enumerate(made[8:10]):
        one.logprobs = rollout("b0", 4, run, 1.0).logprobs
    async with open_store(store_url) as store:
        experiment = await recorded(store, made, max_rejected_steps=8)
        options: dict[str, Any] = {"strategy": None, "needs": ("logprobs",)}
        async with experiment.train_stream(**options) as stream:
            steps = [step async for step in stream]
    assert [step.step for step in steps] == [1]


async def test_a_strategy_whose_rows_all_lack_a_reward_ends(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, rows(4), max_rejected_steps=4)
        with pytest.raises(
            TrainingError,
            match=r"strategy 'grpo' .* 4 groups in a row as invalid: reward \(first b0/0/0",
        ):
            await run_strategy(experiment, "grpo")


async def test_a_filter_that_keeps_nothing_goes_on_and_says_so(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, rows(9, reward=1.0), groups_per_step=3)
        with caplog.at_level(logging.WARNING):
            report = await run_strategy(experiment, "reward_variance")
    assert (report.annotated, report.rejected) == (0, 18)
    (warning,) = [record for record in caplog.records if "coordination.waiting" in record.name]
    assert "of 9 groups in a row as zero_variance (first b0/0/0" in warning.getMessage()


@pytest.mark.parametrize(("groups", "said"), [(47, False), (48, True)])
async def test_a_filter_may_keep_nothing_of_a_few_groups(
    groups: int, said: bool, sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, rows(groups, reward=1.0))
        with caplog.at_level(logging.WARNING):
            await run_strategy(experiment, "reward_variance")
    told = [each.getMessage() for each in caplog.records if "coordination.waiting" in each.name]
    assert [f"everything of {groups} groups in a row" in each for each in told] == [True] * said


@pytest.mark.parametrize(
    ("reason", "trained", "options"),
    [
        ("stale", 1, {"sample_strategy": "staleness_control", "max_staleness": 0}),
        ("oversize", 0, {"max_tokens": 2}),
    ],
)
async def test_a_trainer_that_is_given_nothing_of_use_says_so_once_and_goes_on(
    reason: str,
    trained: int,
    options: dict[str, Any],
    store_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = rows(9, reward=1.0)
    for one in made:
        one.info["model_version"] = 0
    async with open_store(store_url) as store:
        experiment = await recorded(store, made, max_rejected_steps=4)
        with caplog.at_level(logging.WARNING):
            async with experiment.train_stream(strategy=None, **options) as stream:
                assert len([step async for step in stream]) == trained
    (warning,) = [record for record in caplog.records if "coordination.waiting" in record.name]
    assert f"steps in a row as {reason} (first b0/{trained}/0/0" in warning.getMessage()


def test_what_is_too_old_does_not_hide_that_the_rest_is_faulty() -> None:
    watch = RejectionWatch("trainer 't'", groups_per_step=2, max_rejected_steps=2)
    watch.rejected(6, {"stale"}, lambda: "b/0/0/0")
    watch.rejected(2, {"invalid"}, lambda: "b/1/0/0")
    with pytest.raises(TrainingError, match=r"5 steps in a row as invalid, stale \(first b/0/0/0"):
        watch.rejected(2, {"invalid"}, lambda: "b/2/0/0")
