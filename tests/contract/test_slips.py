"""What is given by mistake is named, or doubted."""

from __future__ import annotations

import re
from typing import Any, cast

import anyio
import pytest
import torch

from tests.contract.making import kinds, opened, rollout
from tests.contract.test_committing import OPTIONS, annotated
from trinity_buffer.errors import InvalidArgumentError

NO_EXPERIENCES: dict[str, Any] = {
    "takes a list of experiences, not Experience": rollout(),
    "takes a list of experiences, not 3": 3,
    "takes a list of experiences, not None": None,
    "item 1 is None": [rollout(), None],
    "item 0 is [Experience": [[rollout()]],
    "item 0 is 'batch'": {"batch": [rollout()]},
}
"""What is given to a writer by mistake."""


@pytest.mark.parametrize("told", NO_EXPERIENCES)
async def test_what_is_no_list_of_experiences_is_named(new_sqlite_url: str, told: str) -> None:
    async with opened(new_sqlite_url) as experiment:
        with pytest.raises(InvalidArgumentError, match=re.escape(told)):
            await experiment.writer("e0").write(NO_EXPERIENCES[told])


async def test_a_commit_of_something_else_than_a_step_is_refused(new_sqlite_url: str) -> None:
    async with (
        annotated(new_sqlite_url) as experiment,
        experiment.train_stream(**OPTIONS) as stream,
    ):
        step: Any = await anext(stream)
        with pytest.raises(InvalidArgumentError, match=r"takes a step of the stream, not 1$"):
            await stream.commit(step.step)


async def test_numbers_of_a_commit_come_back_by_the_names_that_they_had(
    new_sqlite_url: str,
) -> None:
    metrics: dict[Any, float] = {"loss": 0.5, 1: 2.0}
    async with annotated(new_sqlite_url) as experiment:
        async with experiment.train_stream(**OPTIONS) as stream:
            await stream.commit(await anext(stream), metrics=metrics, environment=metrics)
        (event,) = [e async for e in experiment.events(kinds=["StepsCommitted"])]
    assert event.body["metrics"] == event.body["environment"] == metrics


@pytest.mark.parametrize("slip", [5, None, b"enough"])
async def test_what_could_not_be_read_again_is_not_recorded(new_sqlite_url: str, slip: Any) -> None:
    async with opened(new_sqlite_url) as experiment:
        with pytest.raises(InvalidArgumentError, match=r"reason=.*, it must be a text$"):
            await experiment.finish(slip)
        with pytest.raises(InvalidArgumentError, match=r"contents='x', it must be bytes, or None$"):
            await experiment.writer("e0").plan("b", [1], 2, contents=cast("Any", "x"))
        with pytest.raises(InvalidArgumentError, match=r"expected=None, it must be an int$"):
            await experiment.writer("e0").seal("b", cast("Any", None))
        assert await kinds(experiment) == ["ExperimentCreated"]


async def test_logprobs_above_zero_are_doubted_once(
    new_sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    sound, without, wrong = (rollout(run=run) for run in range(3))
    without.logprobs = None
    wrong.logprobs = torch.tensor([-0.5, 0.0, 0.7, 0.9, 0.1])
    rounded = rollout(task=1)
    rounded.logprobs = torch.full((5,), 1e-3)
    async with opened(new_sqlite_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write([rounded])
        assert not caplog.messages
        await writer.write([sound, without, wrong])
        (said,) = caplog.messages
        assert said.startswith("experience b/0/2/0/: logprobs up to 0.9: ")
        again = rollout(task=2)
        again.logprobs = torch.ones(5)
        await writer.write([again])
    assert caplog.messages == [said]


async def test_logprobs_above_zero_are_doubted_in_calls_that_share_an_event(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    some = [rollout(run=run) for run in range(32)]
    for one in some:
        one.logprobs = torch.full((5,), 0.7)
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        async with anyio.create_task_group() as tasks:
            for one in some:
                tasks.start_soon(writer.write, [one])
        kinds = [event.kind async for event in experiment.events()]
    assert kinds.count("ExperiencesRecorded") == 1
    (said,) = caplog.messages
    assert re.match(r"experience b/0/\d+/0/: logprobs up to 0\.7: ", said)


async def test_logprobs_above_zero_are_doubted_in_every_type_of_number(
    new_sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(new_sqlite_url) as experiment:
        for task, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.float64)):
            one = rollout(task=task)
            one.logprobs = torch.tensor([-0.5, 0.0, 0.005, 0.75, -3.0], dtype=dtype)
            await experiment.writer(f"e{task}").write([one])
    assert [said.partition(": natural")[0] for said in caplog.messages] == [
        f"experience b/{task}/0/0/: logprobs up to 0.75" for task in range(4)
    ]
